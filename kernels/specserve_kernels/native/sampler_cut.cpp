// Where top-k, top-p and min-p cut a row: found among the tokens near the best one, by selection
// and not by sorting. The oracle is pipeline.process_row.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "sampler.h"

namespace specserve {
namespace {

constexpr float NO_WEIGHT = -std::numeric_limits<float>::infinity();
constexpr int64_t ALL_IDS = std::numeric_limits<int64_t>::max();
constexpr Cut KEEPS_ALL{NO_WEIGHT, ALL_IDS};

// Distances below the best weight within which to look, each if the one before held too little.
constexpr float MARGINS[] = {4, 8, 16, 32, std::numeric_limits<float>::infinity()};

// The id of the count-th token of exactly this weight; ids ascend.
int64_t id_among_equals(const Near& near, float weight, int64_t count) {
  for (int64_t i = 0;; ++i) {
    if (near.weights[i] == weight && --count == 0) return near.ids[i];
  }
}

struct Item {
  float weight;
  int64_t amount;
};

// As best_amount, over items [begin, end) alone: quickselect, three ways.
Cut best_of_items(const Near& near, std::vector<Item>& items, int64_t enough) {
  auto begin = items.begin(), end = items.end();
  for (;;) {
    const float a = begin->weight, b = begin[(end - begin) / 2].weight, c = (end - 1)->weight;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto above = std::partition(begin, end, [&](const Item& i) { return i.weight > pivot; });
    const auto equal = std::partition(above, end, [&](const Item& i) { return i.weight == pivot; });
    int64_t amount_above = 0;
    for (auto i = begin; i != above; ++i) amount_above += i->amount;
    if (amount_above >= enough) {
      end = above;
      continue;
    }
    const int64_t of_one = above->amount, of_equals = of_one * (equal - above);
    if (amount_above + of_equals >= enough) {
      const int64_t count = (enough - amount_above + of_one - 1) / of_one;
      return {pivot, id_among_equals(near, pivot, count)};
    }
    enough -= amount_above + of_equals;
    begin = equal;
  }
}

// The cut that keeps the fewest best tokens whose amounts make up `enough`, 1 .. the sum of all.
// amount(i) >= 0 of the i-th token, equal for equal weights: 1 for top-k, the mass for top-p.
//
// Amounts are added up in bins of similar weights first; only the bin that the cut is in is looked
// at token by token. No branch depends on a token before that: guessing wrong costs 10 ns each.
template <class Amount>
Cut best_amount(const Near& near, int64_t enough, Amount amount) {
  constexpr int NUM_BINS = 1024;
  constexpr float BINS_PER_NAT = 32;
  const auto bin_of = [&](int64_t i) {
    return static_cast<int>(std::min(near.weights[i] * -BINS_PER_NAT, NUM_BINS - 1.0f));
  };
  int64_t bins[NUM_BINS] = {};
  for (int64_t i = 0; i < near.size; ++i) bins[bin_of(i)] += amount(i);
  int bin = 0;
  while (bins[bin] < enough) enough -= bins[bin++];
  thread_local std::vector<Item> items;
  items.clear();
  for (int64_t i = 0; i < near.size; ++i) {
    if (bin_of(i) == bin) items.push_back({near.weights[i], amount(i)});
  }
  return best_of_items(near, items, enough);
}

// masses [near.size]; returns their sum
int64_t masses_of(const SamplerLoops& loops, const Near& near, std::vector<int64_t>& masses) {
  masses.resize(static_cast<size_t>(near.size));
  loops.masses(near.weights.data(), near.size, masses.data());
  int64_t sum = 0;
  for (const int64_t mass : masses) sum += mass;
  return sum;
}

void keep(const Cut& cut, Near& near) {
  int64_t num_kept = 0;
  for (int64_t i = 0; i < near.size; ++i) {
    near.ids[num_kept] = near.ids[i];
    near.weights[num_kept] = near.weights[i];
    num_kept += cut.keeps(near.ids[i], near.weights[i]);
  }
  near.size = num_kept;
}

// The nucleus of what `cut` leaves; `near` holds just that if the cut cuts at all.
Cut top_p_cut(const SamplerLoops& loops, const Weights& weights, double top_p, const Cut& cut,
              Near& near) {
  thread_local std::vector<int64_t> masses;
  const bool restricted = cut.weight != NO_WEIGHT;
  const int64_t total =
      restricted ? masses_of(loops, near, masses)
                 : loops.mass(weights.logits, weights.num_tokens, weights.best, weights.temperature);
  const double wanted = std::ceil(top_p * static_cast<double>(total));
  // Rounding may have made it more than there is; and even a top_p of 0 keeps one token.
  const int64_t enough = wanted >= static_cast<double>(total)
                             ? total
                             : std::max<int64_t>(1, static_cast<int64_t>(wanted));
  if (!restricted) {
    for (const float margin : MARGINS) {
      find_near(loops, weights, -margin, near);
      if (masses_of(loops, near, masses) >= enough) break;
    }
  }
  return best_amount(near, enough, [](int64_t i) { return masses[i]; });
}

}  // namespace

float Weights::logit_at(double weight) const {
  // Room for the rounding of float32 weights, the denormal ones included.
  const double exact = best + temperature * (weight - std::fabs(weight) * 1e-5) - 1e-37;
  if (exact <= -FLT_MAX) return -FLT_MAX;
  const float rounded = static_cast<float>(exact);
  return rounded > exact ? std::nextafter(rounded, -FLT_MAX) : rounded;
}

void find_near(const SamplerLoops& loops, const Weights& weights, float lowest, Near& near) {
  const auto room = static_cast<size_t>(weights.num_tokens) + 16;
  if (near.ids.size() < room) {
    near.ids.resize(room);
    near.weights.resize(room);
  }
  near.size =
      loops.near(weights.logits, weights.num_tokens, weights.best, weights.temperature,
                 weights.logit_at(lowest), lowest, near.ids.data(), near.weights.data());
}

Cut top_k_cut(const SamplerLoops& loops, const Weights& weights, int64_t top_k, Near& near) {
  if (top_k >= weights.num_tokens) return KEEPS_ALL;
  for (const float margin : MARGINS) {
    find_near(loops, weights, -margin, near);
    if (near.size >= top_k) break;
  }
  if (near.size < top_k) return KEEPS_ALL;  // the others are masked
  const Cut cut = best_amount(near, top_k, [](int64_t) { return int64_t{1}; });
  keep(cut, near);
  return cut;
}

Cut find_cut(const SamplerLoops& loops, const Weights& weights, int32_t top_k, double top_p,
             float min_weight) {
  thread_local Near near;
  Cut cut = KEEPS_ALL;
  if (top_k > 0) cut = top_k_cut(loops, weights, top_k, near);
  if (top_p < 1) cut = top_p_cut(loops, weights, top_p, cut, near);
  if (min_weight > cut.weight) cut = {min_weight, ALL_IDS};
  return cut;
}

}  // namespace specserve
