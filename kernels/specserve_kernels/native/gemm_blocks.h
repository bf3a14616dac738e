// The loops around a block of rows times a few column tiles, for instruction sets whose sums stay
// in registers over all of k (AVX2, AVX-512).
//
// A panel of column tiles is multiplied with all rows before the next is touched, so weights stream
// from memory once; the next panel is asked for in equal shares meanwhile. Blocks stay inside 16
// rows, which lie 64 bytes apart, and are of even size: 9 rows are 5 and 4.
//
// A Dot has: Sum, DTYPE, MAX_ROWS, MAX_TILES, and multiply<R, T>(product, first row, weights,
// bytes of a column tile, prefetch, sums [T][R][16]); it calls prefetch.step() once per 64 bytes of
// a row.
#pragma once
#include "gemm_common.h"

namespace specserve {
namespace {

template <typename Dot, int R, int T>
inline void rows(const Product& p, int64_t m, const char* w, int64_t tile_bytes,
                 const ColumnTile* columns, Prefetch& prefetch) {
  alignas(64) typename Dot::Sum sums[R * T * LANES];
  Dot::template multiply<R, T>(p, m, w, tile_bytes, prefetch, sums);
  finish(p, columns, T, m, R, sums, R * LANES);
}

// `count` rows, at most R.
template <typename Dot, int T, int R = Dot::MAX_ROWS>
inline void some_rows(int64_t count, const Product& p, int64_t m, const char* w,
                      int64_t tile_bytes, const ColumnTile* columns, Prefetch& prefetch) {
  if (count == R) return rows<Dot, R, T>(p, m, w, tile_bytes, columns, prefetch);
  if constexpr (R > 1)
    some_rows<Dot, T, R - 1>(count, p, m, w, tile_bytes, columns, prefetch);
}

template <typename Dot, int T>
inline void panel(const Product& p, int64_t tile, int64_t tile_bytes) {
  const char* w = static_cast<const char*>(p.weight->packed) + tile * tile_bytes;
  ColumnTile columns[T];
  for (int t = 0; t < T; ++t) fill(columns[t], *p.weight, tile + t);
  const int64_t num_blocks = (p.num_rows + Dot::MAX_ROWS - 1) / Dot::MAX_ROWS;
  Prefetch prefetch(p, tile, T, tile_bytes, num_blocks * (tile_bytes / TILE_BYTES));
  for (int64_t first = 0; first < p.num_rows; first += LANES) {
    const int64_t end = first + LANES < p.num_rows ? first + LANES : p.num_rows;
    for (int64_t m = first; m < end;) {
      const int64_t left = end - m, blocks = (left + Dot::MAX_ROWS - 1) / Dot::MAX_ROWS;
      const int64_t count = (left + blocks - 1) / blocks;
      some_rows<Dot, T>(count, p, m, w, tile_bytes, columns, prefetch);
      m += count;
    }
  }
}

template <typename Dot, int T = Dot::MAX_TILES>
inline void panels(const Product& p, int64_t tile, int64_t tile_bytes) {
  for (; tile + T <= p.tile_end; tile += T) panel<Dot, T>(p, tile, tile_bytes);
  if constexpr (T > 1) panels<Dot, T / 2>(p, tile, tile_bytes);
}

template <typename Dot>
void gemm(const Product& p) {
  panels<Dot>(p, p.tile_begin, packed_tile_bytes(Dot::DTYPE, p.weight->k));
}

}  // namespace
}  // namespace specserve
