// The sampler's door: rows in, tokens out, by the fastest instruction set of this machine.
#include "sampler.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace specserve {
namespace {

const SamplerLoops* fastest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
    return &SAMPLER_AVX512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2")) {
    return &SAMPLER_AVX2;
  }
#endif
  return &SAMPLER_PORTABLE;
}

const SamplerLoops* loops_in_use = fastest();

SamplerChoice choice_of(const SamplerLoops& loops, const SamplerRow& row) {
  const BestLogit best = loops.best(row.logits, row.num_tokens);
  if (best.has_nan) return {-1, std::numeric_limits<float>::quiet_NaN()};
  if (!std::isfinite(best.value)) return {-1, best.value};
  if (row.temperature == 0) return {best.token_id, best.value};
  const Weights weights{row.logits, row.num_tokens, best.value, row.temperature};
  const Cut cut = find_cut(loops, weights, row.top_k, row.top_p, row.min_weight);
  const NoiseStream stream{{row.seed[0], row.seed[1]}, row.position, row.purpose};
  return {race(loops, weights, cut, row.sharpness, best.token_id, stream), best.value};
}

}  // namespace

const SamplerLoops& sampler_loops() { return *loops_in_use; }

}  // namespace specserve

#define SPECSERVE_EXPORT extern "C" __attribute__((visibility("default")))

// choices [end] of rows begin .. end - 1. Rows are independent: threads may share the rows out.
SPECSERVE_EXPORT void specserve_sampler_choose(const specserve::SamplerRow* rows, int64_t begin,
                                               int64_t end, specserve::SamplerChoice* choices) {
  const specserve::SamplerLoops& loops = *specserve::loops_in_use;
  for (int64_t i = begin; i < end; ++i) choices[i] = specserve::choice_of(loops, rows[i]);
}

// The num_top best ids of logits [n], ascending, then -1 where fewer are finite -> ids [num_top];
// the largest logit -> best; returns the mass of all, in units of 2^-40 of the best's. -1: the
// largest logit is not finite.
SPECSERVE_EXPORT int64_t specserve_sampler_masses(const float* logits, int64_t n, int64_t num_top,
                                                  int32_t* ids, float* best) {
  using namespace specserve;
  const SamplerLoops& loops = *loops_in_use;
  const BestLogit found = loops.best(logits, n);
  *best = found.value;
  if (found.has_nan || !std::isfinite(found.value)) return -1;
  const Weights weights{logits, n, found.value, 1.0f};
  if (num_top > 0) {
    thread_local Near near;
    if (num_top < n) {
      top_k_cut(loops, weights, num_top, near);
    } else {
      find_near(loops, weights, -HUGE_VALF, near);
    }
    for (int64_t i = 0; i < num_top; ++i) {
      ids[i] = i < near.size ? near.ids[static_cast<size_t>(i)] : -1;
    }
  }
  return loops.mass(logits, n, found.value, 1.0f);
}

// Penalties of the tokens known [num_known] on logits [n], in place: repetition for all of them, the
// others for those from num_prompt on. Rounded where specserve.sampler.rows rounds: the penalty of
// a frequency in double, then each difference to float.
SPECSERVE_EXPORT void specserve_sampler_penalise(float* logits, int64_t n, const int64_t* known,
                                                 int64_t num_known, int64_t num_prompt,
                                                 double presence, double frequency,
                                                 float repetition) {
  thread_local std::vector<int32_t> counts;  // all 0 between calls
  if (static_cast<int64_t>(counts.size()) < n) counts.resize(static_cast<size_t>(n));
  const auto is_token = [n](int64_t id) { return id >= 0 && id < n; };
  if (repetition != 1) {
    for (int64_t i = 0; i < num_known; ++i) {
      const int64_t id = known[i];
      if (!is_token(id) || counts[id]++ > 0) continue;
      logits[id] = logits[id] > 0 ? logits[id] / repetition : logits[id] * repetition;
    }
    for (int64_t i = 0; i < num_known; ++i) {
      if (is_token(known[i])) counts[known[i]] = 0;
    }
  }
  for (int64_t i = num_prompt; i < num_known; ++i) {
    if (is_token(known[i])) ++counts[known[i]];
  }
  for (int64_t i = num_prompt; i < num_known; ++i) {
    const int64_t id = known[i];
    if (!is_token(id) || counts[id] == 0) continue;
    logits[id] = static_cast<float>(logits[id] - frequency * counts[id]);
    logits[id] -= static_cast<float>(presence);
    counts[id] = 0;
  }
}

// Which loops are in use: "avx512", "avx2" or "portable".
SPECSERVE_EXPORT const char* specserve_sampler_instruction_set() {
  return specserve::loops_in_use->name;
}

// Use those loops from now on (tests); 0 where this machine or build has none of that name. Not
// while rows are being chosen.
SPECSERVE_EXPORT int32_t specserve_sampler_use(const char* name) {
  using namespace specserve;
  const SamplerLoops* const wanted[] = {
#if defined(__x86_64__)
      &SAMPLER_AVX512, &SAMPLER_AVX2,
#endif
      &SAMPLER_PORTABLE};
  bool reached = false;  // sets are listed fastest first: what follows the fastest runs, too
  for (const SamplerLoops* loops : wanted) {
    reached = reached || loops == fastest();
    if (reached && strcmp(loops->name, name) == 0) {
      loops_in_use = loops;
      return 1;
    }
  }
  return 0;
}
