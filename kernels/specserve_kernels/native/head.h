// An EAGLE-3 head: one decoder layer that reads three of the target's states guesses on, a whole
// chain of guesses for many sequences in one call. Plain structs, filled in by the caller
// (native_head.py mirrors them field by field). All memory but the workspace is the caller's.
//
// Slot j of a sequence holds the KV of (state at position j - 1, token at j), turned by position
// j - 1; slot 0 is empty. A guess writes its KV behind the known tokens, into slots that the
// sequence owns for this step and that are filled anew before they count as known.
#pragma once
#include <cstdint>

#include "attention.h"
#include "gemm.h"
#include "pool.h"
#include "sampler.h"

namespace specserve {

struct HeadModel {
  int64_t num_states;     // A of the target's layers are read,
  int64_t state_size;     // D wide each
  int64_t hidden_size;    // H'
  int64_t inner_size;     // I, padded to 16
  int64_t num_entries;    // W of the head
  Heads heads;
  float norm_epsilon;
  int32_t kv_is_bf16;
  int32_t embedding_is_bf16;
  int32_t norm_before_residual;  // the residual stream starts from the normed state
  int32_t norm_output;           // guesses are fed with the normed output
  int32_t reserved;
  const void* embedding;     // [V, H']
  const float* input_norm;   // [A*D] or nullptr
  const float* fc_norms;     // [A, D] or nullptr
  const float* embed_norm;   // [H']
  const float* hidden_norm;  // [H']
  const float* query_norm;   // [H] or nullptr
  const float* key_norm;     // [H] or nullptr
  const float* mlp_norm;     // [H']
  const float* final_norm;   // [H']
  Weight fc;                 // [H', A*D]
  Weight qkv;                // [(N+2G)*H, 2H'] of (normed embedding, normed state)
  Weight out;                // [H', N*H]
  Weight gate_up;            // [2I, H'] in alternating groups of 16
  Weight down;               // [H', I]
  Weight head;               // [W, H']
  const int64_t* target_ids; // [W] ascending: the target's id of each entry
};

// Paged KV of the layer, one state per block, and the rope tables.
struct HeadMemory {
  void* keys;        // as KvLayer
  void* values;
  float* tails;      // [P, H'] the fused state at each block's last position
  int64_t block_size;
  const float* cos;  // [positions, H/2]
  const float* sin;
};

// B sequences whose new slots are filled; the first R of them guess, in order of falling K.
struct HeadStep {
  int64_t num_sequences;         // B
  int64_t num_guessing;          // R
  int64_t num_fused;             // F states to be fused
  const int64_t* block_offsets;  // [B] where a sequence's block ids begin in `blocks`
  const int32_t* blocks;
  const int64_t* first_seen;     // [B] slots below it hold nothing, at least 1
  const int64_t* begin;          // [B] first slot to fill
  const int64_t* count;          // [B] slots to fill, at least 1
  const float* const* given;     // [B] [H'] the fused state of the first slot, or nullptr
  const float* const* raw;       // [F] [A, D] states of all other slots, sequence by sequence
  const int64_t* tokens;         // [sum of count] the tokens of the slots
  const int64_t* num_guesses;    // [R] K, at least 1
  const SamplerRow* samplers;    // [R] for the first guess; logits and num_tokens are not read
  float* fused;                  // [F, H'] written
  int64_t stride;                // of ids and scores: the largest K
  int64_t* ids;                  // [R, stride] guesses, as the target's ids
  double* scores;                // [R, stride]
  int64_t* num_found;            // [R] guesses before logits became useless
  float* logits;                 // [R, W]: if given, no guess is chosen
  float* feedback;               // [R, H'] of the last known token, with `logits`
};

// n guesses of one depth that are fed; their logits are wanted.
struct HeadNodes {
  int64_t num_sequences;         // B
  int64_t num_nodes;             // n
  int64_t depth;                 // 1: they follow the last known token
  const int64_t* block_offsets;  // [B]
  const int32_t* blocks;
  const int64_t* first_seen;     // [B]
  const int64_t* num_known;      // [B] known tokens: guesses' KV is behind theirs, as they are fed
  const int64_t* node_start;     // [B+1] nodes stand sequence by sequence
  const float* const* states;    // [n] [H'] feedback of each node's parent
  const int64_t* tokens;         // [n]
  const int32_t* paths;          // [n, depth] order in which ancestors were fed, itself last
  float* logits;                 // [n, W]
  float* feedback;               // [n, H']
};

struct HeadWorkspace;
HeadWorkspace* new_head_workspace();
void delete_head_workspace(HeadWorkspace* workspace);

void run_head_step(const HeadModel& model, const HeadMemory& memory, const HeadStep& step,
                   Pool& pool, HeadWorkspace& workspace);
void run_head_nodes(const HeadModel& model, const HeadMemory& memory, const HeadNodes& nodes,
                    Pool& pool, HeadWorkspace& workspace);

// One guess: what specserve_drafts.children gives a place of width 1 without edits, a greedy row or
// one coupled to the target's noise.
struct HeadGuess {
  int64_t entry;  // -1: the logits are useless
  double score;
};
HeadGuess guess(const float* logits, int64_t num_entries, const int64_t* target_ids,
                const SamplerRow& row);

}  // namespace specserve
