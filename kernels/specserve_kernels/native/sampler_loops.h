// The passes of sampler.h in short vectors of W floats, compiled once per instruction set; the same
// operations in each, none fused, so the same bits. All of it lives in an unnamed namespace and
// uses nothing of std:: that could be emitted out of line: the linker would keep one copy for all.
#pragma once
#include <cstdint>
#include <cstring>

#include "sampler.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace specserve {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef float HalfF __attribute__((vector_size(2 * W)));
typedef double D __attribute__((vector_size(4 * W)));
typedef int64_t L __attribute__((vector_size(4 * W)));

inline F load(const float* p) {
  F value;
  memcpy(&value, p, sizeof value);
  return value;
}

// The last, incomplete vector of a row, filled up with -infinity.
inline F load_tail(const float* p, int64_t count) {
  float padded[W];
  for (int i = 0; i < W; ++i) padded[i] = i < count ? p[i] : -__builtin_inff();
  return load(padded);
}

inline F filled(float x) { return x - F{}; }

// a > b ? a : b, in one instruction where there is one for it: so b where either is no number.
inline F larger(F a, F b) {
#if defined(__AVX512F__)
  return reinterpret_cast<F>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<F>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// Remembers whether any lane it was shown was no number.
struct NanWatch {
#if defined(__AVX512F__)
  __mmask16 seen = 0;
  void show(F a, F b) {
    seen |= _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                               _CMP_UNORD_Q);
  }
  bool any() const { return seen != 0; }
#else
  I seen{};
  void show(F a, F b) { seen |= (a != a) | (b != b); }
  bool any() const {
    int32_t some = 0;
    for (int lane = 0; lane < W; ++lane) some |= seen[lane];
    return some != 0;
  }
#endif
};

// ---- best -------------------------------------------------------------------------------------

constexpr int CHUNK = 4096;  // floats; the best is looked up again in one of them

BestLogit best_of(const float* x, int64_t n) {
  BestLogit result{0, -__builtin_inff(), false};
  for (int64_t start = 0; start < n; start += CHUNK) {
    const int64_t count = n - start < CHUNK ? n - start : CHUNK;
    const float* chunk = x + start;
    F best[4];
    NanWatch nan;
    for (auto& b : best) b = filled(-__builtin_inff());
    int64_t i = 0;
    for (; i + 4 * W <= count; i += 4 * W) {
      F v[4];
      for (int u = 0; u < 4; ++u) v[u] = load(chunk + i + u * W);
      for (int u = 0; u < 4; ++u) best[u] = larger(v[u], best[u]);
      for (int u = 0; u < 4; u += 2) nan.show(v[u], v[u + 1]);
    }
    for (; i < count; i += W) {
      const F v = count - i >= W ? load(chunk + i) : load_tail(chunk + i, count - i);
      best[0] = larger(v, best[0]);
      nan.show(v, v);
    }
    if (nan.any()) return {0, 0.0f, true};
    float largest = -__builtin_inff();
    for (int lane = 0; lane < W; ++lane) {
      for (const auto& b : best) largest = b[lane] > largest ? b[lane] : largest;
    }
    if (largest > result.value) {
      int64_t at = 0;
      while (chunk[at] != largest) ++at;
      result = {start + at, chunk[at], false};
    }
  }
  return result;
}

// ---- mass -------------------------------------------------------------------------------------

// 2^40 * exp(w) for w <= 0, rounded to float32 as written here: range reduction to half a power of
// two, then 1 + r + r^2 * P(r) with P of degree 4 (relative error 3e-9 before rounding).
inline F scaled_exp(F w) {
  const F lowest = filled(-40.0f);  // a mass of 0, and no power of two out of range
  w = larger(w, lowest);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const F n = (w * 1.44269504f + magic) - magic;
  const F r = (w - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * 0.00138148281f + 0.00836878456f;
  p = p * r + 0.0416683853f;
  p = p * r + 0.166665196f;
  p = p * r + 0.49999994f;
  p = (p * r) * r + r + 1.0f;
  const I bits = (__builtin_convertvector(n, I) + (127 + 40)) << 23;
  F power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Each half of y to the nearest whole numbers, even among equals.
struct Whole {
  L half[2];
};

inline Whole rounded(F y) {
  Whole whole;
  HalfF half[2];
  memcpy(half, &y, sizeof y);
  for (int i = 0; i < 2; ++i) {
#if defined(__AVX512F__)
    __m256 floats;
    memcpy(&floats, &half[i], sizeof floats);
    const __m512i converted = _mm512_cvtps_epi64(floats);
    memcpy(&whole.half[i], &converted, sizeof converted);
#else
    // Adding 2^52 rounds to a whole number, and leaves it in the lower bits.
    const D shifted = __builtin_convertvector(half[i], D) + 4503599627370496.0;
    L bits;
    memcpy(&bits, &shifted, sizeof bits);
    whole.half[i] = bits & 0xfffffffffffff;
#endif
  }
  return whole;
}

template <bool DIVIDE>
int64_t mass_by(const float* x, int64_t n, float best, float temperature) {
  L sums[2] = {};
  for (int64_t i = 0; i < n; i += W) {
    const F v = n - i >= W ? load(x + i) : load_tail(x + i, n - i);
    const Whole whole = rounded(scaled_exp(DIVIDE ? (v - best) / temperature : v - best));
    for (int half = 0; half < 2; ++half) sums[half] += whole.half[half];
  }
  const L both = sums[0] + sums[1];
  int64_t total = 0;
  for (int lane = 0; lane < W / 2; ++lane) total += both[lane];
  return total;
}

int64_t mass_of(const float* x, int64_t n, float best, float temperature) {
  return temperature == 1 ? mass_by<false>(x, n, best, 1) : mass_by<true>(x, n, best, temperature);
}

void masses_of(const float* weights, int64_t n, int64_t* masses) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t count = n - i < W ? n - i : W;
    const Whole whole = rounded(scaled_exp(count == W ? load(weights + i)
                                                      : load_tail(weights + i, count)));
    memcpy(masses + i, &whole, static_cast<size_t>(count) * sizeof(int64_t));
  }
}

