// What each instruction set offers to gemm.cpp, and the byte layouts they share.
//
//   weights  int8: [n/16] of { [k/64][16 groups][16 n][4 k] int8, [16] int32 column sums }
//            bf16: [n/16][k/32][16 pairs][16 n][2 k]     f32: [n/16][k][16 n]
//            so a packed column tile stands alone: packing the 16-row slices of a weight one by
//            one, or weights one below the other, gives the bytes of packing them together.
//   rows     int8: [M/16][k/64][16 m][64 k]   bf16: [M/16][k/32][16 m][32 k]   (1 KiB tiles)
//            f32: [M/16][16 m][k]             k is padded to 64, M to 16, both with zeros.
//            AVX-512 takes bf16 rows widened to f32: [M/16][k/16][16 m][16 k], and rows behind the
//            last as they are.
#pragma once
#include "gemm.h"

namespace specserve {

constexpr int64_t TILE_BYTES = 1024;  // one AMX tile: 16 rows of 64 bytes
constexpr int64_t SUMS_BYTES = 64;    // the column sums behind an int8 column tile
// int32 sums of 255 * 127 products (unsigned rows of dpbusd) cannot overflow up to here.
constexpr int64_t MAX_INT8_K = 65536;

struct Product {
  const Weight* weight;
  int64_t num_rows;
  const void* prepared;
  const float* row_scales;
  int64_t tile_begin, tile_end;  // column tiles
  Epilogue epilogue;
  float* out;
  int64_t ldo;
  const void* ahead;  // weights that the thread reads next, or nullptr
};

struct PrepareRows {
  int64_t num_rows, row_begin, row_end, k;
  const float* x;
  int64_t ldx;
  void* prepared;
  float* row_scales;
};

struct Kernels {
  const char* names[3];  // by DType: what really runs
  void (*prepare[3])(const PrepareRows&);
  void (*gemm[3])(const Product&);
  void (*thread_begin)();
  void (*thread_end)();
};

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace specserve
