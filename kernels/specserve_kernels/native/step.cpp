// The order of a step. Every thread walks through `StepRun::work` side by side:
//
//   embedding -> per layer { norm + prepare | QKV | rotate + KV write | attention | prepare | out |
//   norm + prepare | gate-up | prepare | down } -> final norm + prepare of the wanted rows | head
//
// where | is a barrier. Rows of the small phases and columns of the products are dealt out in
// advance, attention items as threads become free: who computes what changes no bit. For a few rows
// every thread prepares all of them into a buffer of its own: cheaper than waiting for each other,
// and four barriers a layer fewer where a neighbour process may hold a thread back. Of many rows
// (a prompt's) each thread takes its own through all columns: weights come to every core, but no
// row crosses from one to another, and only attention waits.
#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "call_parts.h"
#include "row_kernels.h"

namespace specserve {

namespace {

using Clock = std::chrono::steady_clock;

// How the threads share a product.
enum class Share {
  COPIES,   // each prepares all rows for itself and multiplies its columns
  COLUMNS,  // each prepares some rows for all and multiplies its columns
  ROWS,     // each prepares and multiplies its rows, all columns
};

constexpr int64_t MOST_COPIED_ROWS = 4;
constexpr int64_t LEAST_OWN_ROWS = 64;  // per thread

Share share_of(int64_t num_rows, int num_threads) {
  if (num_rows <= MOST_COPIED_ROWS) return Share::COPIES;
  return num_rows >= LEAST_OWN_ROWS * num_threads ? Share::ROWS : Share::COLUMNS;
}

}  // namespace

struct Workspace {
  Buffer residual, qkv, seen, inner, records;
  std::vector<Buffer> prepared;    // per thread, or the first for all
  std::vector<Buffer> row_scales;  // of the prepared rows
  std::vector<Buffer> scratch;     // per thread: attention
  std::vector<Buffer> row_buffer;  // per thread: one normalised row
  RowPaths paths;
  std::vector<AttentionPlan> plans;  // one per distinct window
  std::vector<const AttentionPlan*> plan_of_layer;
};

Workspace* new_workspace() { return new Workspace; }
void delete_workspace(Workspace* workspace) { delete workspace; }

namespace {

struct StepRun {
  const Model& model;
  const Step& step;
  Pool& pool;
  Workspace& space;
  Phases& phases;
  const RowKernels& kernel;
  const int64_t num_rows;
  const int64_t qkv_size;  // (N+2G)*H
  const int64_t query_size;
  const Share layer_share, head_share;
  std::vector<std::atomic<int64_t>> next_item;  // per layer

  StepRun(const Model& m, const Step& s, Pool& p, Workspace& w, Phases& ph)
      : model(m), step(s), pool(p), space(w), phases(ph), kernel(row_kernels()),
        num_rows(s.segments.num_rows),
        qkv_size((m.heads.num_heads + 2 * m.heads.num_kv_heads) * m.heads.head_dim),
        query_size(m.heads.num_heads * m.heads.head_dim),
        layer_share(share_of(num_rows, p.num_threads())),
        head_share(share_of(s.num_logits, p.num_threads())), next_item(size_t(m.num_layers)) {
    reserve();
    plan_attention();
  }

  void reserve() {
    const size_t rows = size_t(num_rows) * 4;
    space.residual.reserve(rows * model.hidden_size);
    space.qkv.reserve(rows * qkv_size);
    space.seen.reserve(rows * query_size);
    space.inner.reserve(rows * model.inner_size);
    const size_t threads = size_t(pool.num_threads());
    for (auto* buffers : {&space.prepared, &space.row_scales, &space.scratch, &space.row_buffer})
      if (buffers->size() < threads) buffers->resize(threads);
    for (int thread = 0; thread < pool.num_threads(); thread++) {
      reserve_prepared(layer_share, num_rows, thread);
      reserve_prepared(head_share, step.num_logits, thread);
    }
    for (Buffer& buffer : space.scratch)
      buffer.reserve(attention_scratch_bytes(model.heads.head_dim));
    for (Buffer& buffer : space.row_buffer) buffer.reserve(size_t(model.hidden_size) * 4);
  }

