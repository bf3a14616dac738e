// softmax(q K) V of one attention item. Included once per instruction set.
//
//   for each part of 128 logical positions:
//     for each chunk of 32:  scores of all query vectors, in groups of up to 6
//     softmax of the part
//     for each chunk of 32:  sums += p V, in the same groups
//     add the part to the parts before
//
// A chunk that many vectors share is widened into a tile of floats first (keys [H, 32], values
// [32, H]); for few vectors it is read where it lies. Order of additions, whatever the group: a score
// over h, even and odd apart; weights lane by lane; sums over keys in logical order. Hidden keys are
// never multiplied by zero, they are not touched: a NaN behind a row cannot reach it.
#pragma once
#include "row_kernels.h"
#include "vector.h"

namespace specserve {
namespace SPECSERVE_ISA {

#if defined(SPECSERVE_ISA_AVX512)
constexpr int KEY_VECTORS = 2;    // of one pass over h: with 6 query vectors 24 sums in registers
constexpr int VALUE_VECTORS = 4;
#else
constexpr int KEY_VECTORS = 1;
constexpr int VALUE_VECTORS = 2;
#endif
constexpr int MAX_GROUP = 6;
constexpr int64_t MOST_DIRECT = 2 * MAX_GROUP;  // query vectors for which no tile is made

// One thread's scratch, cut from one allocation. V = MAX_TILE_VECTORS, Hp = padded head size.
struct Scratch {
  float* keys;          // [H, 32]
  float* values;        // [32, Hp]
  float* query;         // [V, Hp], scaled
  float* scores;        // [V, 128] of the part at hand
  float* sums;          // [V, Hp]
  float* weight;        // [V]
  float* most;          // [V] largest score
  float* total;         // [V, Hp] of the parts before
  float* total_weight;  // [V]
  float* total_most;    // [V]
  int64_t* first;       // [V] the positions inside the part that a vector sees: first .. last-1
  int64_t* last;
  int64_t stride;       // Hp
};

inline int64_t padded_head(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

inline Scratch cut_scratch(void* memory, int64_t head_dim) {
  constexpr int64_t V = MAX_TILE_VECTORS;
  Scratch s;
  float* at = static_cast<float*>(memory);
  auto take = [&at](int64_t count) {
    float* taken = at;
    at += (count + 15) / 16 * 16;
    return taken;
  };
  s.stride = padded_head(head_dim);
  s.keys = take(head_dim * CHUNK_KEYS);
  s.values = take(CHUNK_KEYS * s.stride);
  s.query = take(V * s.stride);
  s.sums = take(V * s.stride);
  s.total = take(V * s.stride);
  s.scores = take(V * PART_KEYS);
  s.weight = take(V);
  s.most = take(V);
  s.total_weight = take(V);
  s.total_most = take(V);
  s.first = reinterpret_cast<int64_t*>(take(2 * V));
  s.last = reinterpret_cast<int64_t*>(take(2 * V));
  return s;
}

// ---- loading a chunk -----------------------------------------------------------------------

struct Source {
  const KvLayer* kv;
  const int32_t* blocks;
  int64_t block_size, head_dim, num_kv_heads, kv_head;
  int64_t base(int64_t slot_index) const {
    const int64_t block = blocks[slot_index / block_size];
    return (block * num_kv_heads + kv_head) * block_size * head_dim;
  }
  const uint16_t* keys_bf16(int64_t slot_index) const {
    return static_cast<const uint16_t*>(kv->keys) + base(slot_index) + slot_index % block_size * 2;
  }
  const uint16_t* values_bf16(int64_t slot_index) const {
    return static_cast<const uint16_t*>(kv->values) + base(slot_index) +
           slot_index % block_size * head_dim;
  }
};

// CHUNK_KEYS logical positions from `start`.
struct Chunk {
  int64_t start;
  int64_t first, last;   // positions inside the chunk that anybody sees
  int64_t straight_end;  // below it a position is its own slot index, and seen by this item
  bool direct;           // read in place, not from the tile
  bool whole;            // everybody sees all of it
};

// What to bring into the cache while a chunk's scores are taken: its values, the next one's keys.
struct Ahead {
  const uint16_t* keys[KEY_VECTORS];
  const uint16_t* values[KEY_VECTORS];
  void touch(int k, int64_t h, int64_t block_size) const {
    __builtin_prefetch(keys[k] + h * block_size);
    __builtin_prefetch(values[k] + h * W);
  }
};

inline void load_one_key(const Source& from, int64_t slot_index, int64_t at, const Scratch& s) {
  const int64_t base = from.base(slot_index), offset = slot_index % from.block_size;
  if (from.kv->is_bf16) {
    const uint16_t* keys = static_cast<const uint16_t*>(from.kv->keys) + base + 2 * offset;
    for (int64_t h = 0; h < from.head_dim; h += 2) {
      s.keys[h * CHUNK_KEYS + at] = bf16_to_float(keys[h * from.block_size]);
      s.keys[(h + 1) * CHUNK_KEYS + at] = bf16_to_float(keys[h * from.block_size + 1]);
    }
  } else {
    const float* keys = static_cast<const float*>(from.kv->keys) + base + offset;
    for (int64_t h = 0; h < from.head_dim; h++)
      s.keys[h * CHUNK_KEYS + at] = keys[h * from.block_size];
  }
}

// W keys of one block at once; those that nobody sees are loaded too and never used.
inline void load_keys(const Source& from, int64_t slot_index, int64_t at, const Scratch& s) {
  const int64_t base = from.base(slot_index), offset = slot_index % from.block_size;
  float* to = s.keys + at;
  if (from.kv->is_bf16) {
    const uint16_t* keys = static_cast<const uint16_t*>(from.kv->keys) + base + 2 * offset;
    for (int64_t h = 0; h < from.head_dim; h += 2) {
      F even, odd;
      load_pairs(keys + h * from.block_size, even, odd);
      store(to + h * CHUNK_KEYS, even);
      store(to + (h + 1) * CHUNK_KEYS, odd);
    }
  } else {
    const float* keys = static_cast<const float*>(from.kv->keys) + base + offset;
    for (int64_t h = 0; h < from.head_dim; h++)
      store(to + h * CHUNK_KEYS, load(keys + h * from.block_size));
  }
}

inline void load_value(const Source& from, int64_t slot_index, int64_t at, const Scratch& s) {
  const int64_t head_dim = from.head_dim;
  const int64_t start = from.base(slot_index) + slot_index % from.block_size * head_dim;
  float* to = s.values + at * s.stride;
  int64_t h = 0;
  if (from.kv->is_bf16) {
    const uint16_t* value = static_cast<const uint16_t*>(from.kv->values) + start;
    for (; h + W <= head_dim; h += W) store(to + h, load_bf16(value + h));
    for (; h < head_dim; h++) to[h] = bf16_to_float(value[h]);
  } else {
    const float* value = static_cast<const float*>(from.kv->values) + start;
    for (; h + W <= head_dim; h += W) store(to + h, load(value + h));
    for (; h < head_dim; h++) to[h] = value[h];
  }
}

// The chunk's keys (or values) into the tile. A position from `num_straight` on has the slot index
// that `path` says.
inline void load_tile(const Source& from, const Chunk& chunk, int64_t num_straight,
                      const int32_t* path, bool values, const Scratch& s) {
  const int64_t first = chunk.start + chunk.first, end = chunk.start + chunk.last;
  const int64_t straight_end = end < num_straight ? end : num_straight;
  int64_t position = first;
  if (values) {
    for (; position < straight_end; position++)
      load_value(from, position, position - chunk.start, s);
  } else if (from.block_size % W == 0) {
    for (position = position / W * W; position < straight_end; position += W)
      load_keys(from, position, position - chunk.start, s);
  } else {
    for (; position < straight_end; position++)
      load_one_key(from, position, position - chunk.start, s);
  }
  for (position = first > num_straight ? first : num_straight; position < end; position++) {
    const int64_t slot_index = num_straight + path[position - num_straight];
    if (values) load_value(from, slot_index, position - chunk.start, s);
    else load_one_key(from, slot_index, position - chunk.start, s);
  }
}

// ---- scores --------------------------------------------------------------------------------

// W keys of neighbouring positions: f32, CHUNK_KEYS apart per head dimension, or (PAIRS) bf16 pairs
// as the cache has them, 2 * block_size apart per two dimensions.
template <int R, int NK, bool PAIRS>
inline void score_vectors(const Scratch& s, int64_t q, const Source& from, const void* const* keys,
                          const Ahead& ahead, int64_t at) {
  F even[R][NK], odd[R][NK];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int k = 0; k < NK; k++) even[r][k] = odd[r][k] = zero();
  const float* query = s.query + q * s.stride;
  for (int64_t h = 0; h < from.head_dim; h += 2) {
    F even_key[NK], odd_key[NK];
#pragma GCC unroll 8
    for (int k = 0; k < NK; k++) {
      if (PAIRS) {
        load_pairs(static_cast<const uint16_t*>(keys[k]) + h * from.block_size, even_key[k],
                   odd_key[k]);
        ahead.touch(k, h, from.block_size);
      } else {
        even_key[k] = load(static_cast<const float*>(keys[k]) + h * CHUNK_KEYS);
        odd_key[k] = load(static_cast<const float*>(keys[k]) + (h + 1) * CHUNK_KEYS);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F even_query = set1(query[r * s.stride + h]);
      const F odd_query = set1(query[r * s.stride + h + 1]);
#pragma GCC unroll 8
      for (int k = 0; k < NK; k++) {
        even[r][k] = fma(even_query, even_key[k], even[r][k]);
        odd[r][k] = fma(odd_query, odd_key[k], odd[r][k]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int k = 0; k < NK; k++)
      store(s.scores + (q + r) * PART_KEYS + at + k * W, add(even[r][k], odd[r][k]));
}

// Scores of vectors q .. q+R-1 with the chunk's keys first..last-1 (and others, never used).
template <int R>
void chunk_scores(const Scratch& s, int64_t q, const Source& from, const Chunk& chunk) {
  const int64_t end = chunk.last;
  for (int64_t at = chunk.first / W * W; at < end;) {
    const void* keys[KEY_VECTORS];
    Ahead ahead;
    const int count = at + KEY_VECTORS * W <= CHUNK_KEYS && at + (KEY_VECTORS - 1) * W < end
                          ? KEY_VECTORS
                          : 1;
    for (int k = 0; k < count; k++) {
      if (!chunk.direct) {
        keys[k] = s.keys + at + k * W;
        continue;
      }
      const int64_t position = chunk.start + at + k * W;
      keys[k] = from.keys_bf16(position);
      ahead.values[k] = from.values_bf16(position);
      const int64_t next = position + CHUNK_KEYS;
      ahead.keys[k] = next < chunk.straight_end ? from.keys_bf16(next) : ahead.values[k];
    }
    const int64_t to = chunk.start % PART_KEYS + at;
    if (chunk.direct) {
      if (count == 1) score_vectors<R, 1, true>(s, q, from, keys, ahead, to);
      else score_vectors<R, KEY_VECTORS, true>(s, q, from, keys, ahead, to);
    } else {
      if (count == 1) score_vectors<R, 1, false>(s, q, from, keys, ahead, to);
      else score_vectors<R, KEY_VECTORS, false>(s, q, from, keys, ahead, to);
    }
    at += count * W;
  }
}

// A vector's scores of a part become e^(score - largest); keys that it does not see are left.
inline void soften(const Scratch& s, int64_t q) {
  const int64_t first = s.first[q], last = s.last[q];
  if (first >= last) {
    s.most[q] = MINUS_INFINITY;
    s.weight[q] = 0;
    return;
  }
  float* scores = s.scores + q * PART_KEYS;
  const int64_t begin = first / W * W;
  F largest = set1(MINUS_INFINITY);
  for (int64_t at = begin; at < last; at += W)
    largest = max(largest, keep_lanes(load(scores + at), first - at, last - at, MINUS_INFINITY));
  s.most[q] = reduce_max(largest);
  const F shift = set1(s.most[q]);
  F weight = zero();
  for (int64_t at = begin; at < last; at += W) {
    F p = keep_lanes(exp(sub(load(scores + at), shift)), first - at, last - at, 0.0f);
    store(scores + at, p);
    weight = add(weight, p);
  }
  s.weight[q] = reduce_add(weight);
}

// ---- sums ------------------------------------------------------------------------------------

// sums += p V over the chunk's keys first..last-1, in order.
template <int R, int NV, bool DIRECT>
inline void add_values_block(const Scratch& s, int64_t q, const Source& from, const Chunk& chunk,
                             int64_t h, int64_t first, int64_t last) {
  F sums[R][NV];
  float* to = s.sums + q * s.stride + h;
  const float* p = s.scores + q * PART_KEYS + chunk.start % PART_KEYS;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[r][v] = load(to + r * s.stride + v * W);
  for (int64_t key = first; key < last;) {
    int64_t run_end = last;
    const void* values = s.values + key * s.stride + h;
    if (DIRECT) {
      const int64_t position = chunk.start + key;
      const int64_t block_end = key + from.block_size - position % from.block_size;
      if (block_end < run_end) run_end = block_end;
      values = from.values_bf16(position) + h;
    }
    for (; key < run_end; key++) {
      F value[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++)
        value[v] = DIRECT ? load_bf16(static_cast<const uint16_t*>(values) + v * W)
                          : load(static_cast<const float*>(values) + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const F weight = set1(p[r * PART_KEYS + key]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      }
      values = DIRECT
                   ? static_cast<const void*>(static_cast<const uint16_t*>(values) + from.head_dim)
                   : static_cast<const void*>(static_cast<const float*>(values) + s.stride);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) store(to + r * s.stride + v * W, sums[r][v]);
}

template <int R, bool DIRECT>
inline void add_values(const Scratch& s, int64_t q, const Source& from, const Chunk& chunk,
                       int64_t first, int64_t last) {
  int64_t h = 0;
  for (; h + VALUE_VECTORS * W <= s.stride; h += VALUE_VECTORS * W)
    add_values_block<R, VALUE_VECTORS, DIRECT>(s, q, from, chunk, h, first, last);
  for (; h < s.stride; h += W)
    add_values_block<R, 1, DIRECT>(s, q, from, chunk, h, first, last);
}

// What vector q sees of the chunk.
inline void seen_keys(const Scratch& s, int64_t q, const Chunk& chunk, int64_t& first,
                      int64_t& last) {
  const int64_t base = chunk.start % PART_KEYS;
  first = s.first[q] > base ? s.first[q] - base : 0;
  last = s.last[q] < base + CHUNK_KEYS ? s.last[q] - base : CHUNK_KEYS;
}

// Keys that all R vectors see are added together, the others vector by vector: in order for each.
template <int R, bool DIRECT>
inline void chunk_sums(const Scratch& s, int64_t q, const Source& from, const Chunk& chunk) {
  if (chunk.whole) return add_values<R, DIRECT>(s, q, from, chunk, 0, CHUNK_KEYS);
  int64_t first = 0, last = CHUNK_KEYS, own_first, own_last;
  for (int r = 0; r < R; r++) {
    seen_keys(s, q + r, chunk, own_first, own_last);
    if (own_first > first) first = own_first;
    if (own_last < last) last = own_last;
  }
  if (first >= last) first = last = CHUNK_KEYS;  // none that all see
  for (int r = 0; r < R; r++) {
    seen_keys(s, q + r, chunk, own_first, own_last);
    if (own_last > first) own_last = first;
    if (own_first < own_last)
      add_values<1, DIRECT>(s, q + r, from, chunk, own_first, own_last);
  }
  if (first < last) add_values<R, DIRECT>(s, q, from, chunk, first, last);
  for (int r = 0; r < R; r++) {
    seen_keys(s, q + r, chunk, own_first, own_last);
    if (own_last > last) add_values<1, DIRECT>(s, q + r, from, chunk, last, own_last);
  }
}

template <int R>
void chunk_group(const Scratch& s, int64_t q, const Source& from, const Chunk& chunk, bool sums) {
  if (!sums) chunk_scores<R>(s, q, from, chunk);
  else if (chunk.direct) chunk_sums<R, true>(s, q, from, chunk);
  else chunk_sums<R, false>(s, q, from, chunk);
}

// Scores, or sums, of vectors q .. end-1, all of which see something of the chunk.
inline void chunk_run(const Scratch& s, int64_t q, int64_t end, const Source& from,
                      const Chunk& chunk, bool sums) {
  for (int64_t left = end - q; left > 0; left = end - q) {
    // Groups of even size: 7 are 4 and 3, not 6 and a lone one that waits for its own sums.
    const int64_t groups = (left + MAX_GROUP - 1) / MAX_GROUP;
    const int64_t size = (left + groups - 1) / groups;
    switch (size) {
      case 1: chunk_group<1>(s, q, from, chunk, sums); break;
      case 2: chunk_group<2>(s, q, from, chunk, sums); break;
      case 3: chunk_group<3>(s, q, from, chunk, sums); break;
      case 4: chunk_group<4>(s, q, from, chunk, sums); break;
      case 5: chunk_group<5>(s, q, from, chunk, sums); break;
      default: chunk_group<6>(s, q, from, chunk, sums); break;
    }
    q += size;
  }
}

// ---- adding up parts -------------------------------------------------------------------------

// total += part, in order of parts; both are scaled to the larger maximum.
inline void add_part(float* total, float& total_weight, float& total_most, const float* part,
                     float part_weight, float part_most, int64_t stride) {
  if (part_most == MINUS_INFINITY) return;  // saw no key
  if (total_most == MINUS_INFINITY) {
    memcpy(total, part, size_t(stride) * 4);
    total_weight = part_weight;
    total_most = part_most;
    return;
  }
  const bool grows = part_most > total_most;  // then the total shrinks, else the part: e^0 is 1
  const float factor = exp(grows ? total_most - part_most : part_most - total_most);
  const float keep = grows ? factor : 1.0f, gain = grows ? 1.0f : factor;
  total_weight = total_weight * keep + part_weight * gain;
  if (grows) total_most = part_most;
  const F keeps = set1(keep), gains = set1(gain);
  for (int64_t h = 0; h < stride; h += W)
    store(total + h, add(mul(load(total + h), keeps), mul(load(part + h), gains)));
}

inline void write_result(const AttentionCall& call, int64_t row, int64_t head, const float* total,
                         float weight) {
  const int64_t head_dim = call.heads.head_dim;
  float* out = call.out + row * call.out_stride + head * head_dim;
  const float factor = 1.0f / weight;
  for (int64_t h = 0; h < head_dim; h++) out[h] = total[h] * factor;
}

inline void merge(const AttentionCall& call, const AttentionMerge& merge, int64_t row,
                  int64_t head, void* memory) {
  const Scratch s = cut_scratch(memory, call.heads.head_dim);
  const int64_t num_parts = merge.part_end - merge.part_begin;
  const int64_t head_dim = call.heads.head_dim, size = record_floats(head_dim);
  const int64_t first = ((row - merge.row_begin) * call.heads.num_heads + head) * num_parts;
  float weight = 0, most = MINUS_INFINITY;
  for (int64_t part = 0; part < num_parts; part++) {
    const float* record = call.records + (merge.first_record + first + part) * size;
    memcpy(s.sums, record, size_t(head_dim) * 4);
    add_part(s.total, weight, most, s.sums, record[head_dim + 1], record[head_dim], s.stride);
  }
  write_result(call, row, head, s.total, weight);
}

// ---- an item -----------------------------------------------------------------------------------

struct Tile {
  const AttentionCall& call;
  const AttentionItem& item;
  const Scratch& s;
  Source from;
  int64_t fold;      // query heads of the item
  int64_t context;   // positions whose slot index is the same for every row
  bool is_tree;
  bool direct;           // few vectors: chunks are read in place
  int64_t straight_end;  // what any row of the item sees, without a tree's own part

  int64_t position(int64_t row) const { return call.paths->position[size_t(row)]; }
  int64_t first_seen(int64_t row) const {
    const int64_t window = call.plan->window, at = position(row);
    return window && at >= window ? at - window + 1 : 0;
  }
};

// Sets what every row's vectors see of the part.
inline void set_seen(const Tile& tile, int64_t part_start) {
  for (int64_t row = tile.item.row_begin; row < tile.item.row_end; row++) {
    int64_t first = tile.first_seen(row) - part_start;
    int64_t last = tile.position(row) + 1 - part_start;
    if (first < 0) first = 0;
    if (last > PART_KEYS) last = PART_KEYS;
    const int64_t q = (row - tile.item.row_begin) * tile.fold;
    for (int64_t f = 0; f < tile.fold; f++) {
      tile.s.first[q + f] = first;
      tile.s.last[q + f] = last;
    }
  }
}

inline bool sees(const Scratch& s, int64_t q, int64_t at) {
  return s.first[q] < at + CHUNK_KEYS && s.last[q] > at && s.first[q] < s.last[q];
}

// Sets what the rows of vectors q .. end-1 see of the chunk: false where that is nothing.
inline bool narrow(const Tile& tile, int64_t q, int64_t end, Chunk& chunk) {
  chunk.whole = true;
  chunk.first = CHUNK_KEYS;
  chunk.last = 0;
  for (; q < end; q += tile.fold) {
    int64_t first, last;
    seen_keys(tile.s, q, chunk, first, last);
    if (first != 0 || last != CHUNK_KEYS) chunk.whole = false;
    if (first >= last) continue;
    if (first < chunk.first) chunk.first = first;
    if (last > chunk.last) chunk.last = last;
  }
  return chunk.first < chunk.last;
}

// All rows through one load: a chunk whose slots are the same for every row that sees them.
inline void shared_chunk(const Tile& tile, int64_t start, int64_t num_vectors, bool sums) {
  const Scratch& s = tile.s;
  Chunk chunk = {start, 0, 0, tile.straight_end, tile.direct, false};
  if (!narrow(tile, 0, num_vectors, chunk)) return;
  if (!chunk.direct) load_tile(tile.from, chunk, start + CHUNK_KEYS, nullptr, sums, s);
  if (chunk.whole) return chunk_run(s, 0, num_vectors, tile.from, chunk, sums);
  int64_t run = -1;  // first vector of a run of rows that see the chunk
  for (int64_t q = 0; q <= num_vectors; q += tile.fold) {
    int64_t first = 0, last = 0;
    if (q < num_vectors) seen_keys(s, q, chunk, first, last);
    if (first < last && run < 0) run = q;
    if (first >= last && run >= 0) {
      chunk_run(s, run, q, tile.from, chunk, sums);
      run = -1;
    }
  }
}

// A chunk that reaches into a tree: each row has its own path.
inline void own_chunk(const Tile& tile, int64_t start, bool sums) {
  for (int64_t row = tile.item.row_begin; row < tile.item.row_end; row++) {
    const int64_t q = (row - tile.item.row_begin) * tile.fold;
    Chunk chunk = {start, 0, 0, 0, false, false};
    if (!narrow(tile, q, q + tile.fold, chunk)) continue;
    const RowPaths& paths = *tile.call.paths;
    load_tile(tile.from, chunk, tile.context,
              paths.ancestors.data() + paths.ancestor_start[size_t(row)], sums, tile.s);
    chunk_run(tile.s, q, q + tile.fold, tile.from, chunk, sums);
  }
}

inline void gather_queries(const Tile& tile) {
  const AttentionCall& call = tile.call;
  const int64_t head_dim = call.heads.head_dim;
  for (int64_t row = tile.item.row_begin; row < tile.item.row_end; row++) {
    const float* from =
        call.query + row * call.query_stride + tile.item.head_begin * head_dim;
    float* to = tile.s.query + (row - tile.item.row_begin) * tile.fold * tile.s.stride;
    for (int64_t f = 0; f < tile.fold; f++)
      for (int64_t h = 0; h < head_dim; h++)
        to[f * tile.s.stride + h] = from[f * head_dim + h] * call.scale;
  }
}

inline void store_record(const Tile& tile, int64_t q) {
  const int64_t row = q / tile.fold, head = tile.item.head_begin + q % tile.fold;
  const int64_t head_dim = tile.call.heads.head_dim, num_heads = tile.call.heads.num_heads;
  const int64_t at = tile.item.record + (row * num_heads + head) * tile.item.num_parts;
  float* record = tile.call.records + at * record_floats(head_dim);
  memcpy(record, tile.s.sums + q * tile.s.stride, size_t(head_dim) * 4);
  record[head_dim] = tile.s.most[q];
  record[head_dim + 1] = tile.s.weight[q];
}

inline void attend_part(const Tile& tile, int64_t part, int64_t num_vectors) {
  const Scratch& s = tile.s;
  const int64_t begin = part * PART_KEYS;
  set_seen(tile, begin);
  memset(s.sums, 0, size_t(num_vectors * s.stride) * 4);
  for (int pass = 0; pass < 2; pass++) {
    const bool sums = pass == 1;
    for (int64_t start = begin; start < begin + PART_KEYS; start += CHUNK_KEYS) {
      if (tile.is_tree && start + CHUNK_KEYS > tile.context) own_chunk(tile, start, sums);
      else shared_chunk(tile, start, num_vectors, sums);
    }
    if (!sums)
      for (int64_t q = 0; q < num_vectors; q++) soften(s, q);
  }
}

inline Tile make_tile(const AttentionCall& call, const AttentionItem& item, const Scratch& s) {
  const Segments& segments = *call.segments;
  const Heads& heads = call.heads;
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  Tile tile = {call,
               item,
               s,
               {&call.kv, segments.blocks + segments.block_offsets[item.segment],
                segments.block_size, heads.head_dim, heads.num_kv_heads, item.head_begin / group},
               item.num_heads,
               segments.context_lens[item.segment],
               segments.is_tree[item.segment] != 0,
               false,
               0};
  tile.direct = call.kv.is_bf16 && segments.block_size % W == 0 && heads.head_dim % 16 == 0 &&
                (item.row_end - item.row_begin) * item.num_heads <= MOST_DIRECT;
  for (int64_t row = item.row_begin; row < item.row_end; row++)
    if (tile.position(row) >= tile.straight_end) tile.straight_end = tile.position(row) + 1;
  if (tile.is_tree && tile.straight_end > tile.context) tile.straight_end = tile.context;
  return tile;
}

inline void attend(const AttentionCall& call, const AttentionItem& item, void* memory) {
  const Scratch s = cut_scratch(memory, call.heads.head_dim);
  const Tile tile = make_tile(call, item, s);
  const int64_t num_vectors = (item.row_end - item.row_begin) * tile.fold;
  if (s.stride != call.heads.head_dim)  // the padding is added up, too: let it be numbers
    memset(s.values, 0, size_t(CHUNK_KEYS * s.stride) * 4);
  gather_queries(tile);
  for (int64_t q = 0; q < num_vectors; q++) {
    s.total_weight[q] = 0;
    s.total_most[q] = MINUS_INFINITY;
  }
  for (int64_t part = item.part_begin; part < item.part_end; part++) {
    attend_part(tile, part, num_vectors);
    for (int64_t q = 0; q < num_vectors; q++) {
      if (item.record >= 0)
        store_record(tile, q);
      else
        add_part(s.total + q * s.stride, s.total_weight[q], s.total_most[q],
                 s.sums + q * s.stride, s.weight[q], s.most[q], s.stride);
    }
  }
  if (item.record >= 0) return;
  for (int64_t q = 0; q < num_vectors; q++)
    write_result(call, item.row_begin + q / tile.fold, item.head_begin + q % tile.fold,
                 s.total + q * s.stride, s.total_weight[q]);
}

}  // namespace SPECSERVE_ISA
}  // namespace specserve
