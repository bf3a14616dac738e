// Chooses the instruction set once, at first use.
#include "row_kernels.h"

#include <atomic>
#include <cstring>

#include "gemm.h"

namespace specserve {

namespace {

#if defined(__x86_64__) || defined(_M_X64)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}
bool has_amx() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && may_use_amx();
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

const RowKernels* by_name(const char* name) {
#if defined(__x86_64__) || defined(_M_X64)
  if (!strcmp(name, "amx")) return has_amx() ? amx_row_kernels() : nullptr;
  if (!strcmp(name, "avx512")) return has_avx512() ? avx512_row_kernels() : nullptr;
  if (!strcmp(name, "avx2")) return has_avx2() ? avx2_row_kernels() : nullptr;
#endif
  return strcmp(name, "portable") ? nullptr : portable_row_kernels();
}

const RowKernels* best() {
  for (const char* name : {"amx", "avx512", "avx2"})
    if (const RowKernels* found = by_name(name)) return found;
  return portable_row_kernels();
}

std::atomic<const RowKernels*> chosen{nullptr};

}  // namespace

const RowKernels& row_kernels() {
  const RowKernels* in_use = chosen.load(std::memory_order_acquire);
  if (in_use) return *in_use;
  chosen.store(best(), std::memory_order_release);
  return *chosen.load();
}

bool choose_row_kernels(const char* name) {
  const RowKernels* found = by_name(name);
  if (found) chosen.store(found);
  return found != nullptr;
}

}  // namespace specserve
