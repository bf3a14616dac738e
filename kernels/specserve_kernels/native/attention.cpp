// Cuts a step's attention into items of work; see attention.h for the rule.
#include "attention.h"

#include <algorithm>

#include "call_parts.h"
#include "row_kernels.h"

namespace specserve {

namespace {

constexpr int64_t MAX_RECORD_BYTES = 8 << 20;  // of all partial results of one layer
constexpr int64_t ITEMS_PER_THREAD = 4;        // below that many, a dear item is cut into its parts

// Rows row_begin..row_end of one segment and what they see together.
struct RowTile {
  int64_t segment, row_begin, row_end, part_begin, part_end;
  int64_t cost;  // keys attended to, over all rows
};

std::vector<RowTile> cut_rows(const Segments& segments, const RowPaths& paths, int64_t tile_rows,
                              int64_t window) {
  std::vector<RowTile> tiles;
  for (int64_t b = 0; b < segments.num_segments; b++) {
    const int64_t end = segments.query_start[b + 1];
    for (int64_t row = segments.query_start[b]; row < end; row += tile_rows) {
      RowTile tile = {b, row, std::min(row + tile_rows, end), INT64_MAX, 0, 0};
      for (int64_t r = row; r < tile.row_end; r++) {
        const int64_t position = paths.position[size_t(r)];
        const int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
        tile.part_begin = std::min(tile.part_begin, first / PART_KEYS);
        tile.part_end = std::max(tile.part_end, position / PART_KEYS + 1);
        tile.cost += position + 1 - first;
      }
      tiles.push_back(tile);
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const RowTile& a, const RowTile& b) { return a.cost > b.cost; });
  return tiles;
}

}  // namespace

void RowPaths::build(const Segments& segments) {
  position.resize(size_t(segments.num_rows));
  ancestor_start.assign(size_t(segments.num_rows), 0);
  ancestors.clear();
  for (int64_t b = 0; b < segments.num_segments; b++) {
    const int64_t start = segments.query_start[b], context = segments.context_lens[b];
    for (int64_t row = start; row < segments.query_start[b + 1]; row++) {
      int64_t depth = row - start;
      if (segments.is_tree[b]) {
        const int64_t parent = segments.parents[row];
        depth = parent < 0 ? 0 : position[size_t(start + parent)] - context + 1;
        const size_t own = ancestors.size();
        ancestor_start[size_t(row)] = int64_t(own);
        ancestors.resize(own + size_t(depth) + 1);
        if (parent >= 0) {
          const size_t above = size_t(ancestor_start[size_t(start + parent)]);
          std::copy_n(ancestors.begin() + above, depth, ancestors.begin() + own);
        }
        ancestors[own + size_t(depth)] = int32_t(row - start);
      }
      position[size_t(row)] = context + depth;
    }
  }
}

void AttentionPlan::build(const Segments& segments, const RowPaths& paths, const Heads& heads,
                          int64_t sliding_window, int64_t num_threads) {
  window = sliding_window;
  items.clear();
  merges.clear();
  num_records = 0;
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const int64_t fold = std::min(group, MAX_TILE_VECTORS);
  const int64_t tile_rows = std::max<int64_t>(1, MAX_TILE_VECTORS / fold);
  const auto tiles = cut_rows(segments, paths, tile_rows, window);
  int64_t total = 0;
  for (const RowTile& tile : tiles) total += tile.cost;
  const int64_t dear = total * heads.num_kv_heads / (num_threads * ITEMS_PER_THREAD);
  const int64_t record_limit = MAX_RECORD_BYTES / 4 / record_floats(heads.head_dim);
  for (const RowTile& tile : tiles) {
    const int64_t num_parts = tile.part_end - tile.part_begin;
    const int64_t records = (tile.row_end - tile.row_begin) * heads.num_heads * num_parts;
    const bool cut = num_threads > 1 && num_parts > 1 && tile.cost > dear &&
                     num_records + records <= record_limit;
    for (int64_t head = 0; head < heads.num_heads;) {
      const int64_t group_end = (head / group + 1) * group;
      const int64_t count = std::min(fold, group_end - head);
      AttentionItem item = {int32_t(tile.segment), int32_t(tile.row_begin), int32_t(tile.row_end),
                            int32_t(head), int32_t(count), int32_t(tile.part_begin),
                            int32_t(tile.part_end), int32_t(num_parts), -1};
      head += count;
      if (!cut) {
        items.push_back(item);
        continue;
      }
      for (int64_t part = tile.part_begin; part < tile.part_end; part++) {
        item.part_begin = int32_t(part);
        item.part_end = int32_t(part + 1);
        item.record = num_records + part - tile.part_begin;
        items.push_back(item);
      }
    }
    if (!cut) continue;
    merges.push_back({int32_t(tile.row_begin), int32_t(tile.row_end), int32_t(tile.part_begin),
                      int32_t(tile.part_end), num_records});
    num_records += records;
  }
}

size_t vector_scratch_bytes(int64_t head_dim) {
  const int64_t stride = (head_dim + 15) / 16 * 16;
  const int64_t floats = head_dim * CHUNK_KEYS + CHUNK_KEYS * stride +
                         MAX_TILE_VECTORS * (3 * stride + PART_KEYS + 4 + 4) + 16 * 16;
  return size_t(floats) * 4;
}

size_t attention_scratch_bytes(int64_t head_dim) {
  const int64_t steps = (head_dim + 31) / 32;  // of 32 dimensions: two tiles of 1 KiB over 32 keys
  const int64_t tiles = MAX_TILE_VECTORS / 16 * steps +
                        PART_KEYS / CHUNK_KEYS * (1 + 2 * steps) + 2 * steps;
  return vector_scratch_bytes(head_dim) + size_t(tiles * 1024 + head_dim * 2 + 64);
}

void run_attention(const AttentionCall& call, const RowKernels& kernel, Pool& pool,
                   std::atomic<int64_t>& next_item, void* scratch, int thread) {
  const std::vector<AttentionItem>& items = call.plan->items;
  const int64_t num_items = int64_t(items.size());
  for (;;) {
    const int64_t item = next_item.fetch_add(1, std::memory_order_relaxed);
    if (item >= num_items) break;
    kernel.attend(call, items[size_t(item)], scratch);
  }
  if (call.plan->merges.empty()) return;
  pool.barrier();
  int64_t turn = 0;
  for (const AttentionMerge& merge : call.plan->merges)
    for (int64_t row = merge.row_begin; row < merge.row_end; row++)
      for (int64_t head = 0; head < call.heads.num_heads; head++)
        if (turn++ % pool.num_threads() == thread) kernel.merge(call, merge, row, head, scratch);
}

void run_one_attention(const Segments& segments, const Heads& heads, const KvLayer& kv,
                       const float* keys, const float* values, const float* query, float* out,
                       float scale, int64_t window, Pool& pool) {
  const RowKernels& kernel = row_kernels();
  RowPaths paths;
  paths.build(segments);
  const int64_t kv_size = heads.num_kv_heads * heads.head_dim;
  for (int64_t b = 0; b < segments.num_segments; b++) {
    for (int64_t row = segments.query_start[b]; row < segments.query_start[b + 1]; row++) {
      const int64_t at = segments.context_lens[b] + row - segments.query_start[b];
      const int64_t size = segments.block_size;
      kernel.write_kv(kv, heads, size, segments.blocks[segments.block_offsets[b] + at / size],
                      at % size, keys + row * kv_size, values + row * kv_size);
    }
  }
  AttentionPlan plan;
  plan.build(segments, paths, heads, window, pool.num_threads());
  std::vector<float> records(size_t(plan.num_records * record_floats(heads.head_dim)));
  struct Run {
    AttentionCall call;
    const RowKernels& kernel;
    Pool& pool;
    std::atomic<int64_t> next_item{0};
  };
  const int64_t width = heads.num_heads * heads.head_dim;
  Run run = {{&segments, &paths, &plan, heads, kv, query, width, out, width, records.data(), scale},
             kernel, pool};
  pool.run(
      [](void* context, int thread) {
        Run& r = *static_cast<Run*>(context);
        const FlushTinyNumbers flush;
        r.kernel.thread_begin();
        std::vector<float> scratch(attention_scratch_bytes(r.call.heads.head_dim) / 4 + 1);
        run_attention(r.call, r.kernel, r.pool, r.next_item, scratch.data(), thread);
        r.kernel.thread_end();
      },
      &run);
}

}  // namespace specserve
