// build[x86_64]: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mamx-tile -mamx-int8 -mamx-bf16 -Wno-maybe-uninitialized
// AMX: 16 x 16 outputs per tile register, 1 KiB of weights per instruction, int8 and bf16.
//
// A panel of column tiles is multiplied with all rows before the next is touched, so weights stream
// from memory once; the next panel is prefetched in equal shares meanwhile. Up to 16 rows the
// weights are the whole cost; beyond, 2 x 2 tiles share their loads. Every output is one chain of
// tile products in the order of k, whatever the blocking, so bf16 rows never depend on M.
#if defined(__x86_64__)
#include "amx_tiles.h"
#include "gemm_common.h"

#include <type_traits>

namespace specserve {
namespace {

#define TILE_PRODUCT(C, A, B)        \
  do {                               \
    if constexpr (BF16) {            \
      _tile_dpbf16ps(C, A, B);       \
    } else {                         \
      _tile_dpbssd(C, A, B);         \
    }                                \
  } while (0)

// sums[(row tile * NT + column tile) * 256 ...] = a [MT * 16, k] @ b [NT * 16, k].T
// Tile registers: results 0-3, rows 4 and 5, weights 6 and 7.
template <bool BF16, int MT, int NT>
inline void multiply(const char* a, const char* b, int64_t b_stride, int64_t num_steps,
                     Prefetch& prefetch, void* all_sums) {
  const char* a1 = a + num_steps * TILE_BYTES;
  char* sums = static_cast<char*>(all_sums);
  _tile_zero(0);
  if constexpr (NT > 1) _tile_zero(1);
  if constexpr (MT > 1) _tile_zero(2);
  if constexpr (MT > 1 && NT > 1) _tile_zero(3);
  for (int64_t at = 0; at < num_steps * TILE_BYTES; at += TILE_BYTES) {
    prefetch.step();
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, b + at, 64);
    TILE_PRODUCT(0, 4, 6);
    if constexpr (NT > 1) {
      _tile_loadd(7, b + b_stride + at, 64);
      TILE_PRODUCT(1, 4, 7);
    }
    if constexpr (MT > 1) {
      _tile_loadd(5, a1 + at, 64);
      TILE_PRODUCT(2, 5, 6);
      if constexpr (NT > 1) TILE_PRODUCT(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (NT > 1) _tile_stored(1, sums + TILE_BYTES, 64);
  if constexpr (MT > 1) _tile_stored(2, sums + NT * TILE_BYTES, 64);
  if constexpr (MT > 1 && NT > 1) _tile_stored(3, sums + 3 * TILE_BYTES, 64);
}

#undef TILE_PRODUCT

template <bool BF16>
struct Panel {
  using Sum = std::conditional_t<BF16, float, int32_t>;
  const Product& p;
  int64_t num_steps;   // tiles over k
  int64_t tile_bytes;  // of one packed column tile

  template <int MT, int NT>
  inline void rows(int64_t row_tile, const char* b, const ColumnTile* columns,
                   Prefetch& prefetch) const {
    alignas(64) Sum sums[4 * 256];
    const char* a = static_cast<const char*>(p.prepared) + row_tile * num_steps * TILE_BYTES;
    multiply<BF16, MT, NT>(a, b, tile_bytes, num_steps, prefetch, sums);
    for (int i = 0; i < MT; ++i) {
      const int64_t m = (row_tile + i) * 16, left = p.num_rows - m;
      finish(p, columns, NT, m, left < 16 ? static_cast<int>(left) : 16, sums + i * NT * 256, 256);
    }
  }

  // All rows of NT column tiles.
  template <int NT>
  inline void columns(int64_t tile) const {
    const char* b = static_cast<const char*>(p.weight->packed) + tile * tile_bytes;
    const int64_t num_row_tiles = (p.num_rows + 15) / 16, num_blocks = (num_row_tiles + 1) / 2;
    Prefetch prefetch(p, tile, NT, tile_bytes, num_blocks * num_steps);
    ColumnTile column_tiles[NT];
    for (int t = 0; t < NT; ++t) fill(column_tiles[t], *p.weight, tile + t);
    int64_t row_tile = 0;
    for (; row_tile + 2 <= num_row_tiles; row_tile += 2) {
      rows<2, NT>(row_tile, b, column_tiles, prefetch);
    }
    if (row_tile < num_row_tiles) rows<1, NT>(row_tile, b, column_tiles, prefetch);
  }

  void all() const {
    int64_t tile = p.tile_begin;
    for (; tile + 2 <= p.tile_end; tile += 2) columns<2>(tile);
    if (tile < p.tile_end) columns<1>(tile);
  }
};

void gemm_i8(const Product& p) {
  const int64_t padded = round_up(p.weight->k, 64);
  Panel<false>{p, padded / 64, packed_tile_bytes(DType::I8, padded)}.all();
}

void gemm_bf16(const Product& p) {
  const int64_t padded = round_up(p.weight->k, 64);
  Panel<true>{p, padded / 32, packed_tile_bytes(DType::BF16, padded)}.all();
}

}  // namespace

const Kernels& amx_kernels() {
  const Kernels& vector = avx512_kernels();
  static const Kernels kernels = {
      {vector.names[0], "amx", "amx"},
      {vector.prepare[0], prepare_bf16, prepare_i8<0>},
      {vector.gemm[0], gemm_bf16, gemm_i8},
      begin_tiles,
      end_tiles,
  };
  return kernels;
}

}  // namespace specserve
#endif
