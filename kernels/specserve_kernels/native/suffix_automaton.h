// A suffix automaton with counts: specserve_drafts/suffix_automaton.py to the last count, where the
// idea is written down. One array of states, one of edges; a state's edges are a list in the order
// they came in, and only a state with many of them is looked up by hash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace specserve {

constexpr int32_t kRoot = 0;  // the empty context

struct Followers {
  int64_t of_token;  // times this token was counted after a state
  int64_t of_any;    // times any was
};

// Where a text stands in an automaton: the longest suffix that is known.
struct Match {
  int32_t state = kRoot;
  int32_t length = 0;
};

class SuffixAutomaton {
 public:
  SuffixAutomaton();

  void extend(const int32_t* tokens, size_t count);

  // The longest suffix of the text that stood in it before.
  Match match() const { return match_; }
  int64_t num_tokens() const { return states_[last_].length; }

  // Where a match goes when `token` follows it.
  Match step(Match at, int32_t token) const;
  // The same match, once the text has grown and its states may have been split.
  Match settled(Match at) const;
  // The longest context, from `at` on, that knows what to expect; its state is kRoot if none does.
  Match expecting(Match at) const;

  // Most often seen after a state, the latest among equals; -1: none, or the end of a text.
  int32_t best(int32_t state) const { return states_[state].best; }
  // `token` must have followed `state`.
  Followers share(int32_t state, int32_t token) const;
  int32_t target(int32_t state, int32_t token) const { return edges_[find(state, token)].target; }
  // `first` and then the most frequent others, `width` at most, no separators (-1).
  void likeliest(int32_t state, int32_t first, int32_t width, std::vector<int32_t>& out) const;

 private:
  struct State {
    int32_t link, length, best;
    int32_t num_extra;  // occurrences of its tokens beyond the first of each
    int32_t first_edge, last_edge, num_edges;
  };
  struct Edge {
    int32_t token, target;
    int32_t num_extra;
    int32_t next;
  };

  int32_t find(int32_t state, int32_t token) const;  // edge, -1: none
  int32_t find_hashed(int32_t state, int32_t token) const;
  int32_t new_state(int32_t link, int32_t length, int32_t best);
  void add_edge(int32_t state, int32_t token, int32_t target, int32_t num_extra);
  void put_hashed(int32_t state, int32_t edge);
  void grow_table();
  void count(int32_t token);
  void append(int32_t token);
  int32_t split(int32_t state, int32_t token, int32_t old);

  std::vector<State> states_;
  std::vector<Edge> edges_;
  struct Slot {
    int32_t state = -1, edge = -1;
  };
  std::vector<Slot> table_;  // of states with many edges; a power of two, at most half full
  size_t num_hashed_ = 0;
  int32_t last_ = kRoot;
  Match match_;
};

}  // namespace specserve
