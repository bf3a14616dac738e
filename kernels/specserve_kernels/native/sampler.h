// One token chosen per row of logits: what Python's specserve.sampler.choose_row does in numpy, to
// the bit, at the speed of memory and random bits.
//
//   best logit -> greedy: done.   1 pass over V
//   top-k, top-p, min-p           each is a cut: tokens above one weight stay, and of the tokens at
//                                 it the lowest ids. Found among the tokens near the best; top-p
//                                 also needs the mass of all, one more pass
//   the race                      1 pass: argmax(weight + Gumbel noise) over what the cut leaves
//
// The race (see sampler_race.cpp) needs the 16 leading random bits of every token that could still
// win if those bits were all zero, 45 behind the best at most, and 64 bits of one or two. Bits are
// those of Philox4x64-10, block b + 1 for the words of block b, as numpy's generator counts.
//
// Exactness: weights are float32, (logit - best) / temperature; masses are whole numbers (multiples
// of 2^-40 of the best token's), so any order of adding gives the same sum; no operation is fused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace specserve {

// One row and what is wanted of it. Python's ctypes structure mirrors it field by field.
struct SamplerRow {
  const float* logits;       // [num_tokens], penalties and masks applied
  int64_t num_tokens;        // 1 .. 2^22: no padding ids
  uint64_t seed[2];          // low 64 bits; 1 if the seed is negative
  uint64_t position;
  uint64_t purpose;
  double top_p;              // 1 and above: off
  float temperature;         // 0: greedy
  float sharpness;           // > 0: filtered weights are multiplied by it before the race
  float min_weight;          // log(min_p); -infinity: off
  int32_t top_k;             // 0 and below: off
};

struct SamplerChoice {
  int64_t token_id;  // -1: nothing to choose, see best
  float best;        // the largest logit: -infinity, +infinity or NaN where token_id is -1
};

struct BestLogit {
  int64_t token_id;  // the first of equals; undefined if has_nan
  float value;
  bool has_nan;
};

struct NoiseStream {
  uint64_t seed[2], position, purpose;
};

struct RaceLimits {
  float far, near;  // logits; finite
  uint16_t last_cell;
};

// The passes over V, one set per instruction set; the same bits from each.
struct SamplerLoops {
  const char* name;
  BestLogit (*best)(const float* x, int64_t n);
  // The tokens of weight (x[i] - best) / temperature >= lowest -> ids and weights, both [n + 16],
  // ids ascending; returns how many. lowest_logit: finite, none of them is below it.
  int64_t (*near)(const float* x, int64_t n, float best, float temperature, float lowest_logit,
                  float lowest, int32_t* ids, float* weights);
  // Sum of the masses of weights (x[i] - best) / temperature. The mass of a weight <= 0 is
  // 2^40 * exp(weight) to the nearest whole number.
  int64_t (*mass)(const float* x, int64_t n, float best, float temperature);
  // masses [n] of weights [n]
  void (*masses)(const float* weights, int64_t n, int64_t* masses);
  // From group `group` (of 128 tokens) on, the first of num_groups that holds a token for the race:
  // x >= near and leading bits <= last_cell, or x >= far and leading bits 0. Its tokens' leading
  // bits go to cells [128], such tokens' places to found [2] as 128 bits. num_groups: none.
  int64_t (*next_group)(const NoiseStream& stream, const float* x, int64_t group,
                        int64_t num_groups, const RaceLimits& limits, uint16_t* cells,
                        uint64_t* found);
};

const SamplerLoops& sampler_loops();  // the set in use

constexpr int GROUP = 128;  // tokens whose leading bits are 8 blocks, one block per 64-bit lane

extern const SamplerLoops SAMPLER_PORTABLE;
#if defined(__x86_64__)
extern const SamplerLoops SAMPLER_AVX2, SAMPLER_AVX512;
#endif

// The four words of block `block` of one part (0 leading, 1 trailing bits) of a stream.
void philox_block(const NoiseStream& stream, uint64_t part, uint64_t block, uint64_t words[4]);

// The tokens that filters leave: above `weight`, and at it up to id `last_id`.
struct Cut {
  float weight;
  int64_t last_id;
  bool keeps(int64_t id, float its) const {
    return its > weight || (its == weight && id <= last_id);
  }
};

// The log weights of one row, 0 at best and below it elsewhere.
struct Weights {
  const float* logits;
  int64_t num_tokens;
  float best, temperature;
  float at(int64_t id) const { return (logits[id] - best) / temperature; }
  // A logit that no token of weight >= `weight` is below: for first, inexact looks. Finite.
  float logit_at(double weight) const;
};

// Tokens near the best, the first `size` of each array, ids ascending.
struct Near {
  int64_t size = 0;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// All tokens of weight >= lowest (-infinity: of finite logit) -> near.
void find_near(const SamplerLoops& loops, const Weights& weights, float lowest, Near& near);

// The cut that keeps the top_k best -> near: just those. Where there are no more it keeps all, and
// near is unspecified if top_k >= num_tokens, else all of finite logit.
Cut top_k_cut(const SamplerLoops& loops, const Weights& weights, int64_t top_k, Near& near);

// The cut that top-k, top-p and min-p make together.
Cut find_cut(const SamplerLoops& loops, const Weights& weights, int32_t top_k, double top_p,
             float min_weight);

// The winner among the tokens that the cut leaves.
int64_t race(const SamplerLoops& loops, const Weights& weights, const Cut& cut, float sharpness,
             int64_t best_id, const NoiseStream& stream);

}  // namespace specserve