// ---- tokens above a logit ---------------------------------------------------------------------

// Bit i: p[i] >= lowest, for 64 floats.
inline uint64_t at_least_64(const float* p, float lowest) {
  uint64_t bits = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(lowest);
  for (int i = 0; i < 4; ++i) {
    const __mmask16 m = _mm512_cmp_ps_mask(_mm512_loadu_ps(p + 16 * i), limit, _CMP_GE_OQ);
    bits |= static_cast<uint64_t>(m) << (16 * i);
  }
#else
  I any{};
  for (int i = 0; i < 64; i += W) any |= (load(p + i) >= filled(lowest));
  uint64_t some = 0;
  for (int lane = 0; lane < W; ++lane) some |= static_cast<uint32_t>(any[lane]);
  if (some == 0) return 0;
  for (int i = 0; i < 64; ++i) bits |= static_cast<uint64_t>(p[i] >= lowest) << i;
#endif
  return bits;
}

// Appends one token to a list of num.
inline int64_t append(const float* x, int64_t id, float best, float temperature, float lowest,
                      int64_t num, int32_t* ids, float* weights) {
  const float weight = (x[id] - best) / temperature;
  ids[num] = static_cast<int32_t>(id);
  weights[num] = weight;
  return num + (weight >= lowest);
}

int64_t near_of(const float* x, int64_t n, float best, float temperature, float lowest_logit,
                float lowest, int32_t* ids, float* weights) {
  int64_t num = 0, start = 0;
  for (; start + 64 <= n; start += 64) {
    uint64_t bits = at_least_64(x + start, lowest_logit);
    if (bits == 0) continue;
#if defined(__AVX512F__)
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t at = start; bits; at += 16, bits >>= 16) {
      const __mmask16 some = static_cast<__mmask16>(bits);
      if (some == 0) continue;
      const __m512 weight = _mm512_div_ps(_mm512_sub_ps(_mm512_loadu_ps(x + at), filled(best)),
                                          filled(temperature));
      const __mmask16 kept = _mm512_mask_cmp_ps_mask(some, weight, filled(lowest), _CMP_GE_OQ);
      const __m512i id = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(at)));
      _mm512_storeu_si512(ids + num, _mm512_maskz_compress_epi32(kept, id));
      _mm512_storeu_ps(weights + num, _mm512_maskz_compress_ps(kept, weight));
      num += __builtin_popcount(kept);
    }
#else
    for (; bits; bits &= bits - 1) {
      num = append(x, start + __builtin_ctzll(bits), best, temperature, lowest, num, ids, weights);
    }
#endif
  }
  for (; start < n; ++start) {
    if (x[start] < lowest_logit) continue;
    num = append(x, start, best, temperature, lowest, num, ids, weights);
  }
  return num;
}

// ---- leading bits -----------------------------------------------------------------------------

constexpr uint64_t MULTIPLIERS[2] = {0xD2E7470EE14C6C93u, 0xCA5A826395121157u};
constexpr uint64_t KEY_STEPS[2] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};
constexpr int ROUNDS = 10;

struct Words {
  uint64_t high, low;
};

inline Words multiplied(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return {static_cast<uint64_t>(product >> 64), static_cast<uint64_t>(product)};
}

