// The order of a call. Every thread walks through `HeadRun::work` side by side:
//
//   fuse: norms + prepare | fc |
//   then per depth { embed, norms, prepare | QKV | rotate + KV write | attention | prepare | out |
//   norm + prepare | gate-up | prepare | down | norm + prepare | head | choose }
//
// where | is a barrier. The first depth's rows are the last slot of each sequence that guesses, then
// all other new slots, of which only keys and values are wanted. Later rows are guesses. For a few
// rows every thread prepares all of them for itself, as in step.cpp.
#include "head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "call_parts.h"
#include "row_kernels.h"

namespace specserve {

namespace {

constexpr int64_t MOST_ROWS_ALONE = 4;

// One row of the layer. sequence: whose blocks; slot: index among that sequence's slots; its RoPE
// position is `position`.
struct Row {
  const float* state;
  int64_t token, sequence, slot, position;
};

struct Sequences {
  const int64_t* block_offsets;
  const int32_t* blocks;
  const int64_t* first_seen;
};

}  // namespace

struct HeadWorkspace {
  Buffer residual, qkv, seen, inner, logits, feedback;
  std::vector<Buffer> prepared, row_scales;  // per thread, or the first for all
  std::vector<Buffer> scratch, mixed;        // per thread: attention, one row of a product
  std::vector<Row> rows;
  RowPaths paths;
  std::vector<int64_t> contexts;     // [B]
  std::vector<uint8_t> is_tree;      // [B]
  std::vector<AttentionPlan> plans;  // [B] of one sequence each: what it sees begins where its KV does
};

HeadWorkspace* new_head_workspace() { return new HeadWorkspace; }
void delete_head_workspace(HeadWorkspace* workspace) { delete workspace; }

namespace {

class HeadRun {
 public:
  HeadRun(const HeadModel& model, const HeadMemory& memory, const Sequences& sequences, Pool& pool,
          HeadWorkspace& space)
      : model_(model), memory_(memory), sequences_(sequences), pool_(pool), space_(space),
        kernel_(row_kernels()), kv_{memory.keys, memory.values, model.kv_is_bf16 != 0},
        query_size_(model.heads.num_heads * model.heads.head_dim),
        qkv_size_(query_size_ + 2 * model.heads.num_kv_heads * model.heads.head_dim) {}

  // Fill slots, then guess or give the logits of the last known tokens.
  void run_step(const HeadStep& step) {
    step_ = &step;
    num_rows_ = begin_rows(step);
    num_full_ = step.num_guessing;
    reserve(std::max(num_rows_, step.num_fused));
    feedback_ = step.logits ? step.feedback : space_.feedback.floats();
    logits_ = step.logits ? step.logits : space_.logits.floats();
    pool_.run([](void* run, int thread) { static_cast<HeadRun*>(run)->fill_and_guess(thread); },
              this);
  }

  // Feed guesses.
  void run_nodes(const HeadNodes& nodes) {
    nodes_ = &nodes;
    num_rows_ = num_full_ = begin_nodes(nodes);
    reserve(num_rows_);
    feedback_ = nodes.feedback;
    logits_ = nodes.logits;
    pool_.run([](void* run, int thread) { static_cast<HeadRun*>(run)->feed(thread); }, this);
  }

 private:
  // ---- what is computed ----------------------------------------------------------------------

  // A fused state is known by its address before it is there.
  int64_t begin_rows(const HeadStep& step) {
    std::vector<Row>& rows = space_.rows;
    rows.resize(size_t(step.num_guessing));
    const float* fused = step.fused;
    const int64_t* token = step.tokens;
    for (int64_t b = 0; b < step.num_sequences; b++) {
      for (int64_t i = 0; i < step.count[b]; i++, token++) {
        const bool is_given = i == 0 && step.given[b] != nullptr;
        const int64_t slot = step.begin[b] + i;
        const Row row = {is_given ? step.given[b] : fused, *token, b, slot, slot - 1};
        if (!is_given) fused += model_.hidden_size;
        if (b < step.num_guessing && i == step.count[b] - 1)
          rows[size_t(b)] = row;
        else
          rows.push_back(row);
      }
    }
    space_.contexts.resize(size_t(step.num_sequences));
    space_.is_tree.assign(size_t(step.num_sequences), 0);
    return int64_t(rows.size());
  }

