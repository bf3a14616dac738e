// build:
// The C surface of gemm.h: whole products on one thread, for tests and for packing from Python.
//
// Functions that can be misused return nullptr, or a sentence that names the field, its value, its
// limit and the way out (valid until the thread's next call).
#include <cstdio>
#include <cstdlib>

#include "gemm.h"
#include "gemm_kernels.h"

#define SPECSERVE_API extern "C" __attribute__((visibility("default")))

namespace {

using specserve::DType;
using specserve::Epilogue;

thread_local char message[256];

bool aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

const char* complain(const char* format, long long value, long long limit) {
  std::snprintf(message, sizeof message, format, value, limit);
  return message;
}

const char* check(int32_t dtype, int64_t n, int64_t k, const void* packed) {
  if (dtype < 0 || dtype > 2) {
    return complain("dtype is %lld, but the last known is %lld: use 0 (f32), 1 (bf16), 2 (int8)",
                    dtype, 2);
  }
  if (n < 1) return complain("n is %lld, but must be at least %lld: pass a weight with rows", n, 1);
  if (k < 1) {
    return complain("k is %lld, but must be at least %lld: pass a weight with columns", k, 1);
  }
  if (dtype == static_cast<int32_t>(DType::I8) && k > specserve::MAX_INT8_K) {
    return complain("k is %lld, but int32 sums hold at most %lld: use bf16", k,
                    specserve::MAX_INT8_K);
  }
  if (!aligned(packed)) {
    return complain("packed is %lld bytes past a multiple of %lld: allocate it aligned",
                    static_cast<long long>(reinterpret_cast<uintptr_t>(packed) % 64), 64);
  }
  return nullptr;
}

}  // namespace

SPECSERVE_API size_t specserve_gemm_packed_bytes(int32_t dtype, int64_t n, int64_t k) {
  return specserve::packed_bytes(static_cast<DType>(dtype), n, k);
}

// src [n, k] f32 -> dst [packed_bytes], 64-byte aligned; scales [n] f32 for int8, else unused.
SPECSERVE_API const char* specserve_gemm_pack(int32_t dtype, int64_t n, int64_t k,
                                              const float* src, void* dst, float* scales) {
  if (const char* problem = check(dtype, n, k, dst)) return problem;
  specserve::pack(static_cast<DType>(dtype), n, k, src, dst, scales);
  return nullptr;
}

// out [num_rows, ldo] = the columns col_begin..col_end of x [num_rows, ldx] @ w [n, k].T.
SPECSERVE_API const char* specserve_gemm_run(int32_t dtype, int64_t n, int64_t k,
                                             const void* packed, const float* scales,
                                             const float* bias, int64_t num_rows, const float* x,
                                             int64_t ldx, int64_t col_begin, int64_t col_end,
                                             int32_t epilogue, float* out, int64_t ldo) {
  if (const char* problem = check(dtype, n, k, packed)) return problem;
  const bool swiglu = epilogue == static_cast<int32_t>(Epilogue::SWIGLU);
  const int64_t multiple = specserve::COLUMN_TILE * (swiglu ? 2 : 1);
  if (col_begin % multiple != 0) {
    return complain("col_begin is %lld, but must be a multiple of %lld", col_begin, multiple);
  }
  if (col_end > n) return complain("col_end is %lld, but the weight has %lld rows", col_end, n);
  if (col_end % multiple != 0 && (swiglu || col_end != n)) {
    return complain("col_end is %lld, but must be n or a multiple of %lld", col_end, multiple);
  }
  const DType type = static_cast<DType>(dtype);
  const size_t bytes = (specserve::prepared_bytes(type, num_rows, k) + 64) / 64 * 64;
  void* prepared = std::aligned_alloc(64, bytes);
  const size_t scale_bytes = (static_cast<size_t>(num_rows) + 16) / 16 * 64;
  float* row_scales = static_cast<float*>(std::aligned_alloc(64, scale_bytes));
  const specserve::Weight weight{type, n, k, packed, scales, bias};
  specserve::prepare(type, num_rows, 0, num_rows, k, x, ldx, prepared, row_scales);
  specserve::gemm_thread_begin();
  specserve::gemm(weight, num_rows, prepared, row_scales, col_begin, col_end,
                  static_cast<Epilogue>(epilogue), out, ldo);
  specserve::gemm_thread_end();
  std::free(row_scales);
  std::free(prepared);
  return nullptr;
}

SPECSERVE_API const char* specserve_gemm_instruction_set(int32_t dtype) {
  return specserve::instruction_set(static_cast<DType>(dtype));
}

SPECSERVE_API int32_t specserve_gemm_choose(const char* name) {
  return specserve::choose_instruction_set(name) ? 1 : 0;
}
