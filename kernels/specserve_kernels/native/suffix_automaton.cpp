#include "suffix_automaton.h"

#include <algorithm>

namespace specserve {

namespace {

constexpr int32_t kMany = 8;  // edges from which a state is looked up by hash
constexpr size_t kFirstTable = 64;

size_t hash_of(int32_t state, int32_t token) {
  uint64_t x = (uint64_t(uint32_t(state)) << 32) | uint32_t(token);
  x *= 0x9E3779B97F4A7C15ull;
  return size_t(x ^ (x >> 29));
}

}  // namespace

SuffixAutomaton::SuffixAutomaton() { new_state(-1, 0, -1); }

void SuffixAutomaton::extend(const int32_t* tokens, size_t count_of_tokens) {
  for (size_t at = 0; at < count_of_tokens; ++at) {
    count(tokens[at]);
    append(tokens[at]);
  }
}

Match SuffixAutomaton::step(Match at, int32_t token) const {
  while (true) {
    const int32_t edge = find(at.state, token);
    if (edge >= 0) return {edges_[edge].target, at.length + 1};
    if (at.state == kRoot) return {};
    at.state = states_[at.state].link;
    at.length = states_[at.state].length;
  }
}

Match SuffixAutomaton::settled(Match at) const {
  while (at.state != kRoot && at.length <= states_[states_[at.state].link].length)
    at.state = states_[at.state].link;
  return at;
}

Match SuffixAutomaton::expecting(Match at) const {
  while (at.state != kRoot && states_[at.state].best < 0) {
    at.state = states_[at.state].link;
    at.length = states_[at.state].length;
  }
  return at.state == kRoot ? Match{} : at;
}

Followers SuffixAutomaton::share(int32_t state, int32_t token) const {
  const State& from = states_[state];
  return {1 + edges_[find(state, token)].num_extra, from.num_edges + from.num_extra};
}

void SuffixAutomaton::likeliest(int32_t state, int32_t first, int32_t width,
                                std::vector<int32_t>& out) const {
  std::vector<const Edge*> others;
  for (int32_t edge = states_[state].first_edge; edge >= 0; edge = edges_[edge].next)
    if (edges_[edge].token != first && edges_[edge].token != -1) others.push_back(&edges_[edge]);
  std::stable_sort(others.begin(), others.end(),
                   [](const Edge* a, const Edge* b) { return a->num_extra > b->num_extra; });
  out.assign(1, first);
  for (size_t at = 0; at < others.size() && out.size() < size_t(width); ++at)
    out.push_back(others[at]->token);
}

int32_t SuffixAutomaton::find(int32_t state, int32_t token) const {
  const State& from = states_[state];
  if (from.num_edges > kMany) return find_hashed(state, token);
  for (int32_t edge = from.first_edge; edge >= 0; edge = edges_[edge].next)
    if (edges_[edge].token == token) return edge;
  return -1;
}

int32_t SuffixAutomaton::find_hashed(int32_t state, int32_t token) const {
  const size_t mask = table_.size() - 1;
  for (size_t at = hash_of(state, token) & mask; table_[at].state >= 0; at = (at + 1) & mask)
    if (table_[at].state == state && edges_[table_[at].edge].token == token)
      return table_[at].edge;
  return -1;
}

int32_t SuffixAutomaton::new_state(int32_t link, int32_t length, int32_t best) {
  states_.push_back({link, length, best, 0, -1, -1, 0});
  return int32_t(states_.size()) - 1;
}

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t target, int32_t num_extra) {
  const int32_t edge = int32_t(edges_.size());
  edges_.push_back({token, target, num_extra, -1});
  State& from = states_[state];
  if (from.last_edge < 0)
    from.first_edge = edge;
  else
    edges_[from.last_edge].next = edge;
  from.last_edge = edge;
  ++from.num_edges;
  if (from.num_edges == kMany + 1) {
    for (int32_t known = from.first_edge; known >= 0; known = edges_[known].next)
      put_hashed(state, known);
  } else if (from.num_edges > kMany) {
    put_hashed(state, edge);
  }
}

void SuffixAutomaton::put_hashed(int32_t state, int32_t edge) {
  if (2 * (num_hashed_ + 1) > table_.size()) grow_table();
  const size_t mask = table_.size() - 1;
  size_t at = hash_of(state, edges_[edge].token) & mask;
  while (table_[at].state >= 0) at = (at + 1) & mask;
  table_[at] = {state, edge};
  ++num_hashed_;
}

void SuffixAutomaton::grow_table() {
  std::vector<Slot> old(std::max(kFirstTable, 2 * table_.size()));
  old.swap(table_);
  num_hashed_ = 0;
  for (const Slot& slot : old)
    if (slot.state >= 0) put_hashed(slot.state, slot.edge);
}

// Counts the token in its longest known context, and moves the text's own match on.
void SuffixAutomaton::count(int32_t token) {
  Match at = match_;
  int32_t edge;
  while ((edge = find(at.state, token)) < 0) {
    if (at.state == kRoot) {
      match_ = {};
      return;
    }
    at.state = states_[at.state].link;
    at.length = states_[at.state].length;
  }
  if (at.state != kRoot) {
    State& context = states_[at.state];
    ++context.num_extra;
    const int32_t seen = ++edges_[edge].num_extra;
    if (context.best != token) {
      const int32_t rival = find(at.state, context.best);
      if (seen >= (rival < 0 ? 0 : edges_[rival].num_extra)) context.best = token;
    }
  }
  match_ = {edges_[edge].target, at.length + 1};
}

void SuffixAutomaton::append(int32_t token) {
  const int32_t made = new_state(kRoot, states_[last_].length + 1, -1);
  int32_t state = last_;
  last_ = made;
  int32_t edge = -1;
  while (state >= 0 && (edge = find(state, token)) < 0) {
    add_edge(state, token, made, 0);
    // Nothing was ever repeated here: expect the latest.
    if (states_[state].num_extra == 0) states_[state].best = token;
    state = states_[state].link;
  }
  if (state < 0) return;
  const int32_t old = edges_[edge].target;
  const bool is_next = states_[old].length == states_[state].length + 1;
  const int32_t link = is_next ? old : split(state, token, old);
  states_[made].link = link;
}

// Part of `old`'s runs now ends elsewhere, too: that part gets a state of its own.
int32_t SuffixAutomaton::split(int32_t state, int32_t token, int32_t old) {
  const int32_t clone = new_state(states_[old].link, states_[state].length + 1, states_[old].best);
  for (int32_t edge = states_[old].first_edge; edge >= 0; edge = edges_[edge].next) {
    const Edge copied = edges_[edge];
    add_edge(clone, copied.token, copied.target, copied.num_extra);
  }
  states_[clone].num_extra = states_[old].num_extra;
  states_[old].link = clone;
  if (match_.state == old && match_.length <= states_[clone].length) match_.state = clone;
  for (int32_t edge; state >= 0; state = states_[state].link) {
    edge = find(state, token);
    if (edge < 0 || edges_[edge].target != old) break;
    edges_[edge].target = clone;
  }
  return clone;
}

}  // namespace specserve