  int64_t begin_nodes(const HeadNodes& nodes) {
    std::vector<Row>& rows = space_.rows;
    rows.clear();
    for (int64_t b = 0; b < nodes.num_sequences; b++) {
      for (int64_t node = nodes.node_start[b]; node < nodes.node_start[b + 1]; node++) {
        const int64_t known = nodes.num_known[b];
        const int64_t order = nodes.paths[(node + 1) * nodes.depth - 1];
        rows.push_back({nodes.states[node], nodes.tokens[node], b, known + order,
                        known + nodes.depth - 2});
      }
    }
    space_.contexts.assign(nodes.num_known, nodes.num_known + nodes.num_sequences);
    space_.is_tree.assign(size_t(nodes.num_sequences), 1);
    space_.paths.ancestors.assign(nodes.paths, nodes.paths + nodes.num_nodes * nodes.depth);
    return nodes.num_nodes;
  }

  void reserve(int64_t most_rows) {
    const size_t threads = size_t(pool_.num_threads());
    for (auto* buffers : {&space_.prepared, &space_.row_scales, &space_.scratch, &space_.mixed})
      if (buffers->size() < threads) buffers->resize(threads);
    const int64_t fused_size = model_.num_states * model_.state_size;
    size_t prepared = 0;
    for (int64_t k : {fused_size, 2 * model_.hidden_size, query_size_, model_.inner_size})
      prepared = std::max(prepared, prepared_bytes(model_.head.dtype, most_rows, k));
    const size_t row = size_t(std::max(fused_size, 2 * model_.hidden_size)) * 4;
    for (size_t i = 0; i < threads; i++) {
      space_.prepared[i].reserve(prepared);
      space_.row_scales[i].reserve(size_t(most_rows) * 4 + 64);
      space_.scratch[i].reserve(attention_scratch_bytes(model_.heads.head_dim));
      space_.mixed[i].reserve(row);
    }
    const size_t full = size_t(num_full_) * 4;
    space_.qkv.reserve(size_t(num_rows_ * qkv_size_) * 4);
    space_.residual.reserve(full * size_t(model_.hidden_size));
    space_.feedback.reserve(full * size_t(model_.hidden_size));
    space_.seen.reserve(full * size_t(query_size_));
    space_.inner.reserve(full * size_t(model_.inner_size));
    space_.logits.reserve(full * size_t(model_.num_entries));
    space_.paths.position.resize(size_t(num_full_));
    space_.paths.ancestor_start.resize(size_t(num_full_));
    space_.plans.resize(space_.contexts.size());
  }

  // ---- phases; each is called by every thread --------------------------------------------------

  bool alone(int64_t count) const { return count <= MOST_ROWS_ALONE; }

  // The rows of a product that this thread prepares, and where.
  struct Prepared {
    Range rows;
    void* data;
    float* scales;
  };

  Prepared prepared(int64_t count, int thread) const {
    const size_t at = alone(count) ? size_t(thread) : 0;
    const Range rows =
        alone(count) ? Range{0, count} : share(count, 1, thread, pool_.num_threads());
    return {rows, space_.prepared[at].data(), space_.row_scales[at].floats()};
  }

  // Whether this thread is the one that writes what belongs to a row it prepares.
  bool owns(int64_t count, int thread) const { return !alone(count) || thread == 0; }

  void wait_for_prepared(int64_t count) {
    if (!alone(count)) pool_.barrier();
  }

  // make(row, x): a row of k numbers, at x or wherever it returns.
  template <class Make>
  void prepare_made(const Weight& weight, int64_t count, int thread, Make make) {
    const Prepared to = prepared(count, thread);
    float* x = space_.mixed[size_t(thread)].floats();
    for (int64_t row = to.rows.begin; row < to.rows.end; row++) {
      const float* made = make(row, x);
      // A leading dimension of 0: whatever the row, it stands here.
      prepare(weight.dtype, count, row, row + 1, weight.k, made, 0, to.data, to.scales);
    }
    wait_for_prepared(count);
  }

  // Columns of `all` for the first num_rows of `count` prepared rows.
  void multiply(const Weight& weight, int64_t count, int64_t num_rows, Range all, Epilogue epilogue,
                float* out, int64_t ldo, int thread) {
    const Range own = share(all.end - all.begin, 2 * COLUMN_TILE, thread, pool_.num_threads());
    const Prepared from = prepared(count, thread);
    if (own.begin < own.end && num_rows > 0)
      gemm(weight, num_rows, from.data, from.scales, all.begin + own.begin, all.begin + own.end,
           epilogue, out, ldo);
  }

  void product(const Weight& weight, int64_t count, Epilogue epilogue, float* out, int64_t ldo,
               int thread) {
    multiply(weight, count, count, {0, weight.n}, epilogue, out, ldo, thread);
    pool_.barrier();
  }

