// A guess from a head's logits. The oracle is specserve_drafts/children.py; its rule in short: of
// the MOST_CANDIDATES best entries, those that top-k, top-p and min-p leave race by
// sharpness * weight + the noise that the target itself will add to that token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "head.h"

namespace specserve {
namespace {

constexpr int64_t MOST_CANDIDATES = 256;
constexpr double LARGEST_UNIFORM = 1.0 - 0x1p-53;

struct Candidate {
  int32_t entry;
  float weight;
};

// The Gumbel noise of one token: noise.py's 16 leading and 48 trailing bits.
double noise_of(const NoiseStream& stream, int64_t id) {
  uint64_t leading[4], trailing[4];
  philox_block(stream, 0, static_cast<uint64_t>(id / 16), leading);
  philox_block(stream, 1, static_cast<uint64_t>(id / 4), trailing);
  const uint64_t cell = leading[id % 16 / 4] >> (16 * (id % 4)) & 0xffff;
  const double fraction = (static_cast<double>(trailing[id % 4] >> 16) + 0.5) * 0x1p-48;
  const double uniform =
      std::fmin((static_cast<double>(cell) + fraction) / 65536, LARGEST_UNIFORM);
  return -std::log(-std::log1p(-uniform));
}

double mass_of(const std::vector<Candidate>& candidates) {
  double mass = 0;
  for (const Candidate& one : candidates) mass += std::exp(static_cast<double>(one.weight));
  return mass;
}

// What top-k, top-p and min-p leave. total: the mass of the whole vocabulary, the best's being 1
void filter(std::vector<Candidate>& candidates, double total, const SamplerRow& row) {
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.entry < b.entry);
  });
  if (row.top_k > 0) {
    if (static_cast<size_t>(row.top_k) < candidates.size()) {
      candidates.resize(static_cast<size_t>(row.top_k));
    }
    total = mass_of(candidates);
  }
  if (row.top_p < 1) {
    size_t kept = 0;
    for (double held = 0; kept < candidates.size() && (kept == 0 || held < row.top_p * total);) {
      held += std::exp(static_cast<double>(candidates[kept++].weight));
    }
    candidates.resize(kept);
  }
  size_t kept = candidates.size();
  while (kept > 1 && candidates[kept - 1].weight < row.min_weight) --kept;
  candidates.resize(kept);
}

HeadGuess coupled(const Weights& weights, const int64_t* target_ids, const SamplerRow& row) {
  const SamplerLoops& loops = sampler_loops();
  thread_local Near near;
  thread_local std::vector<Candidate> candidates;
  thread_local std::vector<double> scores;
  if (weights.num_tokens > MOST_CANDIDATES) {
    top_k_cut(loops, weights, MOST_CANDIDATES, near);
  } else {
    find_near(loops, weights, -HUGE_VALF, near);
  }
  candidates.clear();
  for (size_t i = 0; i < static_cast<size_t>(near.size); ++i) {
    candidates.push_back({near.ids[i], near.weights[i]});
  }
  if (row.top_k > 0 || row.top_p < 1 || row.min_weight > -HUGE_VALF) {
    const double total = row.top_p < 1 ? 0x1p-40 * static_cast<double>(loops.mass(
        weights.logits, weights.num_tokens, weights.best, weights.temperature)) : 0;
    filter(candidates, total, row);
  }
  const NoiseStream stream{{row.seed[0], row.seed[1]}, row.position, row.purpose};
  scores.clear();
  size_t best = 0;
  for (const Candidate& one : candidates) {
    const double own = static_cast<double>(one.weight) * static_cast<double>(row.sharpness);
    scores.push_back(own + noise_of(stream, target_ids[one.entry]));
    if (scores.back() > scores[best]) best = scores.size() - 1;
  }
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - scores[best]);
  return {candidates[best].entry, 1 / sum};
}

}  // namespace

HeadGuess guess(const float* logits, int64_t num_entries, const int64_t* target_ids,
                const SamplerRow& row) {
  const SamplerLoops& loops = sampler_loops();
  const BestLogit best = loops.best(logits, num_entries);
  if (best.has_nan || !std::isfinite(best.value)) return {-1, 0};
  if (row.temperature == 0) {
    const int64_t mass = loops.mass(logits, num_entries, best.value, 1.0f);
    return {best.token_id, 0x1p40 / static_cast<double>(mass)};
  }
  return coupled({logits, num_entries, best.value, row.temperature}, target_ids, row);
}

}  // namespace specserve
