// softmax(q K) V of one attention item where there is AMX, for KV in bf16: queries and weights are
// rounded to bf16, as the products want them, sums are fp32.
//
// Two ways to the same bits. Many query vectors: 16 of them times 32 keys in tile registers. Few, or
// a row whose slots are its own: vectors, in the very order in which a tile product adds (its even
// and its odd terms, each a chain of fused multiply-adds from 0, then their sum, then the whole;
// 10,240,000 random products, tiny and huge ones too: no bit differed). So the rule of attention.h
// holds. A score is one sum over 32 head dimensions after the other; a sum over keys one over 32 keys
// after the other. What a row does not see has weight 0 and adds exactly nothing, if its value is a
// number; where some row does not see a value that is none, each row reads its own.
//
// Keys lie in the cache as tiles want them; values are put in pairs of keys once per part. Of 32
// dimensions the first 16 sums are those whose number has bit 2 clear, as the instruction that pairs
// them leaves them: `in_order` undoes that at the end.
#pragma once
#include "amx_tiles.h"
#include "attention_kernels.h"

namespace specserve {
namespace SPECSERVE_ISA {

constexpr int64_t TILE = 16;        // vectors, keys or head dimensions of a tile
constexpr int64_t TILE_SIZE = 512;  // bf16 numbers of one
constexpr int64_t CHUNKS = PART_KEYS / CHUNK_KEYS;
constexpr int64_t LEAST_TILED = 9;  // query vectors of an item for which tiles are faster
constexpr int64_t MOST_ROW_VECTORS = 4;  // of one row side by side: 24 sums in registers

enum class Reading : uint8_t { NOBODY, TOGETHER, ROW_BY_ROW };

// One thread's scratch behind the vector kernels' own, of which `query` holds the rounded queries and
// `scores` those of 16 vectors at a time.
struct Tiles {
  uint16_t* query;       // [vectors / 16][H / 32] tiles
  uint16_t* weights;     // [chunk] tiles [16 vectors, 32 keys]
  uint16_t* values;      // [chunk][H / 16] tiles [16 pairs of keys, 16 h, 2]
  uint16_t* own_keys;    // [2][H / 32] tiles [16 pairs of h, 16 keys, 2], of one row's own chunk
  uint16_t* nothing;     // [H] zeros
};

inline Tiles cut_tiles(void* memory, int64_t head_dim) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + vector_scratch_bytes(head_dim);
  uint16_t* at = reinterpret_cast<uint16_t*>((end + 63) / 64 * 64);
  auto take = [&at](int64_t num_tiles) {
    uint16_t* taken = at;
    at += num_tiles * TILE_SIZE;
    return taken;
  };
  const int64_t steps = head_dim / 32;
  Tiles t;
  t.query = take(MAX_TILE_VECTORS / TILE * steps);
  t.weights = take(CHUNKS);
  t.values = take(CHUNKS * 2 * steps);
  t.own_keys = take(2 * steps);
  t.nothing = at;
  memset(t.nothing, 0, size_t(head_dim) * 2);
  return t;
}

struct AmxItem {
  const Tile& tile;
  const Scratch& s;
  const Tiles& t;
  int64_t head_dim, num_vectors;
  bool tiled;  // whether tile registers are used at all
  Chunk chunks[CHUNKS];  // of the part at hand
  Reading scores[CHUNKS], sums[CHUNKS];

  int64_t steps() const { return head_dim / 32; }
  int64_t row_of(int64_t q) const { return tile.item.row_begin + q / tile.fold; }
  int64_t slot_of(int64_t row, int64_t position) const {
    if (position < tile.context || !tile.is_tree) return position;
    const RowPaths& paths = *tile.call.paths;
    return tile.context + paths.ancestors[size_t(paths.ancestor_start[size_t(row)] + position -
                                                 tile.context)];
  }
};

// 32 floats as bf16, round to nearest even; `first` and `second` become what was kept of them.
inline __m512i round_to_bf16(F& first, F& second) {
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  first = _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)), 16));
  second = _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1)), 16));
  return rounded;
}

