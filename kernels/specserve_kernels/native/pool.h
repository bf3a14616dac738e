// The threads of native steps: the caller and num_threads - 1 workers that live as long as the
// pool. At a barrier a thread spins for a while, then sleeps: a neighbour process that takes a core
// must cost its share, not a spinning thread's. Between steps workers stay awake for longer, yielding.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace specserve {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();  // no run may be in progress
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // job(context, thread) on every thread, thread 0 being the caller; returns when all are done.
  // Callers take turns.
  using Job = void (*)(void* context, int thread);
  void run(Job job, void* context);

  // Inside a job: nobody passes before all have come.
  void barrier();

 private:
  // A number that one thread advances and others wait for.
  struct Signal {
    alignas(64) std::atomic<uint32_t> value{0};
    std::atomic<int> num_sleepers{0};
    std::mutex mutex;
    std::condition_variable changed;
    void advance();
    bool spin_while(uint32_t seen, int num_spins) const;  // whether it was advanced meanwhile
    // Yields until it was advanced, or so often: false where somebody else took the core.
    bool yield_while(uint32_t seen, int num_yields) const;
    bool wait_while(uint32_t seen, int num_spins);  // spins, then sleeps: whether it need not
  };

  void work(int thread);
  void wait_until_passed(uint32_t seen);

  const int num_threads_;
  std::vector<std::thread> workers_;
  std::mutex turn_;
  Signal start_;    // advances when a job is there
  Signal passed_;   // advances when all have come to a barrier
  alignas(64) std::atomic<int> num_arrived_{0};
  std::atomic<int> num_short_waits_{0};  // still to come; any thread's, not exact
  std::atomic<int> distrust_{0};         // of long waits: grows with those in vain
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
};

}  // namespace specserve
