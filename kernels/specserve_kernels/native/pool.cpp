// See pool.h.
#include "pool.h"

#include <chrono>

namespace specserve {

// A pause takes about 40 ns. Waking a sleeper takes 20 us and more, so between steps, where a wait
// is long, a thread spins for as long as that; inside a step, where the others may be some ten
// microseconds away at every barrier, for ten times as long. Where more than one in five of such
// waits are in vain a neighbour process holds threads back, and spinning would deprive them of their
// core: then waits are short for a while. Number: beside one busy process long waits alone take
// twice as long as short ones alone.
// The next step comes within milliseconds while a text is made, and a worker that slept starts it
// late: so for that long it stays awake, yielding to whoever wants the core. But who yields is out
// for a whole slice (3 ms, even to a process of the lowest priority), who sleeps is woken at once: a
// worker whose yield was taken up sleeps between the next steps.
constexpr int SHORT_SPINS = 500;
constexpr int LONG_SPINS = 5000;
constexpr int SHORT_WAITS = 128;
constexpr int STEP_YIELDS = 1500;  // 2 to 3 ms
constexpr int SPINS_PER_YIELD = 25;
constexpr auto LONGEST_YIELD = std::chrono::microseconds(100);
constexpr int WARY_STEPS = 64;
constexpr int MOST_DISTRUST = 8;
constexpr int DISTRUST_OF_ONE_IN_VAIN = 4;  // a wait that was not takes 1 off

void Pool::Signal::advance() {
  value.fetch_add(1);  // sequentially consistent, as is the sleepers' count: one of both is seen
  if (num_sleepers.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex); }
  changed.notify_all();
}

bool Pool::Signal::spin_while(uint32_t seen, int num_spins) const {
  for (int spin = 0; spin < num_spins; spin++) {
    if (value.load(std::memory_order_acquire) != seen) return true;
    pause_briefly();
  }
  return false;
}

bool Pool::Signal::yield_while(uint32_t seen, int num_yields) const {
  for (int turn = 0; turn < num_yields && value.load(std::memory_order_acquire) == seen; turn++) {
    const auto before = std::chrono::steady_clock::now();
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() - before > LONGEST_YIELD) return false;
    spin_while(seen, SPINS_PER_YIELD);
  }
  return true;
}

bool Pool::Signal::wait_while(uint32_t seen, int num_spins) {
  if (spin_while(seen, num_spins)) return true;
  std::unique_lock<std::mutex> lock(mutex);
  num_sleepers.fetch_add(1);
  changed.wait(lock, [&] { return value.load() != seen; });
  num_sleepers.fetch_sub(1);
  return false;
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
    wait_until_passed(seen);
  }
}

void Pool::wait_until_passed(uint32_t seen) {
  const int short_waits = num_short_waits_.load(std::memory_order_relaxed);
  if (short_waits > 0) {
    num_short_waits_.store(short_waits - 1, std::memory_order_relaxed);
    passed_.wait_while(seen, SHORT_SPINS);
    return;
  }
  const bool in_vain = !passed_.wait_while(seen, LONG_SPINS);
  const int distrust = distrust_.load(std::memory_order_relaxed);
  if (in_vain && distrust + DISTRUST_OF_ONE_IN_VAIN > MOST_DISTRUST)
    num_short_waits_.store(SHORT_WAITS, std::memory_order_relaxed);
  else if (in_vain)
    distrust_.store(distrust + DISTRUST_OF_ONE_IN_VAIN, std::memory_order_relaxed);
  else if (distrust > 0)
    distrust_.store(distrust - 1, std::memory_order_relaxed);
}

void Pool::work(int thread) {
  int num_wary = 0;
  for (uint32_t seen = 0;; seen++) {
    const bool is_crowded = num_short_waits_.load(std::memory_order_relaxed) > 0;
    if (num_wary > 0)
      num_wary--;
    else if (!is_crowded && !start_.yield_while(seen, STEP_YIELDS))
      num_wary = WARY_STEPS;
    start_.wait_while(seen, SHORT_SPINS);
    if (stopping_) return;
    job_(context_, thread);
    barrier();
  }
}

}  // namespace specserve
