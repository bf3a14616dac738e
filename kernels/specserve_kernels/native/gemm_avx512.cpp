// build[x86_64]: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -Wno-maybe-uninitialized
// AVX-512: 16 columns per register; int8 by VNNI.
//
// A block of rows times a few column tiles stays in registers over all of k. dpbusd multiplies
// unsigned by signed bytes, so rows are read as x + 128 and 128 times the column sum, packed behind
// each tile, is where the sums start from, negated. f32 and bf16: one fma chain per output, k
// ascending, whatever the block.
#if defined(__x86_64__)
#include "gemm_common.h"

#include <immintrin.h>

namespace specserve {
namespace {

struct I8 {
  using Sum = int32_t;
  static constexpr DType DTYPE = DType::I8;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Sum* sums) {
    const int64_t num_blocks = round_up(p.weight->k, 64) / 64;
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    const char* row[R];
    for (int r = 0; r < R; ++r) {
      const int64_t at = m + r;
      row[r] = static_cast<const char*>(p.prepared) + (at / 16 * num_blocks * 16 + at % 16) * 64;
    }
    __m512i acc[R][T];
    for (int t = 0; t < T; ++t) {
      const __m512i column_sums = _mm512_load_si512(w + (t + 1) * tile_bytes - SUMS_BYTES);
      for (int r = 0; r < R; ++r) {
        acc[r][t] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(column_sums, 7));
      }
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      const char* at = w + block * TILE_BYTES;
      for (int group = 0; group < 16; ++group) {
        __m512i b[T];
        for (int t = 0; t < T; ++t) b[t] = _mm512_load_si512(at + t * tile_bytes + group * 64);
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, row[r] + block * TILE_BYTES + group * 4, 4);
          const __m512i a = _mm512_xor_si512(_mm512_set1_epi32(four), flip);
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

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Sum* sums) {
    const int64_t num_blocks = round_up(p.weight->k, 64) / 32;
    const __m512i upper_half = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const char* row[R];
    for (int r = 0; r < R; ++r) {
      const int64_t at = m + r;
      row[r] = static_cast<const char*>(p.prepared) + (at / 16 * num_blocks * 16 + at % 16) * 64;
    }
    __m512 acc[R][T] = {};
    for (int64_t block = 0; block < num_blocks; ++block) {
      const char* at = w + block * TILE_BYTES;
      for (int pair = 0; pair < 16; ++pair) {
        __m512 even_b[T], odd_b[T];
        for (int t = 0; t < T; ++t) {
          const __m512i b = _mm512_load_si512(at + t * tile_bytes + pair * 64);
          even_b[t] = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
          odd_b[t] = _mm512_castsi512_ps(_mm512_and_si512(b, upper_half));
        }
        for (int r = 0; r < R; ++r) {
          int32_t two;
          std::memcpy(&two, row[r] + block * TILE_BYTES + pair * 4, 4);
          const __m512i a = _mm512_set1_epi32(two);
          const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
          const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(a, upper_half));
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

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Sum* sums) {
    const int64_t k = p.weight->k, padded = round_up(k, 64);
    const float* row = static_cast<const float*>(p.prepared) + m * padded;
    __m512 acc[R][T] = {};
    for (int64_t i = 0; i < k; ++i) {
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

template <typename Dot, int R, int T>
inline void rows(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                 const ColumnTile* columns) {
  alignas(64) typename Dot::Sum sums[R * T * LANES];
  Dot::template multiply<R, T>(p, m, w, tile_bytes, sums);
  finish(p, columns, T, m, R, sums, R * LANES);
}

// All rows of T column tiles: the panel of weights stays in the caches meanwhile.
template <typename Dot, int T>
inline void panel(const Product& p, int64_t tile, int64_t tile_bytes) {
  const char* w = static_cast<const char*>(p.weight->packed) + tile * tile_bytes;
  ColumnTile columns[T];
  for (int t = 0; t < T; ++t) fill(columns[t], *p.weight, tile + t);
  int64_t m = 0;
  for (; m + 4 <= p.num_rows; m += 4) rows<Dot, 4, T>(p, m, w, tile_bytes, columns);
  for (; m + 2 <= p.num_rows; m += 2) rows<Dot, 2, T>(p, m, w, tile_bytes, columns);
  for (; m < p.num_rows; ++m) rows<Dot, 1, T>(p, m, w, tile_bytes, columns);
}

template <typename Dot>
void gemm(const Product& p) {
  const int64_t tile_bytes = packed_tile_bytes(Dot::DTYPE, p.weight->k);
  int64_t tile = p.tile_begin;
  for (; tile + 4 <= p.tile_end; tile += 4) panel<Dot, 4>(p, tile, tile_bytes);
  for (; tile + 2 <= p.tile_end; tile += 2) panel<Dot, 2>(p, tile, tile_bytes);
  if (tile < p.tile_end) panel<Dot, 1>(p, tile, tile_bytes);
}

void no_thread_state() {}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = {
      {"avx512vnni", "avx512vnni", "avx512vnni"},
      {prepare_f32, prepare_bf16, prepare_i8},
      {gemm<F32>, gemm<BF16>, gemm<I8>},
      no_thread_state,
      no_thread_state,
  };
  return kernels;
}

}  // namespace specserve
#endif
