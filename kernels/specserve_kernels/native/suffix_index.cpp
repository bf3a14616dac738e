#include "suffix_index.h"

#include <algorithm>

namespace specserve {

namespace {

constexpr double kHopeless = 0.03;
constexpr int32_t kLongest = 12;
enum Source : int32_t { kText, kPrediction, kPast };
constexpr double kPrior[3][2] = {{0.35, 0.8}, {0.7, 0.9}, {0.2, 0.7}};
constexpr double kPriorWeight = 8.0;
constexpr double kForgetAt = 512;
constexpr int32_t kSeparator = -1;

}  // namespace

int32_t SuffixExperience::kind(int32_t source, int32_t match_len, Followers seen) {
  const int32_t length = std::min(match_len, kLongest);
  const int32_t share = int32_t(4 * seen.of_token / (seen.of_any + 1));
  const int32_t kind = ((source * (kLongest + 1) + length) * 4 + share) * 2 + (seen.of_any > 3);
  if (tried_[kind] == 0) {
    const double of_match =
        kPrior[source][0] + (kPrior[source][1] - kPrior[source][0]) * length / kLongest;
    tried_[kind] = kPriorWeight;
    right_[kind] = kPriorWeight * of_match *
                   (0.5 + 0.5 * double(seen.of_token) / double(seen.of_any));
  }
  return kind;
}

void SuffixExperience::learn(int32_t kind, bool right) {
  tried_[kind] += 1;
  right_[kind] += right;
  if (tried_[kind] > kForgetAt) {
    tried_[kind] /= 2;
    right_[kind] /= 2;
  }
}

SuffixCorpora::Corpus* SuffixCorpora::touch(const std::string& salt) {
  const auto found = by_salt_.find(salt);
  if (found == by_salt_.end()) return nullptr;
  used_.splice(used_.begin(), used_, found->second);
  return &*found->second;
}

const std::vector<SharedText>& SuffixCorpora::texts(const std::string& salt) {
  static const std::vector<SharedText> none;
  const Corpus* corpus = touch(salt);
  return corpus ? corpus->texts : none;
}

void SuffixCorpora::add(const std::string& salt, const int32_t* tokens, int64_t count) {
  if (count == 0 || max_tokens_ <= 0) return;
  Corpus* corpus = touch(salt);
  if (!corpus) {
    used_.push_front({salt, {std::make_shared<SuffixAutomaton>()}});
    by_salt_[salt] = used_.begin();
    corpus = &used_.front();
  }
  std::vector<SharedText>& texts = corpus->texts;
  const int64_t half = max_tokens_ / 2;
  if (texts.back()->num_tokens() + count > half && texts.back()->num_tokens()) {
    if (texts.size() == 2) {
      num_tokens_ -= texts[0]->num_tokens();
      texts.erase(texts.begin());
    }
    texts.push_back(std::make_shared<SuffixAutomaton>());
  }
  SuffixAutomaton& newest = *texts.back();
  const int64_t before = newest.num_tokens();
  newest.extend(&kSeparator, 1);
  newest.extend(tokens, size_t(std::min(count, half)));
  num_tokens_ += newest.num_tokens() - before;
  while (used_.size() > 1 && num_tokens_ > max_tokens_) {
    for (const SharedText& text : used_.back().texts) num_tokens_ -= text->num_tokens();
    by_salt_.erase(used_.back().salt);
    used_.pop_back();
  }
}

void SuffixIndex::Draft::clear() {
  tokens.clear();
  parents.clear();
  kinds.clear();
  scores.clear();
  expected = 0;
}

void SuffixIndex::Draft::add(int32_t token, int32_t parent, int32_t kind, double rate) {
  tokens.push_back(token);
  parents.push_back(parent);
  kinds.push_back(kind);
  scores.push_back(rate);
}

void SuffixIndex::add(int64_t seq_id, const char* salt, int64_t salt_len, int64_t num_prompt,
                      const int32_t* prediction, int64_t num_prediction) {
  Sequence seq;
  seq.salt.assign(salt, size_t(salt_len));
  seq.num_prompt = num_prompt;
  if (num_prediction) {
    Place place{std::make_shared<SuffixAutomaton>(), kPrediction, {}};
    place.text->extend(&kSeparator, 1);
    place.text->extend(prediction, size_t(num_prediction));
    follow(place, &kSeparator, 1);  // the output is expected to begin as the prediction does
    seq.places.push_back(std::move(place));
  }
  sequences_[seq_id] = std::move(seq);
}

void SuffixIndex::read_output(const char* salt, int64_t salt_len, const int32_t* tokens,
                              int64_t count) {
  corpora_.add(std::string(salt, size_t(salt_len)), tokens, count);
}

void SuffixIndex::guess(const SuffixAsk* asks, int64_t num_asks, const SuffixGuesses& out) {
  int64_t at = 0;
  for (int64_t row = 0; row < num_asks; ++row) {
    const SuffixAsk& ask = asks[row];
    Sequence& seq = sequences_.at(ask.seq_id);
    learn(seq.guessed, ask.tokens, ask.num_tokens);
    if (ask.num_tokens) extend(seq, ask.tokens, ask.num_tokens);
    best_draft(seq, ask, seq.guessed);
    const Draft& best = seq.guessed;
    const size_t count = best.tokens.size();
    std::copy(best.tokens.begin(), best.tokens.end(), out.tokens + at);
    std::copy(best.parents.begin(), best.parents.end(), out.parents + at);
    std::copy(best.scores.begin(), best.scores.end(), out.scores + at);
    out.counts[row] = int32_t(count);
    at += int64_t(count);
  }
}

void SuffixIndex::extend(Sequence& seq, const int32_t* tokens, int64_t count) {
  seq.text.extend(tokens, size_t(count));
  const int64_t skipped = std::min(count, std::max<int64_t>(0, seq.num_prompt - seq.num_known));
  seq.num_known += count;
  refresh(seq);
  for (Place& place : seq.places) {
    if (place.source == kPrediction) {
      follow(place, tokens + skipped, count - skipped);
      continue;
    }
    const int64_t recent = std::min<int64_t>(count, kLongest);
    if (count > kLongest) place.at = {};  // what is skipped breaks the match
    follow(place, tokens + count - recent, recent);
  }
}

void SuffixIndex::refresh(Sequence& seq) {
  std::vector<Place> kept;
  for (const Place& place : seq.places)
    if (place.source == kPrediction) kept.push_back(place);
  for (const SharedText& text : corpora_.texts(seq.salt)) {
    const auto known = std::find_if(seq.places.begin(), seq.places.end(),
                                    [&](const Place& place) { return place.text == text; });
    kept.push_back(known == seq.places.end() ? Place{text, kPast, {}} : *known);
  }
  seq.places.swap(kept);
}

void SuffixIndex::follow(Place& place, const int32_t* tokens, int64_t count) {
  Match at = place.text->settled(place.at);
  for (int64_t idx = 0; idx < count; ++idx) at = place.text->step(at, tokens[idx]);
  place.at = at;
}

// Walks what was emitted through what was guessed, whoever's guesses were verified.
void SuffixIndex::learn(const Draft& guessed, const int32_t* emitted, int64_t count) {
  int32_t node = -1;
  int64_t depth = 0;
  for (size_t idx = 0; idx < guessed.tokens.size() && depth < count; ++idx) {
    if (guessed.parents[idx] != node) continue;
    const bool right = guessed.tokens[idx] == emitted[depth];
    experience_.learn(guessed.kinds[idx], right);
    if (right) {
      node = int32_t(idx);
      ++depth;
    }
  }
}

// Of its own text, and of other texts that match longer.
void SuffixIndex::best_draft(const Sequence& seq, const SuffixAsk& ask, Draft& best) {
  bool found = false;
  best_.clear();
  const auto consider = [&](const Context& context) {
    if (ask.width == 1)
      chain(context, ask.max_tokens, draft_);
    else
      tree(context, ask.max_tokens, ask.width, draft_);
    if (!found || draft_.expected > best_.expected) std::swap(best_, draft_);
    found = true;
  };
  const Match own = seq.text.match();
  if (own.length) consider({&seq.text, kText, own});
  for (const Place& place : seq.places)
    if (place.at.length > (place.source == kPrediction ? 0 : std::max(own.length, 1)))
      consider({place.text.get(), place.source, place.at});
  std::swap(best, best_);
}

void SuffixIndex::chain(const Context& context, int32_t max_tokens, Draft& out) {
  const SuffixAutomaton& text = *context.text;
  out.clear();
  Match at = context.at;
  double survival = 1.0;
  while (int32_t(out.tokens.size()) < max_tokens) {
    at = text.expecting(at);
    if (at.state == kRoot) break;
    const int32_t token = text.best(at.state);
    const int32_t kind = experience_.kind(context.source, at.length, text.share(at.state, token));
    const double rate = experience_.rate(kind);
    survival *= rate;
    if (survival < kHopeless) break;
    out.add(token, int32_t(out.tokens.size()) - 1, kind, rate);
    out.expected += survival;
    at = {text.target(at.state, token), at.length + 1};
  }
}

bool SuffixIndex::is_worse(const Candidate& a, const Candidate& b) {
  return a.survival != b.survival ? a.survival < b.survival : a.order > b.order;
}

// Best first: the guesses most likely to survive, at most `width` children each.
void SuffixIndex::tree(const Context& context, int32_t max_tokens, int32_t width, Draft& out) {
  out.clear();
  frontier_.clear();
  num_candidates_ = 0;
  offer(context, width, -1, 1.0, context.at);
  while (!frontier_.empty() && int32_t(out.tokens.size()) < max_tokens) {
    std::pop_heap(frontier_.begin(), frontier_.end(), is_worse);
    const Candidate likeliest = frontier_.back();
    frontier_.pop_back();
    out.add(likeliest.token, likeliest.parent, likeliest.kind, likeliest.rate);
    out.expected += likeliest.survival;
    offer(context, width, int32_t(out.tokens.size()) - 1, likeliest.survival, likeliest.at);
  }
}

void SuffixIndex::offer(const Context& context, int32_t width, int32_t parent, double survival,
                        Match at) {
  const SuffixAutomaton& text = *context.text;
  at = text.expecting(at);
  if (at.state == kRoot) return;
  text.likeliest(at.state, text.best(at.state), width, children_);
  for (const int32_t token : children_) {
    const int32_t kind = experience_.kind(context.source, at.length, text.share(at.state, token));
    const double rate = experience_.rate(kind);
    if (survival * rate < kHopeless) continue;
    const Match next{text.target(at.state, token), at.length + 1};
    frontier_.push_back({survival * rate, num_candidates_++, parent, token, kind, rate, next});
    std::push_heap(frontier_.begin(), frontier_.end(), is_worse);
  }
}

}  // namespace specserve
