// build[x86_64]: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -Wno-maybe-uninitialized
// AVX-512: 16 columns per register; int8 by VNNI.
//
// A block of rows times two column tiles stays in registers over all of k (gemm_blocks.h). dpbusd
// multiplies unsigned by signed bytes, so rows are prepared as x + 128 and 128 times the column sum,
// packed behind each tile, is where the sums start from, negated. f32 and bf16: one fma chain per
// output, k ascending, whatever the block. vdpbf16ps is not used: it runs at a quarter of the rate
// of an fma (measured) and rounds otherwise.
#if defined(__x86_64__)
#include "gemm_blocks.h"

#include <immintrin.h>

namespace specserve {
namespace {

// Where the 64 bytes of block 0 of prepared int8 or bf16 row m lie; those of m + 1 are the next.
// A block of a bf16 row is 16 numbers, rounded and widened again: fma's ports are busy, and a row's
// numbers come from memory without them; widened in the loop they would take 16 of 52 turns.
inline const char* row_bytes(const Product& p, int64_t m, int64_t num_blocks) {
  return static_cast<const char*>(p.prepared) + (m / 16 * num_blocks * 16 + m % 16) * 64;
}

// to_bf16 of 16 numbers, widened again.
inline __m512 rounded_to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
  const __m512i quiet_nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i nearest = _mm512_add_epi32(bits, half);
  const __m512i chosen = _mm512_mask_blend_epi32(is_nan, nearest, quiet_nan);
  return _mm512_castsi512_ps(_mm512_and_si512(chosen, upper_half));
}

// No row behind the last is ever read here, so none is zeroed.
void prepare_widened_bf16(const PrepareRows& p) {
  const int64_t num_blocks = round_up(p.k, 64) / 16;
  for (int64_t m = p.row_begin; m < p.row_end; ++m) {
    float* block = static_cast<float*>(p.prepared) + (m / 16 * num_blocks * 16 + m % 16) * 16;
    const float* x = p.x + m * p.ldx;
    for (int64_t i = 0; i < num_blocks * 16; i += 16, x += 16, block += 16 * 16) {
      const int64_t left = p.k - i, count = left < 0 ? 0 : left < 16 ? left : 16;
      const __mmask16 real = static_cast<__mmask16>((1u << count) - 1);
      _mm512_store_ps(block, rounded_to_bf16(_mm512_maskz_loadu_ps(real, x)));
    }
  }
}

struct I8 {
  using Sum = int32_t;
  static constexpr DType DTYPE = DType::I8;
  static constexpr int MAX_ROWS = 8, MAX_TILES = 2;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    const int64_t num_blocks = round_up(p.weight->k, 64) / 64;
    const char* row = row_bytes(p, m, num_blocks);
    __m512i acc[R][T];
    for (int t = 0; t < T; ++t) {
      const __m512i column_sums = _mm512_load_si512(w + (t + 1) * tile_bytes - SUMS_BYTES);
      for (int r = 0; r < R; ++r) {
        acc[r][t] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(column_sums, 7));
      }
    }
    for (int64_t block = 0; block < num_blocks; ++block, w += TILE_BYTES, row += TILE_BYTES) {
      prefetch.step();
#pragma GCC unroll 4
      for (int group = 0; group < 16; ++group) {
        __m512i b[T];
        for (int t = 0; t < T; ++t) b[t] = _mm512_load_si512(w + t * tile_bytes + group * 64);
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, row + r * 64 + group * 4, 4);
          const __m512i a = _mm512_set1_epi32(four);
          for (int t = 0; t < T; ++t) acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], a, b[t]);
        }
      }
    }
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) _mm512_store_si512(sums + (t * R + r) * LANES, acc[r][t]);
    }
  }
};

struct BF16 {
  using Sum = float;
  static constexpr DType DTYPE = DType::BF16;
  static constexpr int MAX_ROWS = 8, MAX_TILES = 2;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    const int64_t num_blocks = round_up(p.weight->k, 64) / 16;
    const __m512i upper_half = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const float* row = reinterpret_cast<const float*>(row_bytes(p, m, num_blocks));
    __m512 acc[R][T] = {};
    for (int64_t block = 0; block < num_blocks; ++block, w += TILE_BYTES / 2, row += 16 * 16) {
      if (block % 2 == 0) prefetch.step();
#pragma GCC unroll 4
      for (int pair = 0; pair < 8; ++pair) {
        __m512 even_b[T], odd_b[T];
        for (int t = 0; t < T; ++t) {
          const __m512i b = _mm512_load_si512(w + t * tile_bytes + pair * 64);
          even_b[t] = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
          odd_b[t] = _mm512_castsi512_ps(_mm512_and_si512(b, upper_half));
        }
        for (int r = 0; r < R; ++r) {
          const __m512 even = _mm512_set1_ps(row[r * 16 + pair * 2]);
          const __m512 odd = _mm512_set1_ps(row[r * 16 + pair * 2 + 1]);
          for (int t = 0; t < T; ++t) {
            acc[r][t] = _mm512_fmadd_ps(even, even_b[t], acc[r][t]);
            acc[r][t] = _mm512_fmadd_ps(odd, odd_b[t], acc[r][t]);
          }
        }
      }
    }
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) _mm512_store_ps(sums + (t * R + r) * LANES, acc[r][t]);
    }
  }
};

struct F32 {
  using Sum = float;
  static constexpr DType DTYPE = DType::F32;
  static constexpr int MAX_ROWS = 4, MAX_TILES = 4;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    const int64_t k = p.weight->k, padded = round_up(k, 64);
    const float* row = static_cast<const float*>(p.prepared) + m * padded;
    __m512 acc[R][T] = {};
    for (int64_t i = 0; i < k; ++i) {
      if (i % 16 == 0) prefetch.step();
      __m512 b[T];
      for (int t = 0; t < T; ++t) b[t] = _mm512_load_ps(w + t * tile_bytes + i * 64);
      for (int r = 0; r < R; ++r) {
        const __m512 a = _mm512_set1_ps(row[r * padded + i]);
        for (int t = 0; t < T; ++t) acc[r][t] = _mm512_fmadd_ps(a, b[t], acc[r][t]);
      }
    }
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) _mm512_store_ps(sums + (t * R + r) * LANES, acc[r][t]);
    }
  }
};

void no_thread_state() {}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = {
      {"avx512vnni", "avx512vnni", "avx512vnni"},
      {prepare_f32, prepare_widened_bf16, prepare_i8<128>},
      {gemm<F32>, gemm<BF16>, gemm<I8>},
      no_thread_state,
      no_thread_state,
  };
  return kernels;
}

}  // namespace specserve
#endif
