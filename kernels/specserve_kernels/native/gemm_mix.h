// Blocks of 64 numbers times an orthogonal matrix (Hadamard's, entries +-1/8) before they become
// int8, rows and weights alike: products stay what they were, (x H)(w H)' = x w', and an outlier
// that would have set the scale of its whole row is spread over 64 places.
//
// Six rounds of sums and differences, each rounded on its own in one order, so every instruction
// set gives the same bits. Included by gemm_common.h, in its anonymous namespace's terms.
#pragma once
#include <cstdint>
#include <cstring>

namespace specserve {
namespace {

constexpr int LANES = 16;
constexpr int64_t MIXED = 64;
// 1.5 * 2^23: adding it to |v| < 2^22 rounds v to an integer, ties to even, in the low bits.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4b400000;

// 16 lanes (a vector extension of gcc and clang: split where registers are shorter). Passed by
// reference only, since the calling convention of long vectors depends on the instruction set.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

// Lane i and lane i ^ H: their sum where bit H of i is clear, their difference where it is set.
template <int H>
inline void mix_lanes(Floats& v) {
  constexpr float S = -1.0f;
  constexpr Floats sign = {1, 1 & H ? S : 1, 2 & H ? S : 1, 3 & H ? S : 1, 4 & H ? S : 1,
                           5 & H ? S : 1, 6 & H ? S : 1, 7 & H ? S : 1, 8 & H ? S : 1,
                           9 & H ? S : 1, 10 & H ? S : 1, 11 & H ? S : 1, 12 & H ? S : 1,
                           13 & H ? S : 1, 14 & H ? S : 1, 15 & H ? S : 1};
#if defined(__clang__)
  const Floats other = __builtin_shufflevector(
      v, v, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H, 8 ^ H, 9 ^ H, 10 ^ H, 11 ^ H,
      12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H);
#else
  constexpr Ints partner = {0 ^ H, 1 ^ H, 2 ^ H,  3 ^ H,  4 ^ H,  5 ^ H,  6 ^ H,  7 ^ H,
                            8 ^ H, 9 ^ H, 10 ^ H, 11 ^ H, 12 ^ H, 13 ^ H, 14 ^ H, 15 ^ H};
  const Floats other = __builtin_shuffle(v, partner);
#endif
  v = other + v * sign;
}

inline void mix_pair(Floats& low, Floats& high) {
  const Floats sum = low + high, difference = low - high;
  low = sum;
  high = difference;
}

// num_valid (at most 64) numbers from x, zeros behind them, mixed, into y[0..64).
inline void mix(const float* x, int64_t num_valid, float* y) {
  Floats v[4] = {};
  std::memcpy(v, x, static_cast<size_t>(num_valid) * sizeof(float));
  for (Floats& one : v) {
    one *= 0.125f;  // first, so that only numbers near the end of fp32 overflow
    mix_lanes<1>(one);
    mix_lanes<2>(one);
    mix_lanes<4>(one);
    mix_lanes<8>(one);
  }
  mix_pair(v[0], v[1]);
  mix_pair(v[2], v[3]);
  mix_pair(v[0], v[2]);
  mix_pair(v[1], v[3]);
  std::memcpy(y, v, sizeof v);
}

}  // namespace
}  // namespace specserve
