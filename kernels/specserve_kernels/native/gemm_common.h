// What every instruction set does with the same bits: preparing rows, and finishing a tile.
//
// Compiled once per instruction set, so everything is in an anonymous namespace (a shared inline
// function would be merged by the linker, and AVX-512 code would run on an AVX2 machine). Loops
// over 16 lanes use only +, *, / and integer operations, each rounded on its own, so the compiler
// may vectorise them as it likes and no bit depends on the vector length or on the lane.
#pragma once
#include <cstring>
#include <vector>

#include "gemm_kernels.h"
#include "gemm_mix.h"

namespace specserve {
namespace {

// 1.5 * 2^23: adding it to |v| < 2^22 rounds v to an integer, ties to even, in the low bits.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4b400000;
// Rows whose largest entry is below 2^-120 count as zero: 127 / amax would overflow.
constexpr int32_t SMALLEST_AMAX_BITS = 0x03800000;
constexpr int32_t INFINITY_BITS = 0x7f800000;

inline int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a row becomes int8: q = round(x * inverse), and x is about q * scale.
struct RowScale {
  float scale, inverse;
};

inline RowScale row_scale(const float* x, int64_t k) {
  int32_t largest = 0;  // magnitudes of floats order like integers, NaN and Inf on top
  for (int64_t i = 0; i < k; ++i) {
    const int32_t magnitude = bits_of(x[i]) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  // A row with NaN or Inf: zeros times a NaN scale, so that every output of it is NaN.
  if (largest >= INFINITY_BITS) return {float_of(0x7fc00000), 0.0f};
  if (largest < SMALLEST_AMAX_BITS) return {0.0f, 0.0f};
  const float amax = float_of(largest);
  return {amax / 127.0f, 127.0f / amax};
}

template <int ZERO>
inline void quantise64(const float* x, float inverse, int8_t* q) {
  for (int i = 0; i < 64; ++i) {
    q[i] = static_cast<int8_t>(bits_of(x[i] * inverse + ROUNDER) - (ROUNDER_BITS - ZERO));
  }
}

// One row to bytes q + ZERO, mixed in blocks of 64, which lie `block_stride` bytes apart. Returns the
// scale.
template <int ZERO>
inline float quantise_row(const float* x, int64_t k, int8_t* q, int64_t block_stride) {
  thread_local std::vector<float> scratch;
  const int64_t padded = round_up(k, MIXED);
  if (static_cast<int64_t>(scratch.size()) < padded) scratch.resize(static_cast<size_t>(padded));
  float* mixed = scratch.data();
  for (int64_t i = 0; i < padded; i += MIXED) {
    mix(x + i, k - i < MIXED ? k - i : MIXED, mixed + i);
  }
  const RowScale by = row_scale(mixed, padded);
  for (int64_t i = 0; i < padded; i += MIXED, q += block_stride) {
    if (by.inverse == 0.0f) {
      std::memset(q, ZERO, MIXED);
    } else {
      quantise64<ZERO>(mixed + i, by.inverse, q);
    }
  }
  return by.scale;
}

// Round to nearest even; NaN stays NaN (its payload is cut, its quiet bit is set).
inline uint16_t to_bf16(float value) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(value));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

inline void to_bf16_row(const float* x, int64_t k, uint16_t* dst, int64_t block_stride) {
  for (int64_t begin = 0; begin < round_up(k, 64); begin += 32) {
    uint16_t* block = dst + begin / 32 * block_stride;
    if (begin + 32 <= k) {
      for (int i = 0; i < 32; ++i) block[i] = to_bf16(x[begin + i]);
      continue;
    }
    for (int64_t i = 0; i < 32; ++i) block[i] = begin + i < k ? to_bf16(x[begin + i]) : 0;
  }
}

inline int64_t padded_rows_end(const PrepareRows& p) {
  return p.row_end == p.num_rows ? round_up(p.num_rows, 16) : p.row_end;
}

// ZERO: 0 for signed bytes, 128 for unsigned ones.
template <int ZERO>
inline void prepare_i8(const PrepareRows& p) {
  const int64_t num_blocks = round_up(p.k, 64) / 64;
  int8_t* prepared = static_cast<int8_t*>(p.prepared);
  for (int64_t m = p.row_begin; m < padded_rows_end(p); ++m) {
    int8_t* row = prepared + (m / 16 * num_blocks * 16 + m % 16) * 64;
    if (m < p.row_end) {
      p.row_scales[m] = quantise_row<ZERO>(p.x + m * p.ldx, p.k, row, TILE_BYTES);
      continue;
    }
    for (int64_t b = 0; b < num_blocks; ++b) std::memset(row + b * TILE_BYTES, 0, 64);
  }
}

inline void prepare_bf16(const PrepareRows& p) {
  const int64_t num_blocks = round_up(p.k, 64) / 32;
  uint16_t* prepared = static_cast<uint16_t*>(p.prepared);
  for (int64_t m = p.row_begin; m < padded_rows_end(p); ++m) {
    uint16_t* row = prepared + (m / 16 * num_blocks * 16 + m % 16) * 32;
    const bool real = m < p.row_end;
    to_bf16_row(real ? p.x + m * p.ldx : nullptr, real ? p.k : 0, row, TILE_BYTES / 2);
    if (real) continue;
    for (int64_t b = 0; b < num_blocks; ++b) std::memset(row + b * TILE_BYTES / 2, 0, 64);
  }
}

inline void prepare_f32(const PrepareRows& p) {
  const int64_t padded = round_up(p.k, 64);
  float* prepared = static_cast<float*>(p.prepared);
  for (int64_t m = p.row_begin; m < padded_rows_end(p); ++m) {
    const int64_t num_real = m < p.row_end ? p.k : 0;
    float* row = prepared + m * padded;
    if (num_real > 0) std::memcpy(row, p.x + m * p.ldx, static_cast<size_t>(num_real) * 4);
    std::memset(row + num_real, 0, static_cast<size_t>(padded - num_real) * 4);
  }
}

// x = exp(x), within 2 ulp, with plain multiplications and additions: x = n ln 2 + r,
// |r| <= ln 2 / 2 (Cody and Waite's split of ln 2), a polynomial of degree 7 (Taylor: its rest is
// below 2^-27), and 2^n in two factors so that overflow gives Inf and underflow goes through
// subnormals to 0. NaN stays NaN: both comparisons with it are false.
inline void exponential(Floats& x) {
  constexpr float BOUND = 110.0f;
  const Ints above = x > BOUND, below = x < -BOUND;
  const Floats bound = Floats{} + BOUND, minus_bound = Floats{} - BOUND;
  x = (Floats)((above & (Ints)bound) | (below & (Ints)minus_bound) | (~(above | below) & (Ints)x));
  const Floats shifted = x * 1.44269504f + ROUNDER;
  const Ints n = (Ints)shifted - ROUNDER_BITS;
  const Floats whole = shifted - ROUNDER;
  const Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Floats p = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  const Ints half = n >> 1;
  x = p * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

// gate = silu(gate) * up
inline void swiglu(Floats& gate, const Floats& up) {
  Floats e = -gate;
  exponential(e);
  gate = gate / (1.0f + e) * up;
}

// Scales and bias of one column tile, padded to 16 lanes.
struct ColumnTile {
  Floats scales, bias;
  int64_t first;  // column
  int num_valid;
};

inline void fill(ColumnTile& c, const Weight& w, int64_t tile) {
  c.first = tile * LANES;
  const int64_t left = w.n - c.first;
  c.num_valid = left < LANES ? static_cast<int>(left) : LANES;
  c.scales = c.bias = Floats{};
  const size_t bytes = static_cast<size_t>(c.num_valid) * sizeof(float);
  if (w.dtype == DType::I8) std::memcpy(&c.scales, w.scales + c.first, bytes);
  if (w.bias != nullptr) std::memcpy(&c.bias, w.bias + c.first, bytes);
}

// The 16 values of one row from its sums: the one formula of every instruction set.
inline void tile_values(const Product& p, const ColumnTile& c, int64_t m, const int32_t* sums,
                        Floats& v) {
  Ints exact;
  std::memcpy(&exact, sums, sizeof exact);
  v = __builtin_convertvector(exact, Floats) * p.row_scales[m] * c.scales;
  if (p.weight->bias != nullptr) v += c.bias;
}

inline void tile_values(const Product& p, const ColumnTile& c, int64_t, const float* sums,
                        Floats& v) {
  std::memcpy(&v, sums, sizeof v);
  if (p.weight->bias != nullptr) v += c.bias;
}

inline void add_to(const float* out, Floats& v) {
  Floats before;
  std::memcpy(&before, out, sizeof before);
  v = before + v;
}

// Finish rows m..m+num_rows of `num_tiles` neighbouring column tiles (an even number for SWIGLU).
// sums: the sums of row r of tile t start at sums[t * tile_stride + r * LANES].
template <typename Sum>
inline void finish(const Product& p, const ColumnTile* columns, int num_tiles, int64_t m,
                   int num_rows, const Sum* sums, int tile_stride) {
  Floats v, up;
  if (p.epilogue == Epilogue::SWIGLU) {
    for (int t = 0; t + 1 < num_tiles; t += 2) {
      for (int r = 0; r < num_rows; ++r) {
        const Sum* gate_sums = sums + t * tile_stride + r * LANES;
        tile_values(p, columns[t], m + r, gate_sums, v);
        tile_values(p, columns[t + 1], m + r, gate_sums + tile_stride, up);
        swiglu(v, up);
        std::memcpy(p.out + (m + r) * p.ldo + columns[t].first / 2, &v, sizeof v);
      }
    }
    return;
  }
  const bool add = p.epilogue == Epilogue::ADD;
  for (int t = 0; t < num_tiles; ++t) {
    const ColumnTile& c = columns[t];
    for (int r = 0; r < num_rows; ++r) {
      tile_values(p, c, m + r, sums + t * tile_stride + r * LANES, v);
      float* out = p.out + (m + r) * p.ldo + c.first;
      if (c.num_valid == LANES) {
        if (add) add_to(out, v);
        std::memcpy(out, &v, sizeof v);
        continue;
      }
      for (int j = 0; j < c.num_valid; ++j) out[j] = add ? out[j] + v[j] : v[j];
    }
  }
}

inline int64_t packed_tile_bytes(DType dtype, int64_t k) {
  const int64_t padded = round_up(k, 64);
  if (dtype == DType::I8) return padded * LANES + SUMS_BYTES;
  return padded * LANES * (dtype == DType::BF16 ? 2 : 4);
}

// Asks for the weights that come after column tiles tile..tile+num_tiles: as many of the same
// product, or what the caller reads next. One line at least in each of num_steps steps.
struct Prefetch {
  const char* next;
  const char* end;
  int64_t lines_per_step;

  Prefetch(const Product& p, int64_t tile, int num_tiles, int64_t tile_bytes, int64_t num_steps) {
    const char* packed = static_cast<const char*>(p.weight->packed);
    const int64_t left = p.tile_end - tile - num_tiles;
    const int64_t bytes = tile_bytes * (left > 0 && left < num_tiles ? left : num_tiles);
    next = left > 0 ? packed + (tile + num_tiles) * tile_bytes : static_cast<const char*>(p.ahead);
    end = next == nullptr ? nullptr : next + bytes;
    lines_per_step = (bytes / 64 + num_steps - 1) / num_steps;
  }

  inline void step() {
    for (int64_t i = 0; i < lines_per_step && next < end; ++i, next += 64) {
      __builtin_prefetch(next, 0, 2);  // to the second level
    }
  }
};

}  // namespace
}  // namespace specserve