  void reserve_prepared(Share share, int64_t count, int thread) {
    const Part part = part_of(share, count, thread);
    size_t bytes = 0;
    for (int64_t k : {model.hidden_size, query_size, model.inner_size})
      bytes = std::max(bytes, prepared_bytes(model.head.dtype, part.num_rows, k));
    space.prepared[part.buffer].reserve(bytes);
    space.row_scales[part.buffer].reserve(size_t(part.num_rows) * 4 + 64);
  }

  void plan_attention() {
    space.paths.build(step.segments);
    std::vector<int64_t> windows;
    for (int64_t i = 0; i < model.num_layers; i++) windows.push_back(model.layers[i].window);
    std::sort(windows.begin(), windows.end());
    windows.erase(std::unique(windows.begin(), windows.end()), windows.end());
    space.plans.resize(windows.size());
    int64_t num_records = 0;
    for (size_t i = 0; i < windows.size(); i++) {
      space.plans[i].build(step.segments, space.paths, model.heads, windows[i],
                           pool.num_threads());
      num_records = std::max(num_records, space.plans[i].num_records);
    }
    space.records.reserve(size_t(num_records * record_floats(model.heads.head_dim)) * 4);
    space.plan_of_layer.clear();
    for (int64_t i = 0; i < model.num_layers; i++) {
      const auto at = std::lower_bound(windows.begin(), windows.end(), model.layers[i].window);
      space.plan_of_layer.push_back(&space.plans[size_t(at - windows.begin())]);
    }
  }

  // ---- phases; each is called by every thread ------------------------------------------------

  Range my_rows(int64_t count, int thread) const {
    return share(count, 1, thread, pool.num_threads());
  }

  void embed(int thread) {
    const Range rows = my_rows(num_rows, thread);
    const int64_t width = model.hidden_size;
    for (int64_t row = rows.begin; row < rows.end; row++) {
      const int64_t at = step.input_ids[row] * width;
      float* to = space.residual.floats() + row * width;
      if (model.embedding_is_bf16)
        kernel.widen_bf16(static_cast<const uint16_t*>(model.embedding) + at, to, width);
      else
        std::memcpy(to, static_cast<const float*>(model.embedding) + at, size_t(width) * 4);
    }
  }

  void capture(int64_t layer, int thread) {
    for (int64_t i = 0; i < step.num_captured; i++) {
      if (step.captured[i] != layer) continue;
      const Range rows = my_rows(num_rows, thread);
      const int64_t width = model.hidden_size;
      for (int64_t row = rows.begin; row < rows.end; row++)
        std::memcpy(step.states + (row * step.num_captured + i) * width,
                    space.residual.floats() + row * width, size_t(width) * 4);
    }
  }

  // What one thread does of a product of `count` rows.
  struct Part {
    Range prepared;  // rows that it prepares
    int64_t first_row, num_rows;  // rows in its buffer, which it multiplies
    size_t buffer;
  };

  Part part_of(Share share, int64_t count, int thread) const {
    const Range mine = my_rows(count, thread);
    switch (share) {
      case Share::COPIES: return {{0, count}, 0, count, size_t(thread)};
      case Share::COLUMNS: return {mine, 0, count, 0};
      default: return {mine, mine.begin, mine.end - mine.begin, size_t(thread)};
    }
  }

  Range columns_of(Share share, const Weight& weight, int thread) const {
    if (share == Share::ROWS) return {0, weight.n};
    // Two tiles, as SWIGLU needs and products compute at once; more would divide 576 unevenly.
    return ::specserve::share(weight.n, 2 * COLUMN_TILE, thread, pool.num_threads());
  }

  void wait_for_prepared(Share share) {
    if (share == Share::COLUMNS) pool.barrier();
  }

  void wait_for_product(Share share) {
    if (share != Share::ROWS) pool.barrier();
  }