inline void round_queries(const AmxItem& w) {
  const AttentionCall& call = w.tile.call;
  const F scale = set1(call.scale);
  for (int64_t q = 0; q < w.num_vectors; q++) {
    const float* from = call.query + w.row_of(q) * call.query_stride +
                        (w.tile.item.head_begin + q % w.tile.fold) * w.head_dim;
    float* to = w.s.query + q * w.s.stride;
    uint16_t* tile = w.t.query + q / TILE * w.steps() * TILE_SIZE + q % TILE * 32;
    for (int64_t h = 0; h < w.head_dim; h += 32, tile += TILE_SIZE) {
      F first = mul(load(from + h), scale), second = mul(load(from + h + W), scale);
      _mm512_store_si512(tile, round_to_bf16(first, second));
      store(to + h, first);
      store(to + h + W, second);
    }
  }
}

// ---- scores in tiles -----------------------------------------------------------------------

// Tile registers 0 and 1 hold the queries of up to 64 head dimensions, 2 and 3 keys, 4 and 5 scores.
inline void load_queries(const AmxItem& w, const uint16_t* query) {
  _tile_loadd(0, query, 64);
  if (w.steps() == 2) _tile_loadd(1, query + TILE_SIZE, 64);
}

#define SCORE_STEP(QUERY, AT)              \
  do {                                     \
    _tile_loadd(2, first + (AT), stride);  \
    _tile_dpbf16ps(4, QUERY, 2);           \
    _tile_loadd(3, second + (AT), stride); \
    _tile_dpbf16ps(5, QUERY, 3);           \
  } while (0)

// 16 vectors times the chunk's two tiles of 16 keys.
inline void tile_scores(const AmxItem& w, int64_t c, const uint16_t* query) {
  const Chunk& chunk = w.chunks[c];
  const Source& from = w.tile.from;
  const int64_t stride = from.block_size * 4;
  // A tile that nobody sees may have no block: its place is taken by the other.
  const int64_t low = chunk.first < TILE ? 0 : TILE, high = chunk.last > TILE ? TILE : 0;
  const char* first = reinterpret_cast<const char*>(from.keys_bf16(chunk.start + low));
  const char* second = reinterpret_cast<const char*>(from.keys_bf16(chunk.start + high));
  _tile_zero(4);
  _tile_zero(5);
  if (w.steps() <= 2) {
    SCORE_STEP(0, 0);
    if (w.steps() == 2) SCORE_STEP(1, TILE * stride);
  } else {
    for (int64_t k = 0; k < w.steps(); k++) {
      _tile_loadd(0, query + k * TILE_SIZE, 64);
      SCORE_STEP(0, k * TILE * stride);
    }
  }
  _tile_stored(4, w.s.scores + c * CHUNK_KEYS, PART_KEYS * 4);
  _tile_stored(5, w.s.scores + c * CHUNK_KEYS + TILE, PART_KEYS * 4);
}

#undef SCORE_STEP

// ---- scores in vectors ---------------------------------------------------------------------

