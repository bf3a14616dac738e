// What is done row by row between matrix products: compiled once per instruction set, chosen once.
//
// A machine uses one set for everything, so that a row meets the same instructions on every path.
#pragma once
#include "attention.h"

namespace specserve {

struct RowKernels {
  const char* name;
  void (*thread_begin)();  // before a thread's first item of attention in a call, and after its last
  void (*thread_end)();
  // y = x / rms(x) * weight, n values.
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t n, float eps);
  // Turns the pairs (x[i], x[i + H/2]) of one head by their angles; cos, sin [H/2].
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t head_dim);
  // One token's keys and values [G, H] into slot `offset` of block `block`.
  void (*write_kv)(const KvLayer& kv, const Heads& heads, int64_t block_size, int64_t block,
                   int64_t offset, const float* key, const float* value);
  void (*widen_bf16)(const uint16_t* x, float* y, int64_t n);
  void (*attend)(const AttentionCall& call, const AttentionItem& item, void* scratch);
  // Adds up the parts of one (row, head) of a merge.
  void (*merge)(const AttentionCall& call, const AttentionMerge& merge, int64_t row, int64_t head,
                void* scratch);
};

// nullptr where this binary or CPU has no such set.
const RowKernels* amx_row_kernels();  // AVX-512, and AMX for attention over KV in bf16
const RowKernels* avx512_row_kernels();
const RowKernels* avx2_row_kernels();
const RowKernels* portable_row_kernels();

const RowKernels& row_kernels();                // the set in use: the best, unless chosen otherwise
bool choose_row_kernels(const char* name);   // false where this CPU cannot. Not while a step runs

}  // namespace specserve
