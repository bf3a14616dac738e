// The race: argmax over tokens of weight + Gumbel noise, without the noise of tokens that cannot
// win. Equal to specserve.noise.race, and that to argmax(weights + gumbel).
//
// A token's uniform has 64 bits; the leading 16 name its cell, which bounds its noise on both sides.
// The bar is the largest lower bound met so far: who cannot reach it is out. Outside cell 0 the
// noise is at most 11.1, so by weight alone most are out; only cell 0, one token in 65,536, has the
// long tail up to 45. Trailing bits are computed for those that are still in at the end.
#include <cmath>
#include <cstring>
#include <vector>

#include "sampler.h"

namespace specserve {
namespace {

constexpr int NUM_CELLS = 1 << 16;
constexpr double LARGEST_UNIFORM = 1.0 - 0x1p-53, SMALLEST_UNIFORM = 0x1p-65;
constexpr float ROUNDING = 1e-3f;  // generous: float32 bounds of size <= 46 where they matter

double gumbel_of(double uniform) { return -std::log(-std::log1p(-uniform)); }

// [NUM_CELLS + 1]: cell c has noise from bound c + 1 up to bound c.
const std::vector<float>& cell_bounds() {
  static const std::vector<float> bounds = [] {
    std::vector<float> made;
    for (int cell = 0; cell <= NUM_CELLS; ++cell) {
      const double uniform = static_cast<double>(cell) / NUM_CELLS;
      made.push_back(static_cast<float>(
          gumbel_of(std::fmin(std::fmax(uniform, SMALLEST_UNIFORM), LARGEST_UNIFORM))));
    }
    return made;
  }();
  return bounds;
}

struct Runner {
  int64_t id;
  float weight, highest;
  uint16_t cell;
};

// What a race knows so far.
class Field {
 public:
  Field(const Weights& weights, const Cut& cut, float sharpness, int64_t best_id, uint16_t best_cell)
      : bounds_(cell_bounds().data()), weights_(weights), cut_(cut), sharpness_(sharpness) {
    runners_.clear();
    lowest_logit_ = weights.logit_at(cut.weight);
    (void)best_id;
    raise(bounds_[best_cell + 1] - ROUNDING);
  }

  const RaceLimits& limits() const { return limits_; }

  void enter(int64_t id, uint16_t cell) {
    const float plain = weights_.at(id);
    if (!cut_.keeps(id, plain)) return;
    const float weight = plain * sharpness_;
    const float highest = weight + bounds_[cell];
    if (!(highest >= bar_)) return;
    runners_.push_back({id, weight, highest, cell});
    const float lowest = weight + bounds_[cell + 1] - ROUNDING;
    if (lowest > bar_) raise(lowest);
  }

  int64_t winner(const NoiseStream& stream) const {
    const Runner* alone = nullptr;
    int num_in = 0;
    for (const Runner& runner : runners_) {
      if (runner.highest < bar_) continue;
      ++num_in;
      alone = &runner;
    }
    if (num_in == 1) return alone->id;
    int64_t winner = -1;
    double best = -HUGE_VAL;
    for (const Runner& runner : runners_) {  // by rising id: the first of equals wins
      if (runner.highest < bar_) continue;
      uint64_t words[4];
      philox_block(stream, 1, static_cast<uint64_t>(runner.id / 4), words);
      const uint64_t trailing = words[runner.id % 4] >> 16;
      const double fraction = (static_cast<double>(trailing) + 0.5) * 0x1p-48;
      const double uniform = std::fmin((runner.cell + fraction) / NUM_CELLS, LARGEST_UNIFORM);
      const double score = static_cast<double>(runner.weight) + gumbel_of(uniform);
      if (winner < 0 || score > best) {
        winner = runner.id;
        best = score;
      }
    }
    return winner;
  }

 private:
  void raise(float bar) {
    bar_ = bar;
    limits_.far = std::fmax(lowest_logit_, logit_behind(bar - bounds_[0]));
    limits_.near = std::fmax(lowest_logit_, logit_behind(bar - bounds_[1]));
    // A token of the best weight needs a cell up to here. +1: for the rounding of this formula.
    const double uniform = -std::expm1(-std::exp(-static_cast<double>(bar)));
    limits_.last_cell = static_cast<uint16_t>(std::fmin(uniform * NUM_CELLS + 1, NUM_CELLS - 1));
  }

  // Below this logit no sharpened weight is >= weight.
  float logit_behind(float weight) const {
    return weights_.logit_at((weight - ROUNDING) / static_cast<double>(sharpness_));
  }

  const float* bounds_;
  const Weights& weights_;
  const Cut& cut_;
  float sharpness_, lowest_logit_, bar_;
  RaceLimits limits_;
  static thread_local std::vector<Runner> runners_;
};

thread_local std::vector<Runner> Field::runners_;

void enter_found(Field& field, int64_t first_id, const uint16_t* cells, const uint64_t found[2]) {
  for (int half = 0; half < 2; ++half) {
    for (uint64_t bits = found[half]; bits; bits &= bits - 1) {
      const int place = 64 * half + __builtin_ctzll(bits);
      field.enter(first_id + place, cells[place]);
    }
  }
}

}  // namespace

int64_t race(const SamplerLoops& loops, const Weights& weights, const Cut& cut, float sharpness,
             int64_t best_id, const NoiseStream& stream) {
  uint64_t words[4], found[2];
  philox_block(stream, 0, static_cast<uint64_t>(best_id / 16), words);
  const auto cell = static_cast<uint16_t>(words[best_id % 16 / 4] >> (16 * (best_id % 4)));
  Field field(weights, cut, sharpness, best_id, cell);

  uint16_t cells[GROUP];
  const int64_t num_groups = weights.num_tokens / GROUP, rest = weights.num_tokens % GROUP;
  for (int64_t group = 0;; ++group) {
    group = loops.next_group(stream, weights.logits, group, num_groups, field.limits(), cells, found);
    if (group == num_groups) break;
    enter_found(field, group * GROUP, cells, found);
  }
  if (rest > 0) {  // a full group of which the absent tokens are masked
    float padded[GROUP];
    for (int i = 0; i < GROUP; ++i) padded[i] = -HUGE_VALF;
    memcpy(padded, weights.logits + num_groups * GROUP, static_cast<size_t>(rest) * sizeof(float));
    const float* as_last = padded - num_groups * GROUP;
    if (loops.next_group(stream, as_last, num_groups, num_groups + 1, field.limits(), cells,
                         found) == num_groups) {
      enter_found(field, num_groups * GROUP, cells, found);
    }
  }
  return field.winner(stream);
}

}  // namespace specserve
