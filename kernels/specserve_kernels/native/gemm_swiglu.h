// What SwiGLU does with finished sums: gate = silu(gate) * up, over 16 lanes and R vectors side by
// side, since one alone is a chain of operations of which a core sees too few ahead to fill the time.
//
// AVX-512 fuses and estimates where other sets round and divide: its bits are another's, and a machine
// has one of them. Every lane of every row goes the same way.
#pragma once
#include <initializer_list>

#include "gemm_mix.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace specserve {
namespace {

#if defined(__AVX512F__)

// gate = silu(gate) * up, within 4 ulp: e^-gate as 2^x (a polynomial of degree 5 on -0.5..0.5, within
// 2^-23), and 1 / (1 + e^-gate) as an estimate of 14 bits and one step of Newton's.
template <int R>
inline void swiglu(Floats (&gate)[R], const Floats (&up)[R]) {
  // Below it 1 / (1 + e^-gate) counts as 0: it nears the least normal number.
  const __m512 least = _mm512_set1_ps(-87.33f), one = _mm512_set1_ps(1.0f);
  const __m512 factor = _mm512_set1_ps(-1.44269504f);  // -log2 e, and what is missing of it
  const __m512 missing = _mm512_set1_ps(-1.92596299e-8f);
  __m512 bounded[R], whole[R], x[R], p[R];
  for (int i = 0; i < R; ++i) {  // the second operand is taken where one is no number
    bounded[i] = _mm512_min_ps(-least, _mm512_max_ps(least, (__m512)gate[i]));
    whole[i] = _mm512_roundscale_ps(bounded[i] * factor, _MM_FROUND_TO_NEAREST_INT);
    x[i] = _mm512_fmsub_ps(bounded[i], factor, whole[i]);
    x[i] = _mm512_fmadd_ps(bounded[i], missing, x[i]);
    p[i] = _mm512_set1_ps(1.32764717e-3f);
  }
  for (const float term :
       {9.67554133e-3f, 5.55071327e-2f, 0.240221197f, 0.693146967f, 1.00000007f}) {
    for (int i = 0; i < R; ++i) p[i] = _mm512_fmadd_ps(p[i], x[i], _mm512_set1_ps(term));
  }
  for (int i = 0; i < R; ++i) {
    const __m512 all = one + _mm512_scalef_ps(p[i], whole[i]);
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)gate[i], least, _CMP_NLT_UQ);
    __m512 share = _mm512_maskz_rcp14_ps(counts, all);
    share = _mm512_fmadd_ps(share, _mm512_fnmadd_ps(all, share, one), share);
    gate[i] = gate[i] * (Floats)share * up[i];
  }
}

#else

// x = exp(x), within 2 ulp, with plain multiplications and additions: x = n ln 2 + r,
// |r| <= ln 2 / 2 (Cody and Waite's split of ln 2), a polynomial of degree 7 (Taylor: its rest is
// below 2^-27), and 2^n in two factors so that overflow gives Inf and underflow goes through
// subnormals to 0. NaN stays NaN: both comparisons with it are false.
template <int R>
inline void exponential(Floats (&x)[R]) {
  const Floats most = Floats{} + 110.0f, least = -most;
  Floats shifted[R], p[R];
  Ints n[R];
  for (int i = 0; i < R; ++i) x[i] = x[i] > most ? most : x[i];
  for (int i = 0; i < R; ++i) x[i] = x[i] < least ? least : x[i];
  for (int i = 0; i < R; ++i) shifted[i] = x[i] * 1.44269504f + ROUNDER;
  for (int i = 0; i < R; ++i) n[i] = (Ints)shifted[i] - ROUNDER_BITS;
  for (int i = 0; i < R; ++i) shifted[i] = shifted[i] - ROUNDER;
  for (int i = 0; i < R; ++i) x[i] = x[i] - shifted[i] * 0.693359375f;
  for (int i = 0; i < R; ++i) x[i] = x[i] - shifted[i] * -2.12194440e-4f;
  for (int i = 0; i < R; ++i) p[i] = x[i] * (1.0f / 5040.0f) + 1.0f / 720.0f;
  for (const float term : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f}) {
    for (int i = 0; i < R; ++i) p[i] = p[i] * x[i] + term;
  }
  for (int i = 0; i < R; ++i) p[i] = p[i] * (x[i] * x[i]) + x[i];
  for (int i = 0; i < R; ++i) p[i] = p[i] + 1.0f;
  for (int i = 0; i < R; ++i) {
    const Ints half = n[i] >> 1;
    x[i] = p[i] * (Floats)((half + 127) << 23) * (Floats)((n[i] - half + 127) << 23);
  }
}

// gate = silu(gate) * up
template <int R>
inline void swiglu(Floats (&gate)[R], const Floats (&up)[R]) {
  Floats e[R];
  for (int i = 0; i < R; ++i) e[i] = -gate[i];
  exponential(e);
  for (int i = 0; i < R; ++i) gate[i] = gate[i] / (1.0f + e[i]) * up[i];
}

#endif

}  // namespace
}  // namespace specserve
