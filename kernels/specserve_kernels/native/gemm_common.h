// What every instruction set does with the same bits: preparing rows, and finishing a tile.
//
// Compiled once per instruction set, so everything is in an anonymous namespace (a shared inline
// function would be merged by the linker, and AVX-512 code would run on an AVX2 machine). Loops
// over 16 lanes use only +, *, / and integer operations, each rounded on its own, so the compiler
// may vectorise them as it likes and no bit depends on the vector length or on the lane; SwiGLU's
// are the one exception.
#pragma once
#include <cstring>
#include <vector>

#include "gemm_kernels.h"
#include "gemm_mix.h"
#include "gemm_swiglu.h"

namespace specserve {
namespace {

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

// What turns the sums of a column tile into values, apart from the row: copied out of Product and
// ColumnTile, since the compiler must take every store of an output for one to those.
struct Finish {
  Floats scales, bias;
  bool has_bias;
  const float* row_scales;
};

inline void start(Finish& by, const Product& p, const ColumnTile& c, int64_t m) {
  by.scales = c.scales;
  by.bias = c.bias;
  by.has_bias = p.weight->bias != nullptr;
  by.row_scales = p.row_scales == nullptr ? nullptr : p.row_scales + m;  // int8's alone
}

// The 16 values of row r from its sums: the one formula of every instruction set.
inline void tile_values(const Finish& by, int r, const int32_t* sums, Floats& v) {
  Ints exact;
  std::memcpy(&exact, sums, sizeof exact);
  v = __builtin_convertvector(exact, Floats) * by.row_scales[r] * by.scales;
  if (by.has_bias) v += by.bias;
}

inline void tile_values(const Finish& by, int, const float* sums, Floats& v) {
  std::memcpy(&v, sums, sizeof v);
  if (by.has_bias) v += by.bias;
}

template <bool ADD, typename Sum>
inline void finish_whole_tile(const Product& p, const ColumnTile& c, int64_t m, int num_rows,
                              const Sum* sums) {
  Finish by;
  start(by, p, c, m);
  float* out = p.out + m * p.ldo + c.first;
  const int64_t ldo = p.ldo;
  for (int r = 0; r < num_rows; ++r) {
    Floats v;
    tile_values(by, r, sums + r * LANES, v);
    if constexpr (ADD) {
      Floats before;
      std::memcpy(&before, out + r * ldo, sizeof before);
      v = before + v;
    }
    std::memcpy(out + r * ldo, &v, sizeof v);
  }
}

// The last tile of a weight whose rows are no multiple of 16. Lanes taken one by one would keep a
// vector in memory, so never inlined.
template <typename Sum>
__attribute__((noinline)) void finish_cut_tile(const Product& p, const ColumnTile& c, int64_t m,
                                               int num_rows, const Sum* sums) {
  Finish by;
  start(by, p, c, m);
  for (int r = 0; r < num_rows; ++r) {
    Floats v;
    tile_values(by, r, sums + r * LANES, v);
    float* out = p.out + (m + r) * p.ldo + c.first;
    for (int j = 0; j < c.num_valid; ++j) {
      out[j] = p.epilogue == Epilogue::ADD ? out[j] + v[j] : v[j];
    }
  }
}

template <int R, typename Sum>
inline void finish_swiglu_rows(const Finish& gate, const Finish& up, int r, const Sum* gate_sums,
                               const Sum* up_sums, float* out, int64_t ldo) {
  Floats values[R], ups[R];
  for (int i = 0; i < R; ++i) tile_values(gate, r + i, gate_sums + (r + i) * LANES, values[i]);
  for (int i = 0; i < R; ++i) tile_values(up, r + i, up_sums + (r + i) * LANES, ups[i]);
  swiglu(values, ups);
  for (int i = 0; i < R; ++i) std::memcpy(out + (r + i) * ldo, &values[i], sizeof values[i]);
}

template <typename Sum>
inline void finish_swiglu(const Product& p, const ColumnTile* columns, int64_t m, int num_rows,
                          const Sum* gate_sums, const Sum* up_sums) {
  Finish gate, up;
  start(gate, p, columns[0], m);
  start(up, p, columns[1], m);
  float* out = p.out + m * p.ldo + columns[0].first / 2;
  const int in_fours = num_rows / 4 * 4;
  for (int r = 0; r < in_fours; r += 4) {
    finish_swiglu_rows<4>(gate, up, r, gate_sums, up_sums, out, p.ldo);
  }
  for (int left = num_rows % 4; left > 0; --left) {
    finish_swiglu_rows<1>(gate, up, num_rows - left, gate_sums, up_sums, out, p.ldo);
  }
}

// Finish rows m..m+num_rows of `num_tiles` neighbouring column tiles (an even number for SWIGLU).
// sums: the sums of row r of tile t start at sums[t * tile_stride + r * LANES].
template <typename Sum>
inline void finish(const Product& p, const ColumnTile* columns, int num_tiles, int64_t m,
                   int num_rows, const Sum* sums, int tile_stride) {
  if (p.epilogue == Epilogue::SWIGLU) {
    for (int t = 0; t + 1 < num_tiles; t += 2) {
      const Sum* gate_sums = sums + t * tile_stride;
      finish_swiglu(p, columns + t, m, num_rows, gate_sums, gate_sums + tile_stride);
    }
    return;
  }
  for (int t = 0; t < num_tiles; ++t, sums += tile_stride) {
    const ColumnTile& c = columns[t];
    if (c.num_valid < LANES) finish_cut_tile(p, c, m, num_rows, sums);
    else if (p.epilogue == Epilogue::ADD) finish_whole_tile<true>(p, c, m, num_rows, sums);
    else finish_whole_tile<false>(p, c, m, num_rows, sums);
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