  void rms_norm(const float* x, const float* weight, float* y, int64_t n) const {
    kernel_.rms_norm(x, weight, y, n, model_.norm_epsilon);
  }

  void fuse(int thread) {
    const HeadStep& step = *step_;
    if (step.num_fused == 0) return;
    const int64_t width = model_.state_size, num_states = model_.num_states;
    prepare_made(model_.fc, step.num_fused, thread, [&](int64_t row, float* x) {
      const float* from = step.raw[row];
      if (model_.input_norm) {
        rms_norm(from, model_.input_norm, x, num_states * width);
        from = x;
      }
      if (model_.fc_norms) {
        for (int64_t i = 0; i < num_states; i++)
          rms_norm(from + i * width, model_.fc_norms + i * width, x + i * width, width);
        from = x;
      }
      return from;
    });
    product(model_.fc, step.num_fused, Epilogue::STORE, step.fused, model_.hidden_size, thread);
  }

  void embed(int64_t token, float* to) const {
    const int64_t width = model_.hidden_size, at = token * width;
    if (model_.embedding_is_bf16)
      kernel_.widen_bf16(static_cast<const uint16_t*>(model_.embedding) + at, to, width);
    else
      std::memcpy(to, static_cast<const float*>(model_.embedding) + at, size_t(width) * 4);
  }

  int64_t block_of(const Row& row, int64_t slot) const {
    return sequences_.blocks[sequences_.block_offsets[row.sequence] + slot / memory_.block_size];
  }

  // The state that a block's first slot reads is the one at the last position of the block before.
  void keep_tail(const Row& row) const {
    if (row.slot % memory_.block_size != 0 || row.slot == 0) return;
    std::memcpy(memory_.tails + block_of(row, row.slot - 1) * model_.hidden_size, row.state,
                size_t(model_.hidden_size) * 4);
  }

  // (normed embedding, normed state) of each row, and what the residual stream starts from.
  void mix(bool keeps_tails, int thread) {
    const int64_t width = model_.hidden_size;
    const bool owner = owns(num_rows_, thread);
    prepare_made(model_.qkv, num_rows_, thread, [&](int64_t idx, float* x) {
      const Row& row = space_.rows[size_t(idx)];
      float *embedded = x, *normed = x + width;
      embed(row.token, normed);
      rms_norm(normed, model_.embed_norm, embedded, width);
      rms_norm(row.state, model_.hidden_norm, normed, width);
      if (owner && keeps_tails) keep_tail(row);
      if (owner && idx < num_full_)
        std::memcpy(space_.residual.floats() + idx * width,
                    model_.norm_before_residual ? normed : row.state, size_t(width) * 4);
      return x;
    });
  }

  void project(int thread) {
    float* qkv = space_.qkv.floats();
    const Weight& weight = model_.qkv;
    if (num_full_ < num_rows_ && query_size_ % COLUMN_TILE == 0) {
      multiply(weight, num_rows_, num_full_, {0, query_size_}, Epilogue::STORE, qkv, qkv_size_,
               thread);
      multiply(weight, num_rows_, num_rows_, {query_size_, qkv_size_}, Epilogue::STORE, qkv,
               qkv_size_, thread);
    } else {
      multiply(weight, num_rows_, num_rows_, {0, qkv_size_}, Epilogue::STORE, qkv, qkv_size_,
               thread);
    }
    pool_.barrier();
  }

  void rotate_and_write(int thread) {
    const Heads& heads = model_.heads;
    const int64_t head_dim = heads.head_dim, num_turned = heads.num_heads + heads.num_kv_heads;
    const Range rows = share(num_rows_, 1, thread, pool_.num_threads());
    for (int64_t idx = rows.begin; idx < rows.end; idx++) {
      const Row& row = space_.rows[size_t(idx)];
      float* qkv = space_.qkv.floats() + idx * qkv_size_;
      const float* cos = memory_.cos + row.position * (head_dim / 2);
      const float* sin = memory_.sin + row.position * (head_dim / 2);
      for (int64_t head = idx < num_full_ ? 0 : heads.num_heads; head < num_turned; head++) {
        float* x = qkv + head * head_dim;
        const float* norm = head < heads.num_heads ? model_.query_norm : model_.key_norm;
        if (norm) rms_norm(x, norm, x, head_dim);
        kernel_.rotate(x, cos, sin, head_dim);
      }
      kernel_.write_kv(kv_, heads, memory_.block_size, block_of(row, row.slot),
                       row.slot % memory_.block_size, qkv + query_size_,
                       qkv + num_turned * head_dim);
    }
    pool_.barrier();
  }

