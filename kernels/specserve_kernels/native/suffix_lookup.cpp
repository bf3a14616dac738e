#include "suffix_lookup.h"

#include <algorithm>

namespace specserve {

namespace {

constexpr size_t kFirstTable = 256;

uint64_t hash_of(const int32_t* run, int32_t length) {
  uint64_t x = uint64_t(length);
  for (int32_t at = 0; at < length; ++at)
    x = (x ^ uint32_t(run[at])) * 0x9E3779B97F4A7C15ull;
  return x ^ (x >> 29);
}

}  // namespace

void SuffixLookup::guess(const SuffixAsk* asks, int64_t num_asks, const SuffixGuesses& out) {
  int32_t* to = out.tokens;
  for (int64_t row = 0; row < num_asks; ++row) {
    const SuffixAsk& ask = asks[row];
    Text& text = texts_[ask.seq_id];
    text.tokens.insert(text.tokens.end(), ask.tokens, ask.tokens + ask.num_tokens);
    text.index_all();
    const int64_t at = text.find();
    out.counts[row] = at < 0 ? 0 : ask.max_tokens;
    if (at < 0) continue;
    // Where the earlier run reaches into the suffix, the text repeats: go on repeating it.
    const int64_t period = int64_t(text.tokens.size()) - at;
    for (int32_t idx = 0; idx < ask.max_tokens; ++idx)
      to[idx] = idx < period ? text.tokens[size_t(at + idx)] : to[idx - period];
    to += ask.max_tokens;
  }
}

// Indexes every run that has a token after it; the suffix itself does not, yet.
void SuffixLookup::Text::index_all() {
  for (size_t end = num_indexed + 1; end < tokens.size(); ++end)
    for (int32_t run = 1; run <= kRuns && size_t(run) <= end; ++run) put(end, run);
  if (!tokens.empty()) num_indexed = std::max(num_indexed, tokens.size() - 1);
}

int64_t SuffixLookup::Text::find() const {
  if (table.empty()) return -1;
  for (int32_t run = kRuns; run >= 1; --run) {
    if (size_t(run) > tokens.size()) continue;
    const int32_t at = table[slot_of(tokens.size(), run)];
    if (at >= 0) return at;
  }
  return -1;
}

// Where the run that ends before `end` stands, or would.
size_t SuffixLookup::Text::slot_of(size_t end, int32_t run) const {
  const int32_t* wanted = tokens.data() + end - size_t(run);
  const size_t mask = table.size() - 1;
  size_t at = size_t(hash_of(wanted, run)) & mask;
  for (; table[at] >= 0; at = (at + 1) & mask)
    if (runs[at] == run && std::equal(wanted, wanted + run, tokens.data() + table[at] - run)) break;
  return at;
}

void SuffixLookup::Text::put(size_t end, int32_t run) {
  if (2 * (num_used + 1) > table.size()) grow();
  const size_t at = slot_of(end, run);
  num_used += table[at] < 0;
  table[at] = int32_t(end);
  runs[at] = uint8_t(run);
}

void SuffixLookup::Text::grow() {
  std::vector<int32_t> old(std::max(kFirstTable, 2 * table.size()), -1);
  std::vector<uint8_t> old_runs(old.size());
  old.swap(table);
  old_runs.swap(runs);
  for (size_t slot = 0; slot < old.size(); ++slot) {
    if (old[slot] < 0) continue;
    const size_t at = slot_of(size_t(old[slot]), old_runs[slot]);
    table[at] = old[slot];
    runs[at] = old_runs[slot];
  }
}

}  // namespace specserve
