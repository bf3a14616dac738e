// One short vector type `F` of W floats per instruction set, for the files compiled once per set.
//
// Everything lives in a namespace named after the set: the same inline function compiled with other
// flags is another function, or the linker would keep one of them for all machines. For the same
// reason these files use nothing of std:: that could be emitted out of line.
// No operation mixes lanes but the reductions, whose order is fixed.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#if defined(__AMX_BF16__)
#define SPECSERVE_ISA amx  // the same vectors
#else
#define SPECSERVE_ISA avx512
#endif
#define SPECSERVE_ISA_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define SPECSERVE_ISA avx2
#define SPECSERVE_ISA_AVX2 1
#include <immintrin.h>
#else
#define SPECSERVE_ISA portable
#endif

namespace specserve {
namespace SPECSERVE_ISA {

constexpr float MINUS_INFINITY = -__builtin_inff();

inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float bf16_to_float(uint16_t bits) { return bits_to_float(uint32_t(bits) << 16); }

// Round to nearest even; a NaN stays one.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(SPECSERVE_ISA_AVX512)

constexpr int W = 16;
using F = __m512;
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is no number
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F zero_below(F x, F limit, F value) {  // value, or 0 where x < limit
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}
inline F power_of_two(F n) {  // n whole, -126..128
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// W packed pairs of bf16: the first of each pair, and the second.
inline void load_pairs(const uint16_t* p, F& first, F& second) {
  __m512i both = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))));
}
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

#elif defined(SPECSERVE_ISA_AVX2)

constexpr int W = 8;
using F = __m256;
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F zero_below(F x, F limit, F value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
}
inline F power_of_two(F n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline void load_pairs(const uint16_t* p, F& first, F& second) {
  __m256i both = _mm256_loadu_si256((const __m256i*)p);
  first = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  second = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))));
}
inline F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

#else

constexpr int W = 4;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint16_t H4 __attribute__((vector_size(8)));
inline F load(const float* p) {
  F x;
  memcpy(&x, p, 16);
  return x;
}
inline void store(float* p, F x) { memcpy(p, &x, 16); }
inline F set1(float x) { return F{x, x, x, x}; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings: no fused form is assumed
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline F zero_below(F x, F limit, F value) { return x < limit ? set1(0) : value; }
inline F power_of_two(F n) { return (F)((__builtin_convertvector(n, I) + 127) << 23); }
inline void load_pairs(const uint16_t* p, F& first, F& second) {
  I both;
  memcpy(&both, p, 16);
  first = (F)(both << 16);
  second = (F)(both & int32_t(0xffff0000u));
}
inline F load_bf16(const uint16_t* p) {
  H4 half;
  memcpy(&half, p, 8);
  return (F)(__builtin_convertvector(half, I) << 16);
}

#endif

inline F zero() { return set1(0.0f); }

// Lanes first..last-1 of x, `fill` elsewhere; first and last may lie outside 0..W.
inline F keep_lanes(F x, int64_t first, int64_t last, float fill) {
#if defined(SPECSERVE_ISA_AVX512)
  uint32_t below = last <= 0 ? 0u : last >= W ? 0xffffu : (1u << last) - 1u;
  uint32_t skipped = first <= 0 ? 0u : first >= W ? 0xffffu : (1u << first) - 1u;
  return _mm512_mask_mov_ps(set1(fill), __mmask16(below & ~skipped), x);
#else
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < W; i++)
    if (i < first || i >= last) lanes[i] = fill;
  return load(lanes);
#endif
}

// Halves folded onto each other: the same tree whatever the values.
inline float reduce_add(F x) {
  float lanes[W];
  store(lanes, x);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
}

inline float reduce_max(F x) {
#if defined(SPECSERVE_ISA_AVX512)
  return _mm512_reduce_max_ps(x);
#else
  float lanes[W];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < W; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

// e^x to about 1 ulp (Cephes' polynomial); 0 below -87.3, exactly 1 at 0, NaN stays NaN.
inline F exp(F x) {
  F y = max(set1(-87.3f), min(set1(89.0f), x));
  const F magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  F n = sub(add(mul(y, set1(1.44269504f)), magic), magic);
  F r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return zero_below(x, set1(-87.3f), mul(p, power_of_two(n)));
}

inline float exp(float x) {
  float lanes[W];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

}  // namespace SPECSERVE_ISA
}  // namespace specserve