  // Rows of one sequence that stand together share the loads of its keys; (such a run, KV head) is
  // an item of work, dealt out in advance.
  void attend(int thread) {
    const Heads& heads = model_.heads;
    const int64_t group = heads.num_heads / heads.num_kv_heads;
    const int64_t fold = std::min(group, MAX_TILE_VECTORS);
    const int64_t most_rows = std::max<int64_t>(1, MAX_TILE_VECTORS / fold);
    const int64_t num_blocked = (group + fold - 1) / fold * heads.num_kv_heads;
    int64_t turn = 0;
    for (int64_t first = 0; first < num_full_;) {
      const int64_t b = space_.rows[size_t(first)].sequence;
      int64_t end = first + 1;
      while (end < num_full_ && end - first < most_rows &&
             space_.rows[size_t(end)].sequence == b)
        end++;
      const AttentionPlan& plan = space_.plans[size_t(b)];
      const int64_t last_part = space_.paths.position[size_t(first)] / PART_KEYS + 1;
      const int64_t first_part = sequences_.first_seen[b] / PART_KEYS;
      for (int64_t at = 0; at < num_blocked; at++) {
        if (turn++ % pool_.num_threads() != thread) continue;
        const int64_t kv_head = at % heads.num_kv_heads;
        const int64_t skipped = at / heads.num_kv_heads * fold;
        const AttentionItem item = {
            int32_t(b), int32_t(first), int32_t(end), int32_t(kv_head * group + skipped),
            int32_t(std::min(fold, group - skipped)), int32_t(first_part), int32_t(last_part),
            int32_t(last_part - first_part), -1};
        kernel_.attend(attention_call(plan), item, space_.scratch[size_t(thread)].data());
      }
      first = end;
    }
    pool_.barrier();
  }

  AttentionCall attention_call(const AttentionPlan& plan) const {
    return {&segments_, &space_.paths, &plan, model_.heads, kv_, space_.qkv.floats(), qkv_size_,
            space_.seen.floats(), query_size_, nullptr,
            1.0f / std::sqrt(float(model_.heads.head_dim))};
  }

  // What attention reads of this depth's rows; by one thread, before a barrier.
  void plan_attention(int64_t depth) {
    segments_ = {};
    segments_.block_size = memory_.block_size;
    segments_.block_offsets = sequences_.block_offsets;
    segments_.blocks = sequences_.blocks;
    segments_.context_lens = space_.contexts.data();
    segments_.is_tree = space_.is_tree.data();
    for (int64_t idx = 0; idx < num_full_; idx++) {
      const Row& row = space_.rows[size_t(idx)];
      const size_t b = size_t(row.sequence);
      const int64_t logical = row.position + 1;
      space_.paths.position[size_t(idx)] = logical;
      space_.paths.ancestor_start[size_t(idx)] = idx * depth;
      if (nodes_ == nullptr) space_.contexts[b] = logical;
      space_.plans[b].window = logical + 1 - sequences_.first_seen[b];
    }
  }

  // From attention's input to logits and feedback of the full rows.
  void layer(int thread) {
    const int64_t count = num_full_, width = model_.hidden_size;
    float* residual = space_.residual.floats();
    attend(thread);
    prepare_made(model_.out, count, thread, [&](int64_t row, float*) {
      return space_.seen.floats() + row * query_size_;
    });
    product(model_.out, count, Epilogue::ADD, residual, width, thread);
    prepare_made(model_.gate_up, count, thread, [&](int64_t row, float* x) {
      rms_norm(residual + row * width, model_.mlp_norm, x, width);
      return x;
    });
    product(model_.gate_up, count, Epilogue::SWIGLU, space_.inner.floats(), model_.inner_size,
            thread);
    prepare_made(model_.down, count, thread, [&](int64_t row, float*) {
      return space_.inner.floats() + row * model_.inner_size;
    });
    product(model_.down, count, Epilogue::ADD, residual, width, thread);
    const bool owner = owns(count, thread);
    prepare_made(model_.head, count, thread, [&](int64_t row, float* x) {
      const float* output = residual + row * width;
      rms_norm(output, model_.final_norm, x, width);
      if (owner)
        std::memcpy(feedback_ + row * width, model_.norm_output ? x : output, size_t(width) * 4);
      return x;
    });
    product(model_.head, count, Epilogue::STORE, logits_, model_.num_entries, thread);
  }

  // ---- chains ----------------------------------------------------------------------------------