inline void philox(const NoiseStream& stream, uint64_t part, uint64_t block, uint64_t words[4]) {
  uint64_t c[4] = {block + 1, part, stream.position, stream.purpose};
  uint64_t k[2] = {stream.seed[0], stream.seed[1]};
  for (int round = 0; round < ROUNDS; ++round) {
    const Words first = multiplied(c[0], MULTIPLIERS[0]), second = multiplied(c[2], MULTIPLIERS[1]);
    c[0] = second.high ^ c[1] ^ k[0];
    c[1] = second.low;
    c[2] = first.high ^ c[3] ^ k[1];
    c[3] = first.low;
    k[0] += KEY_STEPS[0];
    k[1] += KEY_STEPS[1];
  }
  for (int i = 0; i < 4; ++i) words[i] = c[i];
}

// In a word the first token's bits are the lowest, whatever this machine's byte order.
inline void unpack(const uint64_t words[4], uint16_t cells[16]) {
  for (int i = 0; i < 16; ++i) cells[i] = static_cast<uint16_t>(words[i / 4] >> (16 * (i % 4)));
}

#if defined(__AVX512F__)

struct Lanes {
  __m512i high, low;
};

// Eight 64 x 64 -> 128 bit products from 32 x 32 -> 64 bit ones.
inline Lanes multiplied(__m512i a, uint64_t constant) {
  const __m512i b_low = _mm512_set1_epi64(static_cast<int64_t>(constant & 0xffffffffu));
  const __m512i b_high = _mm512_set1_epi64(static_cast<int64_t>(constant >> 32));
  // Shuffles and shifts run on different ports.
  const __m512i a_high = _mm512_shuffle_epi32(a, static_cast<_MM_PERM_ENUM>(0xF5));
  const __m512i ll = _mm512_mul_epu32(a, b_low), lh = _mm512_mul_epu32(a, b_high);
  const __m512i hl = _mm512_mul_epu32(a_high, b_low), hh = _mm512_mul_epu32(a_high, b_high);
  const __m512i low_half = _mm512_set1_epi64(0xffffffff);
  const __m512i cross = _mm512_add_epi64(
      _mm512_add_epi64(_mm512_srli_epi64(ll, 32), _mm512_and_si512(hl, low_half)), lh);
  const __m512i high = _mm512_add_epi64(_mm512_add_epi64(hh, _mm512_srli_epi64(hl, 32)),
                                        _mm512_srli_epi64(cross, 32));
  // low: the lower halves of ll, and those of cross as upper halves
  const __m512i low =
      _mm512_mask_shuffle_epi32(ll, 0xAAAA, cross, static_cast<_MM_PERM_ENUM>(0xA0));
  return {high, low};
}

inline __m512i xor3(__m512i a, __m512i b, const uint64_t& key) {
  return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi64(static_cast<int64_t>(key)), 0x96);
}

// What the blocks of one stream have in common: the keys of each round, and, as only the counter's
// first word differs between blocks, half of the first two rounds.
struct Shared {
  uint64_t keys[ROUNDS][2];
  uint64_t purpose, c1_first, c2_second, c3_second;
};

inline Shared shared_by(const NoiseStream& stream) {
  Shared shared;
  uint64_t k[2] = {stream.seed[0], stream.seed[1]};
  for (int round = 0; round < ROUNDS; ++round) {
    for (int i = 0; i < 2; ++i) {
      shared.keys[round][i] = k[i];
      k[i] += KEY_STEPS[i];
    }
  }
  const Words first = multiplied(stream.position, MULTIPLIERS[1]);
  const Words second = multiplied(first.high ^ stream.seed[0], MULTIPLIERS[0]);
  shared.purpose = stream.purpose;
  shared.c1_first = first.low;
  shared.c2_second = second.high;
  shared.c3_second = second.low;
  return shared;
}

inline __m512i all(const uint64_t& word) {
  return _mm512_set1_epi64(static_cast<int64_t>(word));
}