  // Row i of `count` prepared rows is the norm of residual row `pick[i]`, or of row i.
  void norm_and_prepare(Share share, const Weight& weight, const float* norm, int64_t count,
                        const int64_t* pick, int thread) {
    const Part part = part_of(share, count, thread);
    const int64_t width = model.hidden_size;
    float* normed = space.row_buffer[size_t(thread)].floats();
    for (int64_t row = part.prepared.begin; row < part.prepared.end; row++) {
      const float* x = space.residual.floats() + (pick ? pick[row] : row) * width;
      kernel.rms_norm(x, norm, normed, width, model.norm_epsilon);
      // A leading dimension of 0: whatever the row, it stands in this buffer.
      const int64_t at = row - part.first_row;
      prepare(weight.dtype, part.num_rows, at, at + 1, width, normed, 0,
              space.prepared[part.buffer].data(), space.row_scales[part.buffer].floats());
    }
  }

  void prepare_rows(const Weight& weight, const float* x, int64_t k, int thread) {
    const Part part = part_of(layer_share, num_rows, thread);
    if (part.prepared.begin < part.prepared.end)
      prepare(weight.dtype, part.num_rows, part.prepared.begin - part.first_row,
              part.prepared.end - part.first_row, k, x + part.first_row * k, k,
              space.prepared[part.buffer].data(), space.row_scales[part.buffer].floats());
  }

  // `next`: the weight of the product after this one, or nullptr.
  void multiply(Share share, const Weight& weight, int64_t count, Epilogue epilogue, float* out,
                int64_t ldo, const Weight* next, int thread) {
    const Part part = part_of(share, count, thread);
    const Range columns = columns_of(share, weight, thread);
    if (columns.begin >= columns.end || part.num_rows == 0) return;
    gemm(weight, part.num_rows, space.prepared[part.buffer].data(),
         space.row_scales[part.buffer].floats(), columns.begin, columns.end, epilogue,
         out + part.first_row * ldo, ldo, next ? first_read(*next, thread) : nullptr);
  }

  // Where the thread's columns of a layer's weight begin.
  const char* first_read(const Weight& weight, int thread) const {
    const int64_t column = columns_of(layer_share, weight, thread).begin;
    return static_cast<const char*>(weight.packed) + packed_bytes(weight.dtype, column, weight.k);
  }

  KvLayer kv_layer(int64_t layer) const {
    const int64_t elements = step.num_blocks * step.segments.block_size *
                             model.heads.num_kv_heads * model.heads.head_dim;
    const int64_t offset = layer * elements * (model.kv_is_bf16 ? 2 : 4);
    return {static_cast<char*>(step.keys) + offset, static_cast<char*>(step.values) + offset,
            model.kv_is_bf16 != 0};
  }

  // Norms and turns queries and keys in place, writes keys and values.
  void rotate_and_write(int64_t layer_idx, int thread) {
    const LayerWeights& layer = model.layers[layer_idx];
    const Heads& heads = model.heads;
    const int64_t head_dim = heads.head_dim, num_turned = heads.num_heads + heads.num_kv_heads;
    const KvLayer kv = kv_layer(layer_idx);
    const Segments& segments = step.segments;
    const Range rows = my_rows(num_rows, thread);
    const int64_t* ends = segments.query_start + 1;
    int64_t b = std::upper_bound(ends, ends + segments.num_segments, rows.begin) - ends;
    for (int64_t row = rows.begin; row < rows.end; row++) {
      while (row >= ends[b]) b++;
      float* qkv = space.qkv.floats() + row * qkv_size;
      const float* cos = step.cos + step.positions[row] * (head_dim / 2);
      const float* sin = step.sin + step.positions[row] * (head_dim / 2);
      for (int64_t head = 0; head < num_turned; head++) {
        float* x = qkv + head * head_dim;
        const float* norm = head < heads.num_heads ? layer.query_norm : layer.key_norm;
        if (norm) kernel.rms_norm(x, norm, x, head_dim, model.norm_epsilon);
        kernel.rotate(x, cos, sin, head_dim);
      }
      const int64_t slot_index = segments.context_lens[b] + row - segments.query_start[b];
      const int64_t block =
          segments.blocks[segments.block_offsets[b] + slot_index / segments.block_size];
      kernel.write_kv(kv, heads, segments.block_size, block, slot_index % segments.block_size,
                      qkv + heads.num_heads * head_dim, qkv + num_turned * head_dim);
    }
  }