  // Row i's guess at this depth, and the row that feeds it.
  void choose(int64_t i, int64_t depth) {
    const HeadStep& step = *step_;
    Row& row = space_.rows[size_t(i)];
    if (depth == 0) step.num_found[i] = 0;
    const bool is_alive = step.num_found[i] == depth;
    SamplerRow sampler = step.samplers[i];
    sampler.position += uint64_t(depth);
    const HeadGuess found =
        guess(logits_ + i * model_.num_entries, model_.num_entries, model_.target_ids, sampler);
    const bool is_found = is_alive && found.entry >= 0;
    row.token = is_found ? model_.target_ids[found.entry] : 0;
    row.state = feedback_ + i * model_.hidden_size;
    row.slot++;
    row.position++;
    if (!is_found) return;  // it goes on beside the others; what it says is not read
    step.ids[i * step.stride + depth] = row.token;
    step.scores[i * step.stride + depth] = found.score;
    step.num_found[i]++;
  }

  void fill_and_guess(int thread) {
    const FlushTinyNumbers flush;
    const HeadStep& step = *step_;
    gemm_thread_begin();
    kernel_.thread_begin();
    fuse(thread);
    if (thread == 0) plan_attention(0);
    for (int64_t depth = 0;; depth++) {
      mix(depth == 0, thread);
      project(thread);
      rotate_and_write(thread);
      if (step.num_guessing == 0) break;
      layer(thread);
      if (step.logits) break;
      for (int64_t i = thread; i < num_full_; i += pool_.num_threads()) choose(i, depth);
      pool_.barrier();
      if (depth + 1 == step.stride) break;
      if (thread == 0) next_depth(depth + 1);
      pool_.barrier();
    }
    kernel_.thread_end();
    gemm_thread_end();
  }

  // Sequences with enough guesses, which are the last ones, leave.
  void next_depth(int64_t depth) {
    while (step_->num_guesses[num_full_ - 1] <= depth) num_full_--;
    num_rows_ = num_full_;
    plan_attention(0);
  }

  void feed(int thread) {
    const FlushTinyNumbers flush;
    gemm_thread_begin();
    kernel_.thread_begin();
    if (thread == 0) plan_attention(nodes_->depth);
    mix(false, thread);
    project(thread);
    rotate_and_write(thread);
    layer(thread);
    kernel_.thread_end();
    gemm_thread_end();
  }

  const HeadModel& model_;
  const HeadMemory& memory_;
  const Sequences sequences_;
  Pool& pool_;
  HeadWorkspace& space_;
  const RowKernels& kernel_;
  const KvLayer kv_;
  const int64_t query_size_, qkv_size_;
  const HeadStep* step_ = nullptr;
  const HeadNodes* nodes_ = nullptr;
  Segments segments_ = {};
  int64_t num_rows_ = 0;  // of this depth,
  int64_t num_full_ = 0;  // of which the first so many go through the whole layer
  float* feedback_ = nullptr;
  float* logits_ = nullptr;
};

}  // namespace

void run_head_step(const HeadModel& model, const HeadMemory& memory, const HeadStep& step,
                   Pool& pool, HeadWorkspace& workspace) {
  const Sequences sequences = {step.block_offsets, step.blocks, step.first_seen};
  HeadRun(model, memory, sequences, pool, workspace).run_step(step);
}

void run_head_nodes(const HeadModel& model, const HeadMemory& memory, const HeadNodes& nodes,
                    Pool& pool, HeadWorkspace& workspace) {
  const Sequences sequences = {nodes.block_offsets, nodes.blocks, nodes.first_seen};
  HeadRun(model, memory, sequences, pool, workspace).run_nodes(nodes);
}

}  // namespace specserve

#define SPECSERVE_EXPORT extern "C" __attribute__((visibility("default")))

// Arguments are checked by the caller (native_head.py).
SPECSERVE_EXPORT specserve::HeadWorkspace* specserve_new_head_workspace() {
  return specserve::new_head_workspace();
}
SPECSERVE_EXPORT void specserve_delete_head_workspace(specserve::HeadWorkspace* workspace) {
  specserve::delete_head_workspace(workspace);
}
SPECSERVE_EXPORT void specserve_head_step(const specserve::HeadModel* model,
                                          const specserve::HeadMemory* memory,
                                          const specserve::HeadStep* step, specserve::Pool* pool,
                                          specserve::HeadWorkspace* workspace) {
  specserve::run_head_step(*model, *memory, *step, *pool, *workspace);
}
SPECSERVE_EXPORT void specserve_head_nodes(const specserve::HeadModel* model,
                                           const specserve::HeadMemory* memory,
                                           const specserve::HeadNodes* nodes,
                                           specserve::Pool* pool,
                                           specserve::HeadWorkspace* workspace) {
  specserve::run_head_nodes(*model, *memory, *nodes, *pool, *workspace);
}