// The leading bits of one group in token order, 32 per vector.
inline void group_cells(const Shared& shared, int64_t group, __m512i cells[4]) {
  const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i block = _mm512_add_epi64(_mm512_set1_epi64(group * 8 + 1), lane);
  Lanes first = multiplied(block, MULTIPLIERS[0]);
  __m512i c2 = xor3(first.high, all(shared.purpose), shared.keys[0][1]);
  __m512i c3 = first.low;
  Lanes second = multiplied(c2, MULTIPLIERS[1]);
  __m512i c0 = xor3(second.high, all(shared.c1_first), shared.keys[1][0]);
  __m512i c1 = second.low;
  c2 = xor3(c3, all(shared.c2_second), shared.keys[1][1]);
  c3 = all(shared.c3_second);
#pragma GCC unroll 8
  for (int round = 2; round < ROUNDS; ++round) {
    first = multiplied(c0, MULTIPLIERS[0]);
    second = multiplied(c2, MULTIPLIERS[1]);
    c0 = xor3(second.high, c1, shared.keys[round][0]);
    c1 = second.low;
    c2 = xor3(first.high, c3, shared.keys[round][1]);
    c3 = first.low;
  }
  // c0..c3 hold words 0..3 of each block, a block per lane: to block by block.
  const __m512i even01 = _mm512_unpacklo_epi64(c0, c1), odd01 = _mm512_unpackhi_epi64(c0, c1);
  const __m512i even23 = _mm512_unpacklo_epi64(c2, c3), odd23 = _mm512_unpackhi_epi64(c2, c3);
  const __m512i lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512i even_low = _mm512_permutex2var_epi64(even01, lower, even23);   // blocks 0, 2
  const __m512i odd_low = _mm512_permutex2var_epi64(odd01, lower, odd23);      // 1, 3
  const __m512i even_high = _mm512_permutex2var_epi64(even01, upper, even23);  // 4, 6
  const __m512i odd_high = _mm512_permutex2var_epi64(odd01, upper, odd23);     // 5, 7
  cells[0] = _mm512_shuffle_i64x2(even_low, odd_low, 0x44);
  cells[1] = _mm512_shuffle_i64x2(even_low, odd_low, 0xEE);
  cells[2] = _mm512_shuffle_i64x2(even_high, odd_high, 0x44);
  cells[3] = _mm512_shuffle_i64x2(even_high, odd_high, 0xEE);
}

// found: candidates among one group's tokens x [128], as RaceLimits says.
inline uint64_t candidates(const __m512i leading[4], const float* x, uint64_t far_low,
                           uint64_t far_high, const RaceLimits& limits, uint64_t found[2]) {
  const uint64_t far[2] = {far_low, far_high};
  const __m512i last = _mm512_set1_epi16(static_cast<int16_t>(limits.last_cell));
  for (int half = 0; half < 2; ++half) {
    const __m512i low = leading[2 * half], high = leading[2 * half + 1];
    const uint64_t zero = static_cast<uint64_t>(_mm512_testn_epi16_mask(low, low)) |
                          static_cast<uint64_t>(_mm512_testn_epi16_mask(high, high)) << 32;
    const uint64_t early = static_cast<uint64_t>(_mm512_cmple_epu16_mask(low, last)) |
                           static_cast<uint64_t>(_mm512_cmple_epu16_mask(high, last)) << 32;
    found[half] = (zero & far[half]) | (early & at_least_64(x + 64 * half, limits.near));
  }
  return found[0] | found[1];
}

inline uint64_t group_candidates(const Shared& shared, const float* x, int64_t group,
                                 uint64_t far_low, uint64_t far_high, const RaceLimits& limits,
                                 uint16_t* cells, uint64_t found[2]) {
  __m512i leading[4];
  group_cells(shared, group, leading);
  const uint64_t any = candidates(leading, x, far_low, far_high, limits, found);
  if (any) memcpy(cells, leading, 2 * GROUP);
  return any;
}

#else

struct Shared {
  NoiseStream stream;
};

inline Shared shared_by(const NoiseStream& stream) { return {stream}; }

inline uint64_t group_candidates(const Shared& shared, const float* x, int64_t group,
                                 uint64_t far_low, uint64_t far_high, const RaceLimits& limits,
                                 uint16_t* cells, uint64_t found[2]) {
  for (int block = 0; block < GROUP / 16; ++block) {
    uint64_t words[4];
    philox(shared.stream, 0, static_cast<uint64_t>(group * 8 + block), words);
    unpack(words, cells + 16 * block);
  }
  const uint64_t far[2] = {far_low, far_high};
  for (int half = 0; half < 2; ++half) {
    const uint16_t* mine = cells + 64 * half;
    uint16_t any_zero = 0;
    for (int i = 0; i < 64; ++i) any_zero |= static_cast<uint16_t>(mine[i] == 0);
    const uint64_t near = at_least_64(x + 64 * half, limits.near);
    uint64_t bits = any_zero ? far[half] | near : near;
    found[half] = 0;
    for (; bits; bits &= bits - 1) {
      const int i = __builtin_ctzll(bits);
      const bool in = mine[i] == 0 || (mine[i] <= limits.last_cell && (near >> i & 1));
      found[half] |= static_cast<uint64_t>(in) << i;
    }
  }
  return found[0] | found[1];
}

#endif

int64_t next_group_of(const NoiseStream& stream, const float* x, int64_t group, int64_t num_groups,
                      const RaceLimits& limits, uint16_t* cells, uint64_t* found) {
  const Shared shared = shared_by(stream);
  for (; group < num_groups; ++group) {
    const float* mine = x + group * GROUP;
    const uint64_t low = at_least_64(mine, limits.far), high = at_least_64(mine + 64, limits.far);
    if ((low | high) == 0) continue;
    if (group_candidates(shared, mine, group, low, high, limits, cells, found)) break;
  }
  return group;
}

}  // namespace
}  // namespace specserve
