// Paged attention of one step: what it reads, and how its work is cut.
//
// A row's keys are taken in logical order (context, then its ancestors in the segment, then itself)
// in chunks of CHUNK_KEYS and parts of PART_KEYS logical positions, both cut at fixed multiples.
// Within a part: online softmax, chunk after chunk; parts are then added up in order by their
// maxima. Who computes a part, beside which other rows, changes no operation of a row: so its bits
// are a function of its own keys alone. One item of work is (up to MAX_TILE_VECTORS query vectors
// of one segment and one key/value head, a range of parts).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool.h"

namespace specserve {

struct RowKernels;

constexpr int64_t CHUNK_KEYS = 32;
constexpr int64_t PART_KEYS = 128;
constexpr int64_t MAX_TILE_VECTORS = 48;  // query vectors that share one load of keys and values

// B segments of T packed rows over paged KV, as specserve_kernels.interface.PagedBatch.
struct Segments {
  int64_t num_segments;
  int64_t num_rows;                // T
  int64_t block_size;              // S
  const int64_t* query_start;      // [B+1]
  const int64_t* context_lens;     // [B]
  const int64_t* block_offsets;    // [B] where segment b's block ids begin in `blocks`
  const int32_t* blocks;           // block id of slot index i: blocks[block_offsets[b] + i / S]
  const int32_t* parents;          // [T] index inside the segment of a row's parent, -1: none
  const uint8_t* is_tree;          // [B] whether parents counts for segment b
};

// KV of one layer. H is even. A pair is two neighbouring values of one key.
//   keys   f32 [P, G, H, S]   bf16 [P, G, H/2, S, 2]     values [P, G, S, H]
// Keys stand so that one load brings a head dimension (or two) of many slots; a block of one head
// is contiguous.
struct KvLayer {
  void* keys;
  void* values;
  bool is_bf16;
};

// Shapes that all layers share.
struct Heads {
  int64_t num_heads;     // N
  int64_t num_kv_heads;  // G
  int64_t head_dim;      // H
};

struct AttentionItem {
  int32_t segment;
  int32_t row_begin, row_end;    // packed rows
  int32_t head_begin, num_heads; // query heads that read one KV head
  int32_t part_begin, part_end;  // parts of PART_KEYS logical positions
  int32_t num_parts;             // of its rows in all
  int64_t record;                // -1: all parts are here, write the result; else, for an item of
                                 // one part, the record of (row_begin, head 0, that part)
};

// Rows whose parts were computed by different items. Record of (row, head, part):
// first_record + ((row - row_begin) * N + head) * num_parts + part - part_begin.
struct AttentionMerge {
  int32_t row_begin, row_end;
  int32_t part_begin, part_end;
  int64_t first_record;
};

// What a step derives once from its segments.
struct RowPaths {
  std::vector<int64_t> position;        // [T] logical position: context length + depth
  std::vector<int64_t> ancestor_start;  // [T] where the row's own path begins; trees only
  std::vector<int32_t> ancestors;       // index inside the segment at depth 0, 1 ..; itself last
  void build(const Segments& segments);
};

// The items of all layers with one sliding window (0: none).
struct AttentionPlan {
  int64_t window = 0;
  int64_t num_records = 0;
  std::vector<AttentionItem> items;  // dearest first
  std::vector<AttentionMerge> merges;
  void build(const Segments& segments, const RowPaths& paths, const Heads& heads, int64_t window,
             int64_t num_threads);
};

// Floats of one partial record: the sums, then the maximum and the weight.
inline int64_t record_floats(int64_t head_dim) { return (head_dim + 2 + 15) / 16 * 16; }

// One layer's call.
struct AttentionCall {
  const Segments* segments;
  const RowPaths* paths;
  const AttentionPlan* plan;
  Heads heads;
  KvLayer kv;
  const float* query;  // [T, N, H] rotated, rows query_stride floats apart
  int64_t query_stride;
  float* out;  // [T, N, H], rows out_stride floats apart
  int64_t out_stride;
  float* records;
  float scale;
};

// Bytes of scratch that one thread needs for any item; those of the vector kernels come first.
size_t attention_scratch_bytes(int64_t head_dim);
size_t vector_scratch_bytes(int64_t head_dim);

// This thread's part of a call, every thread of the pool doing the same; `next_item` starts at 0.
// Results are complete after the pool's next barrier.
void run_attention(const AttentionCall& call, const RowKernels& kernel, Pool& pool,
                   std::atomic<int64_t>& next_item, void* scratch, int thread);

// The attention of one layer by itself: writes keys and values [T, G, H] f32 of the rows, then
// attends with query [T, N, H] into out.
void run_one_attention(const Segments& segments, const Heads& heads, const KvLayer& kv,
                       const float* keys, const float* values, const float* query, float* out,
                       float scale, int64_t window, Pool& pool);

}  // namespace specserve