// R query vectors times 32 keys, whose pairs of dimensions lie `stride` numbers apart.
template <int R>
inline void vector_scores(const float* query, int64_t query_stride, int64_t head_dim,
                          const uint16_t* const* keys, int64_t stride, const Ahead& ahead,
                          int64_t ahead_size, float* scores) {
  F total[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = zero();
  for (int64_t step = 0; step < head_dim; step += 32) {
    F even[R][2], odd[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = zero();
    for (int64_t h = step; h < step + 32; h += 2) {
      F even_key[2], odd_key[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        load_pairs(keys[k] + h / 2 * stride, even_key[k], odd_key[k]);
        ahead.touch(k, h, ahead_size);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const F even_query = set1(query[r * query_stride + h]);
        const F odd_query = set1(query[r * query_stride + h + 1]);
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          even[r][k] = fma(even_query, even_key[k], even[r][k]);
          odd[r][k] = fma(odd_query, odd_key[k], odd[r][k]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int k = 0; k < 2; k++) total[r][k] = add(total[r][k], add(even[r][k], odd[r][k]));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    store(scores + r * PART_KEYS, total[r][0]);
    store(scores + r * PART_KEYS + W, total[r][1]);
  }
}

// Where the chunk's two runs of 16 keys lie as this row sees them; their stride is returned.
inline int64_t row_keys(const AmxItem& w, int64_t c, int64_t row, int64_t first, int64_t last,
                        const uint16_t** keys) {
  const Source& from = w.tile.from;
  const int64_t start = w.chunks[c].start, stride = from.block_size * 2;
  if (w.scores[c] == Reading::TOGETHER) {
    keys[0] = from.keys_bf16(start + (first < TILE ? 0 : TILE));
    keys[1] = from.keys_bf16(start + (last > TILE ? TILE : 0));
    return stride;
  }
  for (int64_t key = first; key < last; key++) {
    const uint16_t* pairs = from.keys_bf16(w.slot_of(row, start + key));
    uint16_t* to = w.t.own_keys + key / TILE * w.steps() * TILE_SIZE + key % TILE * 2;
    for (int64_t h = 0; h < w.head_dim / 2; h++) memcpy(to + h * 32, pairs + h * stride, 4);
  }
  keys[0] = w.t.own_keys;
  keys[1] = w.t.own_keys + w.steps() * TILE_SIZE;
  return 32;
}

// What row q of the item's vectors reads next: the chunk's values, and the keys after them.
inline Ahead ahead_of(const AmxItem& w, int64_t c, const uint16_t* const* keys) {
  Ahead ahead;
  for (int64_t k = 0; k < 2; k++) {
    const int64_t at = w.chunks[c].start + k * TILE, next = at + CHUNK_KEYS;
    const bool here = w.scores[c] == Reading::TOGETHER && at < w.tile.straight_end;
    ahead.values[k] = here ? w.tile.from.values_bf16(at) : keys[k];
    ahead.keys[k] = next < w.tile.straight_end ? w.tile.from.keys_bf16(next) : ahead.values[k];
  }
  return ahead;
}

// A row's vectors q .. q_end-1 inside the 16 from q0 on, and the keys first .. last-1 that it sees of
// the chunk.
struct RowOfTile {
  int64_t row, q, q_end, first, last;
};

// The next row from vector q on that sees something of the chunk; false where there is none.
inline bool next_row(const AmxItem& w, int64_t c, int64_t q0, int64_t q, RowOfTile& found) {
  const int64_t end = q0 + TILE < w.num_vectors ? q0 + TILE : w.num_vectors;
  while (q < end) {
    const int64_t behind = q / w.tile.fold * w.tile.fold + w.tile.fold;
    found.row = w.row_of(q);
    found.q = q;
    q = found.q_end = behind < end ? behind : end;
    seen_keys(w.s, found.q, w.chunks[c], found.first, found.last);
    if (found.first < found.last) return true;
  }
  return false;
}

inline void row_scores(const AmxItem& w, int64_t c, int64_t q0) {
  RowOfTile of;
  for (int64_t at = q0; next_row(w, c, q0, at, of); at = of.q_end) {
    const uint16_t* keys[2];
    const int64_t stride = row_keys(w, c, of.row, of.first, of.last, keys);
    const Ahead ahead = ahead_of(w, c, keys);
    const int64_t ahead_size = w.tile.from.block_size;
    for (int64_t q = of.q; q < of.q_end;) {
      const float* query = w.s.query + q * w.s.stride;
      float* scores = w.s.scores + (q - q0) * PART_KEYS + c * CHUNK_KEYS;
      const int64_t left = of.q_end - q, count = left < MOST_ROW_VECTORS ? left : MOST_ROW_VECTORS;
      switch (count) {
#define SOME_VECTORS(R)                                                                         \
  case R:                                                                                       \
    vector_scores<R>(query, w.s.stride, w.head_dim, keys, stride, ahead, ahead_size, scores);   \
    break;
        SOME_VECTORS(1)
        SOME_VECTORS(2)
        SOME_VECTORS(3)
        SOME_VECTORS(4)
#undef SOME_VECTORS
      }
      q += count;
    }
  }
}

inline void part_scores(const AmxItem& w, int64_t q0) {
  const uint16_t* query = w.t.query + q0 / TILE * w.steps() * TILE_SIZE;
  if (w.tiled) load_queries(w, query);
  for (int64_t c = 0; c < CHUNKS; c++) {
    if (w.scores[c] == Reading::NOBODY) continue;
    if (w.tiled && w.scores[c] == Reading::TOGETHER) tile_scores(w, c, query);
    else row_scores(w, c, q0);
  }
}

// ---- softmax -------------------------------------------------------------------------------

inline __mmask16 lanes(int64_t first, int64_t last) {  // of 16: first .. last-1
  const uint32_t below = last <= 0 ? 0u : last >= W ? 0xffffu : (1u << last) - 1u;
  const uint32_t skipped = first <= 0 ? 0u : first >= W ? 0xffffu : (1u << first) - 1u;
  return __mmask16(below & ~skipped);
}

// 2^x to 4e-6 for x <= 0: far better than the bf16 that is made of it.
inline F power(F x) {
  constexpr float TERMS[5] = {0.99999926f, 0.69312181f, 0.24024745f, 0.05591786f, 0.0095701f};
  x = max(set1(-150.0f), x);  // a NaN stays one
  const F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
  const F rest = sub(x, whole);
  F p = set1(TERMS[4]);
  for (int i = 3; i >= 0; i--) p = fma(p, rest, set1(TERMS[i]));
  return _mm512_scalef_ps(p, whole);
}

// Scores of vector q (row r of its tile) become weights e^(score - largest), 0 where it sees nothing:
// as a row of the weight tiles, and as floats.
inline void soften_row(const AmxItem& w, int64_t q, int64_t r) {
  const Scratch& s = w.s;
  const int64_t first = s.first[q], last = s.last[q];
  float* scores = s.scores + r * PART_KEYS;
  uint16_t* weights = w.t.weights + r * 32;
  F largest = set1(MINUS_INFINITY);
  for (int64_t at = first / W * W; at < last; at += W)
    largest = max(largest, _mm512_mask_mov_ps(set1(MINUS_INFINITY), lanes(first - at, last - at),
                                              load(scores + at)));
  s.most[q] = first < last ? _mm512_reduce_max_ps(largest) : MINUS_INFINITY;
  const F log2_e = set1(1.44269504f), shift = set1(s.most[q] * 1.44269504f);
  F weight = zero();
  for (int64_t c = 0; c < CHUNKS; c++, weights += TILE_SIZE) {
    if (w.sums[c] == Reading::NOBODY) continue;
    const int64_t at = c * CHUNK_KEYS;
    if (first >= last || first >= at + CHUNK_KEYS || last <= at) {
      _mm512_store_si512(weights, _mm512_setzero_si512());
      continue;
    }
    F p[2];
    for (int i = 0; i < 2; i++)
      p[i] = _mm512_maskz_mov_ps(
          lanes(first - at - i * W, last - at - i * W),
          power(_mm512_fmsub_ps(load(scores + at + i * W), log2_e, shift)));
    _mm512_store_si512(weights, round_to_bf16(p[0], p[1]));
    store(scores + at, p[0]);
    store(scores + at + W, p[1]);
    weight = add(add(weight, p[0]), p[1]);
  }
  s.weight[q] = _mm512_reduce_add_ps(weight);
}

// The values of the chunk's keys first .. last-1 as this row sees them, zeros for others of their pairs.
inline void row_values(const AmxItem& w, int64_t c, int64_t row, int64_t first, int64_t last,
                       const uint16_t** rows) {
  const Source& from = w.tile.from;
  const int64_t start = w.chunks[c].start;
  rows[first / 2 * 2] = rows[(last + 1) / 2 * 2 - 1] = w.t.nothing;
  if (w.scores[c] == Reading::ROW_BY_ROW) {
    for (int64_t key = first; key < last; key++)
      rows[key] = from.values_bf16(w.slot_of(row, start + key));
    return;
  }
  for (int64_t key = first; key < last;) {  // at most two blocks
    const uint16_t* value = from.values_bf16(start + key);
    const int64_t tile_end = key / TILE * TILE + TILE, end = last < tile_end ? last : tile_end;
    for (; key < end; key++, value += w.head_dim) rows[key] = value;
  }
}

// ---- sums in tiles ---------------------------------------------------------------------------

// Rows [H] of 32 keys -> tiles [H / 16][16 pairs of keys, 16 h, 2].
inline void pair_values(const uint16_t* const* rows, int64_t head_dim, uint16_t* to) {
  for (int64_t h = 0; h < head_dim; h += 32, to += 2 * TILE_SIZE) {
    for (int64_t pair = 0; pair < TILE; pair++) {
      const __m512i even = _mm512_loadu_si512(rows[2 * pair] + h);
      const __m512i odd = _mm512_loadu_si512(rows[2 * pair + 1] + h);
      _mm512_store_si512(to + pair * 32, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(to + TILE_SIZE + pair * 32, _mm512_unpackhi_epi16(even, odd));
    }
  }
}

inline bool all_numbers(const uint16_t* values, int64_t head_dim) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (int64_t h = 0; h < head_dim; h += 32) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(values + h), exponent);
    if (_mm512_cmpeq_epi16_mask(bits, exponent)) return false;
  }
  return true;
}

// Values of a chunk whose slots are the same for all, in pairs; how its sums are to be taken.
inline Reading load_values(const AmxItem& w, int64_t c) {
  const Chunk& chunk = w.chunks[c];
  int64_t all_first = 0, all_last = CHUNK_KEYS;  // seen by every row
  for (int64_t q = 0; q < w.num_vectors && !chunk.whole; q += w.tile.fold) {
    int64_t first, last;
    seen_keys(w.s, q, chunk, first, last);
    if (first > all_first) all_first = first;
    if (last < all_last) all_last = last;
  }
  const uint16_t* rows[CHUNK_KEYS];
  for (const uint16_t*& row : rows) row = w.t.nothing;
  row_values(w, c, w.tile.item.row_begin, chunk.first, chunk.last, rows);
  for (int64_t key = chunk.first; key < chunk.last; key++) {
    const bool for_all = key >= all_first && key < all_last;
    if (!for_all && !all_numbers(rows[key], w.head_dim)) return Reading::ROW_BY_ROW;
  }
  pair_values(rows, w.head_dim, w.t.values + c * w.head_dim / TILE * TILE_SIZE);
  return Reading::TOGETHER;
}

// sums [16, H] += weights of `count` chunks from c on times their values; registers 0-3 sums, 4
// weights, 5 and 6 values.
inline void tile_sums(const AmxItem& w, int64_t c, int64_t count, float* sums) {
  const int64_t stride = w.s.stride * 4, chunk_size = w.head_dim / TILE * TILE_SIZE;
  for (int64_t h = 0; h < w.head_dim; h += 4 * TILE, sums += 4 * TILE) {
    const bool four = h + 4 * TILE <= w.head_dim;
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + TILE, stride);
    if (four) _tile_loadd(2, sums + 2 * TILE, stride);
    if (four) _tile_loadd(3, sums + 3 * TILE, stride);
    const uint16_t* value = w.t.values + c * chunk_size + h / TILE * TILE_SIZE;
    for (int64_t i = c; i < c + count; i++, value += chunk_size) {
      if (w.sums[i] == Reading::NOBODY) continue;
      _tile_loadd(4, w.t.weights + i * TILE_SIZE, 64);
      _tile_loadd(5, value, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, value + TILE_SIZE, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (!four) continue;
      _tile_loadd(5, value + 2 * TILE_SIZE, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, value + 3 * TILE_SIZE, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
    if (four) _tile_stored(2, sums + 2 * TILE, stride);
    if (four) _tile_stored(3, sums + 3 * TILE, stride);
  }
}

// ---- sums in vectors -------------------------------------------------------------------------

// sums of R vectors += p V over the pairs of keys that the row sees; NV * 16 dimensions.
template <int R, int NV>
inline void vector_sums(const float* p, const uint16_t* const* rows, int64_t h, int64_t first,
                        int64_t last, float* sums, int64_t stride) {
  F total[2][R][NV];  // over even keys, over odd ones
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) total[0][r][v] = total[1][r][v] = zero();
  for (int64_t pair = first / 2; pair < (last + 1) / 2; pair++) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      F value[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v += 2) {
        const __m512i both = _mm512_loadu_si512(rows[2 * pair + i] + h + v * W);
        const __m512i none = _mm512_setzero_si512();
        value[v] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(none, both));
        value[v + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(none, both));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const F weight = set1(p[r * PART_KEYS + 2 * pair + i]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) total[i][r][v] = fma(weight, value[v], total[i][r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
      float* to = sums + r * stride + h + v * W;
      store(to, add(load(to), add(total[0][r][v], total[1][r][v])));
    }
}

template <int R>
inline void vector_sums_of(const AmxItem& w, const float* p, const uint16_t* const* rows,
                           int64_t first, int64_t last, float* sums) {
  int64_t h = 0;
  if (R <= 3)
    for (; h + 4 * W <= w.head_dim; h += 4 * W)
      vector_sums<R, R <= 3 ? 4 : 2>(p, rows, h, first, last, sums, w.s.stride);
  for (; h < w.head_dim; h += 2 * W)
    vector_sums<R, 2>(p, rows, h, first, last, sums, w.s.stride);
}

inline void row_sums(const AmxItem& w, int64_t c, int64_t q0) {
  RowOfTile of;
  for (int64_t at = q0; next_row(w, c, q0, at, of); at = of.q_end) {
    const uint16_t* rows[CHUNK_KEYS];
    row_values(w, c, of.row, of.first, of.last, rows);
    for (int64_t q = of.q; q < of.q_end;) {
      const float* p = w.s.scores + (q - q0) * PART_KEYS + c * CHUNK_KEYS;
      float* sums = w.s.sums + q * w.s.stride;
      const int64_t left = of.q_end - q, count = left < MOST_ROW_VECTORS ? left : MOST_ROW_VECTORS;
      switch (count) {
        case 1: vector_sums_of<1>(w, p, rows, of.first, of.last, sums); break;
        case 2: vector_sums_of<2>(w, p, rows, of.first, of.last, sums); break;
        case 3: vector_sums_of<3>(w, p, rows, of.first, of.last, sums); break;
        case 4: vector_sums_of<4>(w, p, rows, of.first, of.last, sums); break;
      }
      q += count;
    }
  }
}

inline void part_sums(const AmxItem& w, int64_t q0) {
  for (int64_t c = 0, end; c < CHUNKS; c = end) {
    end = c + 1;
    if (w.sums[c] == Reading::NOBODY) continue;
    if (!w.tiled || w.sums[c] == Reading::ROW_BY_ROW) {
      row_sums(w, c, q0);
      continue;
    }
    while (end < CHUNKS && w.sums[end] != Reading::ROW_BY_ROW) end++;
    tile_sums(w, c, end - c, w.s.sums + q0 * w.s.stride);
  }
}

// ---- an item -----------------------------------------------------------------------------------

inline void in_order(float* sums, int64_t head_dim) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t h = 0; h < head_dim; h += 32) {
    const F first = load(sums + h), second = load(sums + h + W);
    store(sums + h, _mm512_permutex2var_ps(first, low, second));
    store(sums + h + W, _mm512_permutex2var_ps(first, high, second));
  }
}

inline void set_chunks(AmxItem& w, int64_t begin) {
  for (int64_t c = 0; c < CHUNKS; c++) {
    Chunk& chunk = w.chunks[c];
    chunk = {begin + c * CHUNK_KEYS, 0, 0, w.tile.straight_end, false, false};
    const bool seen = narrow(w.tile, 0, w.num_vectors, chunk);
    const bool own = w.tile.is_tree && chunk.start + CHUNK_KEYS > w.tile.context;
    w.scores[c] = w.sums[c] =
        !seen ? Reading::NOBODY : own ? Reading::ROW_BY_ROW : Reading::TOGETHER;
  }
}

inline void attend_tiles_part(AmxItem& w, int64_t part) {
  set_seen(w.tile, part * PART_KEYS);
  set_chunks(w, part * PART_KEYS);
  const int64_t padded = (w.num_vectors + TILE - 1) / TILE * TILE;
  memset(w.s.sums, 0, size_t((w.tiled ? padded : w.num_vectors) * w.s.stride) * 4);
  for (int64_t q0 = 0; q0 < w.num_vectors; q0 += TILE) {
    part_scores(w, q0);
    for (int64_t q = q0; q < q0 + TILE && q < w.num_vectors; q++) soften_row(w, q, q - q0);
    for (int64_t c = 0; c < CHUNKS && w.tiled && q0 == 0; c++)
      if (w.sums[c] == Reading::TOGETHER) w.sums[c] = load_values(w, c);
    part_sums(w, q0);
  }
}

inline void attend_tiles(const AttentionCall& call, const AttentionItem& item, void* memory) {
  const int64_t head_dim = call.heads.head_dim;
  // The cache's keys are tiles only if a block holds whole ones: one answer for all of a model.
  if (!call.kv.is_bf16 || head_dim % 32 != 0 || call.segments->block_size % TILE != 0)
    return attend(call, item, memory);
  const Scratch s = cut_scratch(memory, head_dim);
  const Tiles tiles = cut_tiles(memory, head_dim);
  const Tile tile = make_tile(call, item, s);
  const int64_t num_vectors = (item.row_end - item.row_begin) * tile.fold;
  AmxItem w = {tile, s, tiles, head_dim, num_vectors, num_vectors >= LEAST_TILED, {}, {}, {}};
  round_queries(w);
  for (int64_t q = 0; q < num_vectors; q++) {
    s.total_weight[q] = 0;
    s.total_most[q] = MINUS_INFINITY;
  }
  for (int64_t part = item.part_begin; part < item.part_end; part++) {
    attend_tiles_part(w, part);
    for (int64_t q = 0; q < num_vectors; q++) {
      if (item.record < 0) {
        add_part(s.total + q * s.stride, s.total_weight[q], s.total_most[q],
                 s.sums + q * s.stride, s.weight[q], s.most[q], s.stride);
        continue;
      }
      in_order(s.sums + q * s.stride, head_dim);
      store_record(tile, q);
    }
  }
  if (item.record >= 0) return;
  for (int64_t q = 0; q < num_vectors; q++) {
    in_order(s.total + q * s.stride, head_dim);
    write_result(call, w.row_of(q), item.head_begin + q % tile.fold, s.total + q * s.stride,
                 s.total_weight[q]);
  }
}

}  // namespace SPECSERVE_ISA
}  // namespace specserve
