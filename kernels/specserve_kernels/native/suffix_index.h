// What the suffix drafter knows and guesses: specserve_drafts/suffix_guesses.py to the last bit,
// where the rules are written down. Own texts, predictions, past outputs by salt, and how often
// guesses of a kind were right. One writer: the thread that runs steps.
#pragma once
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "suffix_automaton.h"

namespace specserve {

struct SuffixAsk {
  int64_t seq_id;
  const int32_t* tokens;  // [num_tokens] of its text, behind what it is known to have
  int32_t num_tokens;
  int32_t max_tokens;     // K
  int32_t width;          // most children of a guess; 1: a chain
};

// Row by row, one behind the other: [sum of counts], room for every row's K. Python's ctypes
// structure mirrors it field by field.
struct SuffixGuesses {
  int32_t* counts;   // [rows]
  int32_t* tokens;
  int32_t* parents;  // -1: the last known token
  double* scores;
};

class SuffixExperience {
 public:
  int32_t kind(int32_t source, int32_t match_len, Followers seen);
  double rate(int32_t kind) const { return right_[kind] / tried_[kind]; }
  void learn(int32_t kind, bool right);

 private:
  static constexpr int32_t kKinds = 3 * 13 * 4 * 2;
  double right_[kKinds] = {}, tried_[kKinds] = {};
};

using SharedText = std::shared_ptr<SuffixAutomaton>;

// Past outputs of all salts, the salt used last in front.
class SuffixCorpora {
 public:
  explicit SuffixCorpora(int64_t max_tokens) : max_tokens_(max_tokens) {}
  int64_t num_tokens() const { return num_tokens_; }
  const std::vector<SharedText>& texts(const std::string& salt);
  void add(const std::string& salt, const int32_t* tokens, int64_t count);

 private:
  struct Corpus {
    std::string salt;
    std::vector<SharedText> texts;  // two at most, the newer one last
  };
  Corpus* touch(const std::string& salt);

  int64_t max_tokens_, num_tokens_ = 0;
  std::list<Corpus> used_;
  std::unordered_map<std::string, std::list<Corpus>::iterator> by_salt_;
};

class SuffixIndex {
 public:
  explicit SuffixIndex(int64_t corpus_tokens) : corpora_(corpus_tokens) {}
  void add(int64_t seq_id, const char* salt, int64_t salt_len, int64_t num_prompt,
           const int32_t* prediction, int64_t num_prediction);
  void forget(int64_t seq_id) { sequences_.erase(seq_id); }
  void read_output(const char* salt, int64_t salt_len, const int32_t* tokens, int64_t count);
  void guess(const SuffixAsk* asks, int64_t num_asks, const SuffixGuesses& out);
  int64_t num_corpus_tokens() const { return corpora_.num_tokens(); }

 private:
  struct Place {
    SharedText text;
    int32_t source;
    Match at;
  };
  struct Draft {
    std::vector<int32_t> tokens, parents, kinds;
    std::vector<double> scores;
    double expected = 0;
    void clear();
    void add(int32_t token, int32_t parent, int32_t kind, double rate);
  };
  struct Sequence {
    std::string salt;
    int64_t num_prompt = 0, num_known = 0;
    SuffixAutomaton text;
    std::vector<Place> places;
    Draft guessed;
  };
  struct Context {
    const SuffixAutomaton* text;
    int32_t source;
    Match at;
  };
  struct Candidate {
    double survival;
    int32_t order, parent, token, kind;
    double rate;
    Match at;
  };

  void extend(Sequence& seq, const int32_t* tokens, int64_t count);
  void refresh(Sequence& seq);
  void follow(Place& place, const int32_t* tokens, int64_t count);
  void learn(const Draft& guessed, const int32_t* emitted, int64_t count);
  void best_draft(const Sequence& seq, const SuffixAsk& ask, Draft& best);
  void chain(const Context& context, int32_t max_tokens, Draft& out);
  void tree(const Context& context, int32_t max_tokens, int32_t width, Draft& out);
  static bool is_worse(const Candidate& a, const Candidate& b);
  void offer(const Context& context, int32_t width, int32_t parent, double survival, Match at);

  SuffixCorpora corpora_;
  SuffixExperience experience_;
  std::unordered_map<int64_t, Sequence> sequences_;
  Draft draft_, best_;  // scratch
  std::vector<Candidate> frontier_;
  std::vector<int32_t> children_;
  int32_t num_candidates_ = 0;
};

}  // namespace specserve
