// Prompt lookup: specserve_drafts/ngram.py's index, where the rule is written down. Per sequence its
// text, and for every run of 1 to 3 tokens what followed it last.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "suffix_index.h"

namespace specserve {

class SuffixLookup {
 public:
  // The guesses of a row all stand behind each other; scores and parents are left alone.
  void guess(const SuffixAsk* asks, int64_t num_asks, const SuffixGuesses& out);
  void forget(int64_t seq_id) { texts_.erase(seq_id); }

 private:
  static constexpr int32_t kRuns = 3;  // lengths
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<int32_t> table;  // index of the token after a run, -1: free; at most half full
    size_t num_indexed = 0;      // ends 1 .. num_indexed are in
    size_t num_used = 0;
    void index_all();
    int64_t find() const;  // of the token that followed the longest known suffix, -1: none

   private:
    size_t slot_of(size_t end, int32_t run) const;
    void put(size_t end, int32_t run);
    void grow();
    std::vector<uint8_t> runs;  // of each slot: the length of its run
  };
  std::unordered_map<int64_t, Text> texts_;
};

}  // namespace specserve