  void attend(int64_t layer, int thread) {
    const AttentionPlan& plan = *space.plan_of_layer[size_t(layer)];
    const AttentionCall call = {&step.segments, &space.paths, &plan, model.heads, kv_layer(layer),
                                space.qkv.floats(), qkv_size, space.seen.floats(), query_size,
                                space.records.floats(),
                                1.0f / std::sqrt(float(model.heads.head_dim))};
    run_attention(call, kernel, pool, next_item[size_t(layer)],
                  space.scratch[size_t(thread)].data(), thread);
  }

  // ---- the whole ------------------------------------------------------------------------------

  struct Watch {
    Phases* phases;  // of the calling thread; nullptr in others
    Clock::time_point last = Clock::now();
    void lap(int64_t Phases::*phase) {
      if (!phases) return;
      const Clock::time_point now = Clock::now();
      phases->*phase += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
      last = now;
    }
  };

  void layer(int64_t idx, int thread, Watch& watch) {
    const LayerWeights& layer = model.layers[idx];
    float* residual = space.residual.floats();
    const int64_t width = model.hidden_size;
    capture(idx, thread);
    const Weight* next = idx + 1 < model.num_layers ? &model.layers[idx + 1].qkv : &model.head;
    norm_and_prepare(layer_share, layer.qkv, layer.input_norm, num_rows, nullptr, thread);
    wait_for_prepared(layer_share);
    watch.lap(&Phases::rest);
    multiply(layer_share, layer.qkv, num_rows, Epilogue::STORE, space.qkv.floats(), qkv_size,
             &layer.out, thread);
    wait_for_product(layer_share);
    watch.lap(&Phases::gemm);
    rotate_and_write(idx, thread);
    pool.barrier();
    watch.lap(&Phases::rest);
    attend(idx, thread);
    pool.barrier();
    watch.lap(&Phases::attention);
    prepare_rows(layer.out, space.seen.floats(), query_size, thread);
    wait_for_prepared(layer_share);
    watch.lap(&Phases::rest);
    multiply(layer_share, layer.out, num_rows, Epilogue::ADD, residual, width, &layer.gate_up,
             thread);
    wait_for_product(layer_share);
    watch.lap(&Phases::gemm);
    norm_and_prepare(layer_share, layer.gate_up, layer.mlp_norm, num_rows, nullptr, thread);
    wait_for_prepared(layer_share);
    watch.lap(&Phases::rest);
    multiply(layer_share, layer.gate_up, num_rows, Epilogue::SWIGLU, space.inner.floats(),
             model.inner_size, &layer.down, thread);
    wait_for_product(layer_share);
    watch.lap(&Phases::gemm);
    prepare_rows(layer.down, space.inner.floats(), model.inner_size, thread);
    wait_for_prepared(layer_share);
    watch.lap(&Phases::rest);
    multiply(layer_share, layer.down, num_rows, Epilogue::ADD, residual, width, next, thread);
    wait_for_product(layer_share);
    watch.lap(&Phases::gemm);
  }

  void work(int thread) {
    const FlushTinyNumbers flush;
    Watch watch = {thread == 0 ? &phases : nullptr};
    gemm_thread_begin();
    kernel.thread_begin();
    embed(thread);
    pool.barrier();
    for (int64_t idx = 0; idx < model.num_layers; idx++) layer(idx, thread, watch);
    capture(model.num_layers, thread);
    if (layer_share == Share::ROWS) pool.barrier();  // logits of anybody's rows
    norm_and_prepare(head_share, model.head, model.final_norm, step.num_logits, step.logits_rows,
                     thread);
    wait_for_prepared(head_share);
    watch.lap(&Phases::rest);
    multiply(head_share, model.head, step.num_logits, Epilogue::STORE, step.logits,
             model.vocab_size, nullptr, thread);
    kernel.thread_end();
    gemm_thread_end();
    pool.barrier();
    watch.lap(&Phases::head);
  }
};

}  // namespace

void run_step(const Model& model, const Step& step, Pool& pool, Workspace& workspace,
              Phases& phases) {
  const Clock::time_point start = Clock::now();
  phases = {};
  StepRun run(model, step, pool, workspace, phases);
  pool.run([](void* context, int thread) { static_cast<StepRun*>(context)->work(thread); }, &run);
  phases.total =
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace specserve
