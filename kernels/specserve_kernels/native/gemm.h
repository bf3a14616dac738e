// Matrix products of one decoder step on a CPU: weights packed once, rows prepared once, columns
// split over threads by the caller.
//
// The rule every path keeps: a row's result is a function of that row alone, bit for bit, whatever
// M, its place, and the column range of the call. int8 keeps it by integer sums; bf16 and f32 by
// one fixed order of additions over k for every M (so one machine uses ONE instruction path per
// dtype, never a faster one for M = 1).
#pragma once
#include <cstddef>
#include <cstdint>

namespace specserve {

enum class DType : int32_t { F32 = 0, BF16 = 1, I8 = 2 };

// What a gemm does with a finished tile of columns.
enum class Epilogue : int32_t {
  STORE = 0,   // out = x @ w.T (+ bias)
  ADD = 1,     // out += x @ w.T (+ bias): the residual stream
  SWIGLU = 2,  // weight rows come in alternating groups of 16: gate columns, then up columns;
               // out[m, j] = silu(gate[m, j]) * up[m, j], so out has n / 2 columns
};

// Column ranges of a call start and end at multiples of it (the end may also be n); with SWIGLU at
// multiples of twice it, so that a gate is in the same call as its up.
constexpr int64_t COLUMN_TILE = 16;

// A weight [n, k] packed by pack(). One packed layout per dtype, the same for every instruction
// set, so that a packed file can be moved between machines. Packing consecutive slices of 16 rows
// one by one gives the bytes of packing them together: Q, K and V (or slices on several threads)
// may be packed one behind the other, gate and up in turns.
struct Weight {
  DType dtype;
  int64_t n, k;          // as the model has them; the packed form pads n to 16 and k to 64
  // 64-byte aligned. In huge pages (anonymous memory aligned to 2 MiB, madvise(MADV_HUGEPAGE)) all
  // products of a small model take 0.8 of the time that 4 KiB pages take, measured on one core.
  const void* packed;
  const float* scales;   // [n] per output column, I8 only
  const float* bias;     // [n] or nullptr
};

// k is at most 65,536 for I8 (int32 sums).
size_t packed_bytes(DType dtype, int64_t n, int64_t k);
// src [n, k] row-major f32 -> dst; scales [n] is written for I8: amax / 127, symmetric.
void pack(DType dtype, int64_t n, int64_t k, const float* src, void* dst, float* scales);

// Rows in the form their gemm reads: int8 with one scale per row (mixed as gemm_mix.h says, weights
// too; then amax / 127, round to nearest even; plus 128 where products want unsigned bytes), or bf16
// (round to nearest even), or f32. k is padded with zeros. An int8 row of zeros (or all below
// 2^-120) has scale 0; one with NaN or Inf has scale NaN, which makes its outputs NaN.
size_t prepared_bytes(DType dtype, int64_t num_rows, int64_t k);
// `prepared` is 64-byte aligned. Whoever prepares the last row also zeroes the padding behind it,
// where products read it.
// Prepare rows row_begin..row_end of x [num_rows, k] (leading dimension ldx) into `prepared`.
void prepare(DType dtype, int64_t num_rows, int64_t row_begin, int64_t row_end, int64_t k,
             const float* x, int64_t ldx, void* prepared, float* row_scales);

// Columns col_begin..col_end (of the weight's n) of x @ w.T for all num_rows rows.
// out [num_rows, n or n/2] f32 with leading dimension ldo. Called by several threads at once on
// disjoint column ranges; holds no state but the thread's own scratch. `ahead`: packed weights that
// this thread reads next, asked for while the last columns are computed.
void gemm(const Weight& weight, int64_t num_rows, const void* prepared, const float* row_scales,
          int64_t col_begin, int64_t col_end, Epilogue epilogue, float* out, int64_t ldo,
          const void* ahead = nullptr);

// What a thread must do before its first and after its last gemm of a step (AMX tile state).
void gemm_thread_begin();
void gemm_thread_end();

// The instruction set in use: "amx", "avx512vnni", "avx2", "portable". `choose` forces a lower one
// (tests); returns false where this CPU cannot run it. Not while a step runs.
const char* instruction_set(DType dtype);
bool choose_instruction_set(const char* name);
bool may_use_amx();  // int8 and bf16 tiles: this CPU has them, and the system lends them

}  // namespace specserve
