// build:
// Packing, sizes, and the choice of instruction set at run time.
#include "gemm.h"

#include <vector>

#include "gemm_common.h"
#include "gemm_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specserve {
namespace {

#if defined(__x86_64__)

struct Processor {
  bool avx2 = false, avx512 = false, amx = false;
};

bool has(uint32_t bits, int bit) { return (bits >> bit & 1u) != 0; }

// Linux gives the 8 KiB of tile state only to processes that ask (arch_prctl(2)).
bool may_use_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

Processor detect() {
  Processor found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool fma = has(c, 12), f16c = has(c, 29);
  if (!has(c, 27)) return found;  // OSXSAVE: xgetbv exists
  uint32_t saved = 0, saved_high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = (saved & 0x6u) == 0x6u && fma && f16c && has(b, 5);
  const bool f_dq_bw_vl = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
  found.avx512 = found.avx2 && (saved & 0xe6u) == 0xe6u && f_dq_bw_vl && has(c, 11);
  const bool tile_int8_bf16 = has(d, 24) && has(d, 25) && has(d, 22);
  found.amx = found.avx512 && (saved & 0x60000u) == 0x60000u && tile_int8_bf16 && may_use_tiles();
  return found;
}

const Processor& processor() {
  static const Processor found = detect();
  return found;
}

const Kernels* kernels_named(const char* name) {
  if (processor().amx && std::strcmp(name, "amx") == 0) return &amx_kernels();
  if (processor().avx512 && std::strcmp(name, "avx512vnni") == 0) return &avx512_kernels();
  if (processor().avx2 && std::strcmp(name, "avx2") == 0) return &avx2_kernels();
  return std::strcmp(name, "portable") == 0 ? &portable_kernels() : nullptr;
}

#else

const Kernels* kernels_named(const char* name) {
  return std::strcmp(name, "portable") == 0 ? &portable_kernels() : nullptr;
}

#endif

const Kernels* best_kernels() {
  for (const char* name : {"amx", "avx512vnni", "avx2"}) {
    if (const Kernels* kernels = kernels_named(name)) return kernels;
  }
  return &portable_kernels();
}

const Kernels*& kernels_in_use() {
  static const Kernels* in_use = best_kernels();
  return in_use;
}

int index(DType dtype) { return static_cast<int>(dtype); }

void pack_i8(int64_t n, int64_t k, const float* src, char* dst, float* scales) {
  const int64_t padded = round_up(k, 64), tile_bytes = packed_tile_bytes(DType::I8, k);
  std::vector<int8_t> row(static_cast<size_t>(padded));
  std::memset(dst, 0, packed_bytes(DType::I8, n, k));
  for (int64_t j = 0; j < n; ++j) {
    char* tile = dst + j / LANES * tile_bytes;
    scales[j] = quantise_row<0>(src + j * k, k, row.data(), 64);
    int32_t sum = 0;
    for (int64_t i = 0; i < padded; ++i) sum += row[static_cast<size_t>(i)];
    for (int64_t i = 0; i < padded; i += 4) std::memcpy(tile + i * 16 + j % 16 * 4, &row[i], 4);
    std::memcpy(tile + tile_bytes - SUMS_BYTES + j % 16 * 4, &sum, 4);
  }
}

void pack_bf16(int64_t n, int64_t k, const float* src, char* dst) {
  const int64_t tile_bytes = packed_tile_bytes(DType::BF16, k);
  std::memset(dst, 0, packed_bytes(DType::BF16, n, k));
  for (int64_t j = 0; j < n; ++j) {
    uint16_t* tile = reinterpret_cast<uint16_t*>(dst + j / LANES * tile_bytes);
    for (int64_t i = 0; i < k; ++i) {
      tile[i / 2 * 32 + j % 16 * 2 + i % 2] = to_bf16(src[j * k + i]);
    }
  }
}

void pack_f32(int64_t n, int64_t k, const float* src, char* dst) {
  const int64_t tile_bytes = packed_tile_bytes(DType::F32, k);
  std::memset(dst, 0, packed_bytes(DType::F32, n, k));
  for (int64_t j = 0; j < n; ++j) {
    float* tile = reinterpret_cast<float*>(dst + j / LANES * tile_bytes);
    for (int64_t i = 0; i < k; ++i) tile[i * 16 + j % 16] = src[j * k + i];
  }
}

}  // namespace

size_t packed_bytes(DType dtype, int64_t n, int64_t k) {
  return static_cast<size_t>(round_up(n, LANES) / LANES * packed_tile_bytes(dtype, k));
}

void pack(DType dtype, int64_t n, int64_t k, const float* src, void* dst, float* scales) {
  char* to = static_cast<char*>(dst);
  if (dtype == DType::I8) return pack_i8(n, k, src, to, scales);
  if (dtype == DType::BF16) return pack_bf16(n, k, src, to);
  pack_f32(n, k, src, to);
}

size_t prepared_bytes(DType dtype, int64_t num_rows, int64_t k) {
  const int64_t element = dtype == DType::I8 ? 1 : 4;  // AVX-512 widens bf16 rows
  return static_cast<size_t>(round_up(num_rows, 16) * round_up(k, 64) * element);
}

void prepare(DType dtype, int64_t num_rows, int64_t row_begin, int64_t row_end, int64_t k,
             const float* x, int64_t ldx, void* prepared, float* row_scales) {
  kernels_in_use()->prepare[index(dtype)](
      {num_rows, row_begin, row_end, k, x, ldx, prepared, row_scales});
}

void gemm(const Weight& weight, int64_t num_rows, const void* prepared, const float* row_scales,
          int64_t col_begin, int64_t col_end, Epilogue epilogue, float* out, int64_t ldo,
          const void* ahead) {
  if (num_rows == 0 || col_begin >= col_end) return;
  const int64_t tile_end = round_up(col_end, COLUMN_TILE) / COLUMN_TILE;
  kernels_in_use()->gemm[index(weight.dtype)]({&weight, num_rows, prepared, row_scales,
                                               col_begin / COLUMN_TILE, tile_end, epilogue, out,
                                               ldo, ahead});
}

void gemm_thread_begin() { kernels_in_use()->thread_begin(); }

void gemm_thread_end() { kernels_in_use()->thread_end(); }

bool may_use_amx() {
#if defined(__x86_64__)
  return processor().amx;
#else
  return false;
#endif
}

const char* instruction_set(DType dtype) { return kernels_in_use()->names[index(dtype)]; }

bool choose_instruction_set(const char* name) {
  const Kernels* kernels = kernels_named(name);
  if (kernels == nullptr) return false;
  kernels_in_use() = kernels;
  return true;
}

}  // namespace specserve
