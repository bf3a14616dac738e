// See pool.h.
#include "pool.h"

namespace specserve {

// About 20 microseconds where a pause takes 40 ns, as long as waking a sleeper takes.
constexpr int SPINS = 500;

void Pool::Signal::advance() {
  value.fetch_add(1);  // sequentially consistent, as is the sleepers' count: one of both is seen
  if (num_sleepers.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex); }
  changed.notify_all();
}

void Pool::Signal::wait_while(uint32_t seen) {
  for (int spin = 0; spin < SPINS; spin++) {
    if (value.load(std::memory_order_acquire) != seen) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex);
  num_sleepers.fetch_add(1);
  changed.wait(lock, [&] { return value.load() != seen; });
  num_sleepers.fetch_sub(1);
}

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  for (int thread = 1; thread < num_threads; thread++)
    workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  stopping_ = true;
  start_.advance();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Job job, void* context) {
  std::lock_guard<std::mutex> turn(turn_);
  job_ = job;
  context_ = context;
  start_.advance();
  job(context, 0);
  barrier();
}

void Pool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t seen = passed_.value.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1) == num_threads_ - 1) {
    num_arrived_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_while(seen);
  }
}

void Pool::work(int thread) {
  for (uint32_t seen = 0;; seen++) {
    start_.wait_while(seen);
    if (stopping_) return;
    job_(context_, thread);
    barrier();
  }
}

}  // namespace specserve
