// build[x86_64]: -mavx2 -mfma -mf16c
// AVX2: 16 columns are two registers; int8 by maddubs.
//
// A block of rows times one or two column tiles stays in registers over all of k
// (gemm_blocks.h). maddubs
// multiplies unsigned by signed bytes and saturates sums of pairs at 32,767: |x| times w with x's
// sign is at most 2 * 127 * 127 = 32,258, because pack and prepare never write -128. f32 and bf16:
// one fma chain per output, k ascending, whatever the block: the bits of the AVX-512 path.
#if defined(__x86_64__)
#include "gemm_blocks.h"

#include <immintrin.h>

namespace specserve {
namespace {

inline __m256i load(const char* at) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
}

// Rows m..m+R of prepared int8 or bf16 rows: where their 64 bytes of block 0 lie.
template <int R>
struct Rows {
  const char* at[R];

  Rows(const Product& p, int64_t m, int64_t num_blocks) {
    for (int r = 0; r < R; ++r) {
      const int64_t tile = (m + r) / 16, place = (m + r) % 16;
      at[r] = static_cast<const char*>(p.prepared) + (tile * num_blocks * 16 + place) * 64;
    }
  }

  inline __m256i four_bytes(int r, int64_t block, int group) const {
    int32_t value;
    std::memcpy(&value, at[r] + block * TILE_BYTES + group * 4, 4);
    return _mm256_set1_epi32(value);
  }
};

struct I8 {
  using Sum = int32_t;
  static constexpr DType DTYPE = DType::I8;
  static constexpr int MAX_ROWS = 2, MAX_TILES = 2;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    constexpr int H = 2 * T;  // half tiles: 8 columns each
    const int64_t num_blocks = round_up(p.weight->k, 64) / 64;
    const Rows<R> rows(p, m, num_blocks);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[R][H];
    for (int r = 0; r < R; ++r) {
      for (int h = 0; h < H; ++h) acc[r][h] = _mm256_setzero_si256();
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      const char* at = w + block * TILE_BYTES;
      prefetch.step();
      for (int group = 0; group < 16; ++group) {
        __m256i b[H];
        for (int h = 0; h < H; ++h) {
          b[h] = load(at + h / 2 * tile_bytes + group * 64 + h % 2 * 32);
        }
        for (int r = 0; r < R; ++r) {
          const __m256i a = rows.four_bytes(r, block, group), magnitude = _mm256_abs_epi8(a);
          for (int h = 0; h < H; ++h) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(b[h], a));
            acc[r][h] = _mm256_add_epi32(acc[r][h], _mm256_madd_epi16(pairs, ones));
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int h = 0; h < H; ++h) {
        Sum* to = sums + (h / 2 * R + r) * LANES + h % 2 * 8;
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), acc[r][h]);
      }
    }
  }
};

template <int R, int H>
inline void store(const __m256 (&acc)[R][H], float* sums) {
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < H; ++h) {
      _mm256_store_ps(sums + (h / 2 * R + r) * LANES + h % 2 * 8, acc[r][h]);
    }
  }
}

struct BF16 {
  using Sum = float;
  static constexpr DType DTYPE = DType::BF16;
  static constexpr int MAX_ROWS = 2, MAX_TILES = 2;

  static inline __m256 even(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  }

  static inline __m256 odd(__m256i pairs) {
    const __m256i upper_half = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_half));
  }

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    constexpr int H = 2 * T;
    const int64_t num_blocks = round_up(p.weight->k, 64) / 32;
    const Rows<R> rows(p, m, num_blocks);
    __m256 acc[R][H] = {};
    for (int64_t block = 0; block < num_blocks; ++block) {
      const char* at = w + block * TILE_BYTES;
      prefetch.step();
      for (int pair = 0; pair < 16; ++pair) {
        __m256i b[H];
        for (int h = 0; h < H; ++h) {
          b[h] = load(at + h / 2 * tile_bytes + pair * 64 + h % 2 * 32);
        }
        for (int r = 0; r < R; ++r) {
          const __m256i a = rows.four_bytes(r, block, pair);
          for (int h = 0; h < H; ++h) {
            acc[r][h] = _mm256_fmadd_ps(even(a), even(b[h]), acc[r][h]);
            acc[r][h] = _mm256_fmadd_ps(odd(a), odd(b[h]), acc[r][h]);
          }
        }
      }
    }
    store<R, H>(acc, sums);
  }
};

struct F32 {
  using Sum = float;
  static constexpr DType DTYPE = DType::F32;
  static constexpr int MAX_ROWS = 2, MAX_TILES = 2;

  template <int R, int T>
  static inline void multiply(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                              Prefetch& prefetch, Sum* sums) {
    constexpr int H = 2 * T;
    const int64_t k = p.weight->k, padded = round_up(k, 64);
    const float* row = static_cast<const float*>(p.prepared) + m * padded;
    __m256 acc[R][H] = {};
    for (int64_t i = 0; i < k; ++i) {
      if (i % 16 == 0) prefetch.step();
      __m256 b[H];
      for (int h = 0; h < H; ++h) {
        b[h] = _mm256_castsi256_ps(load(w + h / 2 * tile_bytes + i * 64 + h % 2 * 32));
      }
      for (int r = 0; r < R; ++r) {
        const __m256 a = _mm256_set1_ps(row[r * padded + i]);
        for (int h = 0; h < H; ++h) acc[r][h] = _mm256_fmadd_ps(a, b[h], acc[r][h]);
      }
    }
    store<R, H>(acc, sums);
  }
};

void no_thread_state() {}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kernels = {
      {"avx2", "avx2", "avx2"},
      {prepare_f32, prepare_bf16, prepare_i8<0>},
      {gemm<F32>, gemm<BF16>, gemm<I8>},
      no_thread_state,
      no_thread_state,
  };
  return kernels;
}

}  // namespace specserve
#endif
