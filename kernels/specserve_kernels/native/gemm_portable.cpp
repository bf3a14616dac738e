// build:
// Plain C++ for every other processor, and the readable version of what the others do.
//
// f32 and bf16: one chain per output, k ascending, one multiplication and one addition (or one fma
// where the processor has it) per k. A product of two bf16 is exact, so bf16 gives the same bits
// either way.
#include "gemm_common.h"

#include <cmath>

namespace specserve {
namespace {

inline float add_product(float sum, float a, float b) {
#if defined(__FP_FAST_FMAF)
  return std::fma(a, b, sum);
#else
  return sum + a * b;
#endif
}

typedef int16_t EightShorts __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

// A 32-bit lane of two 16-bit numbers.
inline int32_t pair_of(int32_t low, int32_t high) {
  return static_cast<int32_t>((low & 0xffff) | static_cast<uint32_t>(high) << 16);
}

template <typename Sum, typename Multiply>
inline void each_tile(const Product& p, Multiply multiply) {
  const int64_t tile_bytes = packed_tile_bytes(p.weight->dtype, p.weight->k);
  for (int64_t tile = p.tile_begin; tile < p.tile_end; tile += 2) {
    const int num_tiles = tile + 1 < p.tile_end ? 2 : 1;
    const char* w = static_cast<const char*>(p.weight->packed) + tile * tile_bytes;
    ColumnTile columns[2];
    for (int t = 0; t < num_tiles; ++t) fill(columns[t], *p.weight, tile + t);
    for (int64_t m = 0; m < p.num_rows; ++m) {
      alignas(64) Sum sums[2 * LANES] = {};
      for (int t = 0; t < num_tiles; ++t) multiply(m, w + t * tile_bytes, sums + t * LANES);
      finish(p, columns, num_tiles, m, 1, sums, LANES);
    }
  }
}

// Four k of 16 columns at a time, in four vectors. A 32-bit lane holds a column's four bytes: two
// 16-bit lanes, whose halves are an even and an odd k. |even * even + odd * odd| <= 2 * 127 * 127
// still fits 16 bits (pack and prepare never write -128), so most of the work is 16-bit
// multiplications, which every processor's vectors have (2.8 times the speed of plain loops).
void gemm_i8(const Product& p) {
  const int64_t num_blocks = round_up(p.weight->k, 64) / 64;
  const int8_t* x = static_cast<const int8_t*>(p.prepared);
  each_tile<int32_t>(p, [&](int64_t m, const char* w, int32_t* sums) {
    const int8_t* row = x + (m / 16 * num_blocks * 16 + m % 16) * 64;
    FourInts acc[4] = {};
    for (int64_t group = 0; group < num_blocks * 16; ++group, w += 64) {
      const int8_t* four = row + group / 16 * TILE_BYTES + group % 16 * 4;
      const EightShorts even_x = (EightShorts)(FourInts{} + pair_of(four[0], four[2]));
      const EightShorts odd_x = (EightShorts)(FourInts{} + pair_of(four[1], four[3]));
      for (int quarter = 0; quarter < 4; ++quarter) {
        EightShorts b;
        std::memcpy(&b, w + quarter * 16, sizeof b);
        const FourInts pairs = (FourInts)(((b << 8) >> 8) * even_x + (b >> 8) * odd_x);
        acc[quarter] += ((pairs << 16) >> 16) + (pairs >> 16);
      }
    }
    std::memcpy(sums, acc, sizeof acc);
  });
}

void gemm_bf16(const Product& p) {
  const int64_t num_blocks = round_up(p.weight->k, 64) / 32;
  const uint16_t* x = static_cast<const uint16_t*>(p.prepared);
  each_tile<float>(p, [&](int64_t m, const char* packed, float* sums) {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(packed);  // pairs: even k in the low half
    const uint16_t* row = x + (m / 16 * num_blocks * 16 + m % 16) * 32;
    for (int64_t pair = 0; pair < num_blocks * 16; ++pair, w += LANES) {
      const uint16_t* two = row + pair / 16 * (TILE_BYTES / 2) + pair % 16 * 2;
      const float even = float_of(two[0] << 16), odd = float_of(two[1] << 16);
      for (int j = 0; j < LANES; ++j) {
        const float even_w = float_of(static_cast<int32_t>(w[j] << 16));
        const float odd_w = float_of(static_cast<int32_t>(w[j] & 0xffff0000u));
        sums[j] = add_product(add_product(sums[j], even, even_w), odd, odd_w);
      }
    }
  });
}

void gemm_f32(const Product& p) {
  const int64_t k = p.weight->k, padded = round_up(k, 64);
  const float* x = static_cast<const float*>(p.prepared);
  each_tile<float>(p, [&](int64_t m, const char* packed, float* sums) {
    const float* w = reinterpret_cast<const float*>(packed);
    for (int64_t i = 0; i < k; ++i, w += LANES) {
      const float one = x[m * padded + i];
      for (int j = 0; j < LANES; ++j) sums[j] = add_product(sums[j], one, w[j]);
    }
  });
}

void no_thread_state() {}

}  // namespace

const Kernels& portable_kernels() {
  static const Kernels kernels = {
      {"portable", "portable", "portable"},
      {prepare_f32, prepare_bf16, prepare_i8<0>},
      {gemm_f32, gemm_bf16, gemm_i8},
      no_thread_state,
      no_thread_state,
  };
  return kernels;
}

}  // namespace specserve
