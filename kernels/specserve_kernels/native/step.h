// One forward of the Llama family over packed rows and paged KV. Plain structs: the caller's
// language fills them in (native_step.py mirrors them field by field). All memory but the
// workspace is the caller's.
#pragma once
#include <cstdint>
#include <memory>

#include "attention.h"
#include "gemm.h"
#include "pool.h"

namespace specserve {

struct LayerWeights {
  const float* input_norm;  // [D]
  const float* mlp_norm;    // [D]
  const float* query_norm;  // [H] or nullptr
  const float* key_norm;    // [H] or nullptr
  Weight qkv;               // [(N+2G)*H, D]
  Weight out;               // [D, N*H]
  Weight gate_up;           // [2I, D] in alternating groups of 16, I a multiple of 16
  Weight down;              // [D, I]
  int64_t window;           // 0: sees everything
};

struct Model {
  int64_t num_layers, hidden_size, inner_size, vocab_size;  // inner_size: I, padded to 16
  Heads heads;
  float norm_epsilon;
  int32_t kv_is_bf16;
  int32_t embedding_is_bf16;
  int32_t reserved;
  const void* embedding;  // [V, D]
  const float* final_norm;
  Weight head;  // [V, D]
  const LayerWeights* layers;
};

struct Step {
  Segments segments;
  const int64_t* input_ids;    // [T]
  const int64_t* positions;    // [T] rows of the rope tables
  const float* cos;            // [positions, H/2]
  const float* sin;
  void* keys;                  // all layers, as KvLayer
  void* values;
  int64_t num_blocks;          // P
  const int64_t* logits_rows;  // [L]
  int64_t num_logits;
  float* logits;               // [L, V]
  const int64_t* captured;     // layers whose entering residual stream is wanted, ascending;
  int64_t num_captured;        // num_layers: what the last layer puts out
  float* states;               // [T, num_captured, D]
};

// Nanoseconds of the calling thread in one step. `rest` holds norms, rotation, KV writes, waiting.
struct Phases {
  int64_t gemm, head, attention, rest, total;
};

// Buffers that grow to the largest step. One step at a time.
struct Workspace;
Workspace* new_workspace();
void delete_workspace(Workspace* workspace);

void run_step(const Model& model, const Step& step, Pool& pool, Workspace& workspace,
              Phases& phases);

}  // namespace specserve
