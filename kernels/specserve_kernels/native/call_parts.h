// What a step and a head's call are made of: memory that grows, columns and rows dealt out.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace specserve {
namespace {

// Numbers below 2^-126 are taken as 0 while it lives: what a softmax gives to keys that hardly count
// is such a number now and then, and each costs a hundred cycles. Every thread of a step has one,
// so a row's bits are the same wherever it is computed.
class FlushTinyNumbers {
 public:
#if defined(__x86_64__)
  FlushTinyNumbers() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }  // FTZ, DAZ
  ~FlushTinyNumbers() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

constexpr size_t HUGE_PAGE = 2 << 20;

// 64-byte aligned memory that only grows; contents are lost when it does.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : memory_(other.memory_), size_(other.size_) {
    other.memory_ = nullptr;
    other.size_ = 0;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(memory_);
    size_ = (bytes + bytes / 4 + 63) / 64 * 64;
    const size_t page = size_ < HUGE_PAGE ? 64 : HUGE_PAGE;
    size_ = (size_ + page - 1) / page * page;
    memory_ = std::aligned_alloc(page, size_);
#if defined(MADV_HUGEPAGE)
    if (page == HUGE_PAGE) madvise(memory_, size_, MADV_HUGEPAGE);
#endif
  }
  void* data() const { return memory_; }
  float* floats() const { return static_cast<float*>(memory_); }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

struct Range {
  int64_t begin, end;
};

// Part `thread` of `count` things in units of `unit`.
inline Range share(int64_t count, int64_t unit, int thread, int num_threads) {
  const int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * thread / num_threads * unit),
          std::min(count, units * (thread + 1) / num_threads * unit)};
}

}  // namespace
}  // namespace specserve
