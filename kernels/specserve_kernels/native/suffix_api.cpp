// What other languages call of the suffix drafter and of prompt lookup. Arguments are checked by
// the caller (native_suffix.py).
#include "suffix_index.h"
#include "suffix_lookup.h"

#define SPECSERVE_EXPORT __attribute__((visibility("default")))

using namespace specserve;

namespace {

// num_asks times: seq_id, K, width, number of tokens, the tokens.
class Asks {
 public:
  Asks(const int64_t* packed, int64_t num_asks) {
    const int64_t* from = packed;
    for (int64_t idx = 0; idx < num_asks; ++idx) from += 4 + from[3];
    tokens_.reserve(size_t(from - packed));  // pointers into it stay good
    from = packed;
    for (int64_t idx = 0; idx < num_asks; ++idx) {
      const int64_t count = from[3];
      asks_.push_back({from[0], tokens_.data() + tokens_.size(), int32_t(count), int32_t(from[1]),
                       int32_t(from[2])});
      tokens_.insert(tokens_.end(), from + 4, from + 4 + count);
      from += 4 + count;
    }
  }
  const SuffixAsk* data() const { return asks_.data(); }

 private:
  std::vector<int32_t> tokens_;
  std::vector<SuffixAsk> asks_;
};

}  // namespace

extern "C" {

SPECSERVE_EXPORT SuffixIndex* specserve_suffix_new(int64_t corpus_tokens) {
  return new SuffixIndex(corpus_tokens);
}
SPECSERVE_EXPORT void specserve_suffix_delete(SuffixIndex* index) { delete index; }

SPECSERVE_EXPORT void specserve_suffix_add(SuffixIndex* index, int64_t seq_id, const char* salt,
                                           int64_t salt_len, int64_t num_prompt,
                                           const int32_t* prediction, int64_t num_prediction) {
  index->add(seq_id, salt, salt_len, num_prompt, prediction, num_prediction);
}
SPECSERVE_EXPORT void specserve_suffix_forget(SuffixIndex* index, int64_t seq_id) {
  index->forget(seq_id);
}
SPECSERVE_EXPORT void specserve_suffix_read_output(SuffixIndex* index, const char* salt,
                                                   int64_t salt_len, const int32_t* tokens,
                                                   int64_t count) {
  index->read_output(salt, salt_len, tokens, count);
}
SPECSERVE_EXPORT void specserve_suffix_guess(SuffixIndex* index, const int64_t* asks,
                                             int64_t num_asks, const SuffixGuesses* out) {
  index->guess(Asks(asks, num_asks).data(), num_asks, *out);
}
SPECSERVE_EXPORT int64_t specserve_suffix_num_corpus_tokens(const SuffixIndex* index) {
  return index->num_corpus_tokens();
}

SPECSERVE_EXPORT SuffixLookup* specserve_lookup_new() { return new SuffixLookup(); }
SPECSERVE_EXPORT void specserve_lookup_delete(SuffixLookup* lookup) { delete lookup; }
SPECSERVE_EXPORT void specserve_lookup_forget(SuffixLookup* lookup, int64_t seq_id) {
  lookup->forget(seq_id);
}
SPECSERVE_EXPORT void specserve_lookup_guess(SuffixLookup* lookup, const int64_t* asks,
                                             int64_t num_asks, const SuffixGuesses* out) {
  lookup->guess(Asks(asks, num_asks).data(), num_asks, *out);
}

}  // extern "C"
