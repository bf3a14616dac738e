// softmax(q K) V of one attention item. Included once per instruction set.
//
//   for each part, for each chunk of 32 logical positions that the tile's rows see:
//     keys -> tile [H, 32] f32, values -> tile [32, H] f32       (once for all query vectors)
//     groups of up to 6 query vectors: scores -> online softmax -> sums += p V
//
// Order of additions, whatever the group: a score over h, even and odd apart; sums over keys in
// logical order; a chunk's weight lane by lane. Hidden keys are never multiplied by zero, they are
// not touched: a NaN behind a row cannot reach it.
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

// One thread's scratch, cut from one allocation. V = MAX_TILE_VECTORS, Hp = padded head size.
struct Scratch {
  float* keys;      // [H, 32]
  float* values;    // [32, Hp]
  float* query;     // [V, Hp], scaled
  float* sums;      // [V, Hp] of the part at hand
  float* weights;   // [V, W] of the part at hand, lane by lane
  float* most;      // [V] its largest score
  float* total;     // [V, Hp] of the parts before
  float* total_weight;  // [V]
  float* total_most;    // [V]
  int64_t* first;   // [V] first and last logical position inside the chunk that a vector sees
  int64_t* last;
  int64_t stride;   // Hp
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
  s.weights = take(V * W);
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

// Positions first..end-1 of the chunk at `chunk_start`; below `num_straight` a position's slot
// index is itself, beyond it is what `path` says.
inline void load_chunk(const Source& from, int64_t chunk_start, int64_t first, int64_t end,
                       int64_t num_straight, const int32_t* path, const Scratch& s) {
  const int64_t straight_end = end < num_straight ? end : num_straight;
  int64_t position = first;
  if (from.block_size % W == 0) {
    position = position / W * W;
    for (; position < straight_end; position += W)
      load_keys(from, position, position - chunk_start, s);
  } else {
    for (; position < straight_end; position++)
      load_one_key(from, position, position - chunk_start, s);
  }
  for (position = first; position < straight_end; position++)
    load_value(from, position, position - chunk_start, s);
  for (position = first > num_straight ? first : num_straight; position < end; position++) {
    const int64_t slot_index = num_straight + path[position - num_straight];
    load_one_key(from, slot_index, position - chunk_start, s);
    load_value(from, slot_index, position - chunk_start, s);
  }
}

// ---- one chunk, one group of query vectors ---------------------------------------------------

template <int R>
inline void group_scores(const Scratch& s, int64_t q, int64_t head_dim, float* scores) {
  for (int64_t at = 0; at < CHUNK_KEYS; at += KEY_VECTORS * W) {
    F even[R][KEY_VECTORS], odd[R][KEY_VECTORS];
    for (int r = 0; r < R; r++)
      for (int k = 0; k < KEY_VECTORS; k++) even[r][k] = odd[r][k] = zero();
    const float* keys = s.keys + at;
    const float* query = s.query + q * s.stride;
    for (int64_t h = 0; h < head_dim; h += 2, keys += 2 * CHUNK_KEYS) {
#pragma GCC unroll 8
      for (int k = 0; k < KEY_VECTORS; k++) {
        F key = load(keys + k * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          even[r][k] = fma(set1(query[r * s.stride + h]), key, even[r][k]);
      }
#pragma GCC unroll 8
      for (int k = 0; k < KEY_VECTORS; k++) {
        F key = load(keys + CHUNK_KEYS + k * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          odd[r][k] = fma(set1(query[r * s.stride + h + 1]), key, odd[r][k]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int k = 0; k < KEY_VECTORS; k++)
        store(scores + r * CHUNK_KEYS + at + k * W, add(even[r][k], odd[r][k]));
  }
}

// scores [32] become weights e^(score - most), 0 for keys not seen; sums and weight so far are
// scaled to the new maximum.
inline void soften(const Scratch& s, int64_t q, float* scores) {
  const int64_t first = s.first[q], last = s.last[q];
  F chunk_most = set1(MINUS_INFINITY);
  F seen[CHUNK_KEYS / W];
  for (int64_t k = 0; k < CHUNK_KEYS / W; k++) {
    seen[k] = keep_lanes(load(scores + k * W), first - k * W, last - k * W, MINUS_INFINITY);
    chunk_most = max(chunk_most, seen[k]);
  }
  const float most = reduce_max(chunk_most);
  F weight = load(s.weights + q * W);
  if (!(most <= s.most[q])) {
    const F factor = set1(exp(s.most[q] - most));
    weight = mul(weight, factor);
    float* sums = s.sums + q * s.stride;
    for (int64_t h = 0; h < s.stride; h += W) store(sums + h, mul(load(sums + h), factor));
    s.most[q] = most;
  }
  const F shift = set1(s.most[q]);
  for (int64_t k = 0; k < CHUNK_KEYS / W; k++) {
    F p = exp(sub(seen[k], shift));
    store(scores + k * W, p);
    weight = add(weight, p);
  }
  store(s.weights + q * W, weight);
}

template <int R, int NV>
inline void add_values_block(const Scratch& s, int64_t q, int64_t h, const float* p, int64_t first,
                             int64_t last) {
  F sums[R][NV];
  float* to = s.sums + q * s.stride + h;
  const float* values = s.values + h;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) sums[r][v] = load(to + r * s.stride + v * W);
  for (int64_t key = first; key < last; key++) {
    F value[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) value[v] = load(values + key * s.stride + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      F weight = set1(p[r * CHUNK_KEYS + key]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) store(to + r * s.stride + v * W, sums[r][v]);
}

template <int R>
inline void add_values(const Scratch& s, int64_t q, const float* p, int64_t first, int64_t last) {
  int64_t h = 0;
  for (; h + VALUE_VECTORS * W <= s.stride; h += VALUE_VECTORS * W)
    add_values_block<R, VALUE_VECTORS>(s, q, h, p, first, last);
  for (; h < s.stride; h += W) add_values_block<R, 1>(s, q, h, p, first, last);
}

template <int R>
void chunk_group(const Scratch& s, int64_t q, int64_t head_dim) {
  alignas(64) float scores[R * CHUNK_KEYS];
  group_scores<R>(s, q, head_dim, scores);
  int64_t first = 0, last = CHUNK_KEYS;
  for (int r = 0; r < R; r++) {
    soften(s, q + r, scores + r * CHUNK_KEYS);
    if (s.first[q + r] > first) first = s.first[q + r];
    if (s.last[q + r] < last) last = s.last[q + r];
  }
  if (first >= last) first = last = CHUNK_KEYS;  // no key seen by all: each vector on its own
  for (int r = 0; r < R; r++) {
    const int64_t own_end = s.last[q + r] < first ? s.last[q + r] : first;
    if (s.first[q + r] < own_end)
      add_values<1>(s, q + r, scores + r * CHUNK_KEYS, s.first[q + r], own_end);
  }
  if (first < last) add_values<R>(s, q, scores, first, last);
  for (int r = 0; r < R; r++)
    if (s.last[q + r] > last)
      add_values<1>(s, q + r, scores + r * CHUNK_KEYS, last, s.last[q + r]);
}

inline void chunk_run(const Scratch& s, int64_t q, int64_t end, int64_t head_dim) {
  for (int64_t left = end - q; left > 0; left = end - q) {
    // Groups of even size: 7 are 4 and 3, not 6 and a lone one that waits for its own sums.
    const int64_t groups = (left + MAX_GROUP - 1) / MAX_GROUP;
    const int64_t size = (left + groups - 1) / groups;
    switch (size) {
      case 1: chunk_group<1>(s, q, head_dim); break;
      case 2: chunk_group<2>(s, q, head_dim); break;
      case 3: chunk_group<3>(s, q, head_dim); break;
      case 4: chunk_group<4>(s, q, head_dim); break;
      case 5: chunk_group<5>(s, q, head_dim); break;
      default: chunk_group<6>(s, q, head_dim); break;
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
  const float most = part_most > total_most ? part_most : total_most;
  const float keep = exp(total_most - most), gain = exp(part_most - most);
  total_weight = total_weight * keep + part_weight * gain;
  total_most = most;
  const F keeps = set1(keep), gains = set1(gain);
  for (int64_t h = 0; h < stride; h += W)
    store(total + h, add(mul(load(total + h), keeps), mul(load(part + h), gains)));
}

inline void write_result(const AttentionCall& call, int64_t row, int64_t head, const float* total,
                         float weight) {
  const int64_t head_dim = call.heads.head_dim;
  float* out = call.out + row * call.out_stride + head * head_dim;
  for (int64_t h = 0; h < head_dim; h++) out[h] = total[h] / weight;
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

  int64_t position(int64_t row) const { return call.paths->position[size_t(row)]; }
  int64_t first_seen(int64_t row) const {
    const int64_t window = call.plan->window, at = position(row);
    return window && at >= window ? at - window + 1 : 0;
  }
};

// Sets what `row`'s vectors see of the chunk; false: nothing.
inline bool sees_chunk(const Tile& tile, int64_t row, int64_t chunk_start) {
  int64_t first = tile.first_seen(row) - chunk_start;
  int64_t last = tile.position(row) + 1 - chunk_start;
  if (first < 0) first = 0;
  if (last > CHUNK_KEYS) last = CHUNK_KEYS;
  if (first >= last) return false;
  const int64_t q = (row - tile.item.row_begin) * tile.fold;
  for (int64_t f = 0; f < tile.fold; f++) {
    tile.s.first[q + f] = first;
    tile.s.last[q + f] = last;
  }
  return true;
}

// All rows through one load: a chunk whose slots are the same for every row that sees them.
inline void shared_chunk(const Tile& tile, int64_t chunk_start) {
  const AttentionItem& item = tile.item;
  int64_t first = CHUNK_KEYS, last = 0;
  for (int64_t row = item.row_begin; row < item.row_end; row++) {
    if (!sees_chunk(tile, row, chunk_start)) continue;
    const int64_t q = (row - item.row_begin) * tile.fold;
    if (tile.s.first[q] < first) first = tile.s.first[q];
    if (tile.s.last[q] > last) last = tile.s.last[q];
  }
  if (first >= last) return;
  load_chunk(tile.from, chunk_start, chunk_start + first, chunk_start + last, chunk_start + last,
             nullptr, tile.s);
  int64_t run = -1;  // first vector of a run of rows that see the chunk
  for (int64_t row = item.row_begin; row <= item.row_end; row++) {
    const int64_t q = (row - item.row_begin) * tile.fold;
    const bool sees = row < item.row_end && sees_chunk(tile, row, chunk_start);
    if (sees && run < 0) run = q;
    if (!sees && run >= 0) {
      chunk_run(tile.s, run, q, tile.from.head_dim);
      run = -1;
    }
  }
}

// A chunk that reaches into a tree: each row has its own path.
inline void own_chunk(const Tile& tile, int64_t chunk_start) {
  const AttentionItem& item = tile.item;
  for (int64_t row = item.row_begin; row < item.row_end; row++) {
    if (!sees_chunk(tile, row, chunk_start)) continue;
    const int64_t q = (row - item.row_begin) * tile.fold;
    const int32_t* path =
        tile.call.paths->ancestors.data() + tile.call.paths->ancestor_start[size_t(row)];
    load_chunk(tile.from, chunk_start, chunk_start + tile.s.first[q],
               chunk_start + tile.s.last[q], tile.context, path, tile.s);
    chunk_run(tile.s, q, q + tile.fold, tile.from.head_dim);
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
  record[head_dim + 1] = reduce_add(load(tile.s.weights + q * W));
}

inline void attend_part(const Tile& tile, int64_t part, int64_t num_vectors, int64_t chunk_first,
                        int64_t chunk_end) {
  const Scratch& s = tile.s;
  memset(s.sums, 0, size_t(num_vectors * s.stride) * 4);
  memset(s.weights, 0, size_t(num_vectors * W) * 4);
  for (int64_t q = 0; q < num_vectors; q++) s.most[q] = MINUS_INFINITY;
  const int64_t begin = part * PART_KEYS, end = begin + PART_KEYS;
  for (int64_t chunk = begin; chunk < end; chunk += CHUNK_KEYS) {
    if (chunk + CHUNK_KEYS <= chunk_first || chunk >= chunk_end) continue;
    if (tile.is_tree && chunk + CHUNK_KEYS > tile.context)
      own_chunk(tile, chunk);
    else
      shared_chunk(tile, chunk);
  }
}

inline void attend(const AttentionCall& call, const AttentionItem& item, void* memory) {
  const Segments& segments = *call.segments;
  const Scratch s = cut_scratch(memory, call.heads.head_dim);
  const int64_t group = call.heads.num_heads / call.heads.num_kv_heads;
  const Source from = {&call.kv, segments.blocks + segments.block_offsets[item.segment],
                       segments.block_size, call.heads.head_dim, call.heads.num_kv_heads,
                       item.head_begin / group};
  const Tile tile = {call, item, s, from, item.num_heads,
                     segments.context_lens[item.segment], segments.is_tree[item.segment] != 0};
  if (s.stride != call.heads.head_dim)  // the padding is added up, too: let it be numbers
    memset(s.values, 0, size_t(CHUNK_KEYS * s.stride) * 4);
  const int64_t num_vectors = (item.row_end - item.row_begin) * tile.fold;
  gather_queries(tile);
  int64_t seen_first = INT64_MAX, seen_end = 0;
  for (int64_t row = item.row_begin; row < item.row_end; row++) {
    if (tile.first_seen(row) < seen_first) seen_first = tile.first_seen(row);
    if (tile.position(row) + 1 > seen_end) seen_end = tile.position(row) + 1;
  }
  for (int64_t q = 0; q < num_vectors; q++) {
    s.total_weight[q] = 0;
    s.total_most[q] = MINUS_INFINITY;
  }
  for (int64_t part = item.part_begin; part < item.part_end; part++) {
    attend_part(tile, part, num_vectors, seen_first, seen_end);
    for (int64_t q = 0; q < num_vectors; q++) {
      if (item.record >= 0) {
        store_record(tile, q);
      } else {
        add_part(s.total + q * s.stride, s.total_weight[q], s.total_most[q],
                 s.sums + q * s.stride, reduce_add(load(s.weights + q * W)), s.most[q], s.stride);
      }
    }
  }
  if (item.record >= 0) return;
  for (int64_t q = 0; q < num_vectors; q++)
    write_result(call, item.row_begin + q / tile.fold, item.head_begin + q % tile.fold,
                 s.total + q * s.stride, s.total_weight[q]);
}

}  // namespace SPECSERVE_ISA
}  // namespace specserve
