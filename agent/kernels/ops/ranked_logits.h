// Ranks the tokens of a row of logits by probability. Sorts only those parts of the ranking that the sampler needs.
//
// The larger logit ranks first, the smaller id on a tie. A token's weight is e^(logit - largest). Tokens with weight 0
// or NaN have no rank.
#pragma once
#include <cstdint>

#include "../common/scratch_vector.h"

namespace llmk {

struct Candidate {
  float logit;
  int32_t id;
};

// Writes the `count` tokens with the largest logits to `best`, largest first. Writes fewer tokens if the row has fewer
// finite logits.
//
// Collects the tokens in a band of logits below the largest logit, and doubles the width of the band until it has
// enough tokens. This usually takes one or two passes. Then sorts these tokens.
void best_tokens(const float* row, int64_t size, float top, int64_t count, ScratchVector<Candidate>* best);

// A prefix of the ranking: the number of its tokens, and their mass, which is the sum of their weights.
struct Prefix {
  int64_t count;
  double mass;
};

// Ranks a whole row. Divides the tokens into bins by logit, and stores the mass of each bin: the sum of the weights of
// its tokens. To find where a sum of masses (or a count of tokens) crosses a limit, sorts only the bin in which this
// happens.
//
// Masses are added in double. The masses of whole bins are added first; the mass of a bin is the sum in the order of
// the token ids. Then the tokens of the sorted bin are added in the order of their rank.
class RankedRow {
 public:
  RankedRow(const float* row, int64_t size, float top);

  Prefix all() const { return {count_, mass_}; }
  Prefix best(int64_t count);                    // returns the `count` best tokens
  // Returns the shortest prefix whose mass is at least `mass`, but at least one token.
  Prefix reaching(double mass);
  Prefix at_least(float weight);                 // returns the tokens with at least this weight; at least one token
  int32_t token_at(double mass, Prefix within);  // returns the first token whose running mass exceeds `mass`

 private:
  static constexpr int kBins = 512;

  struct Ranked {
    int32_t id;
    float logit, weight;
  };

  const ScratchVector<Ranked>& sorted(int bin);

  // Returns a prefix of the ranking. Adds whole bins to the prefix while keep_bin(prefix so far, bin) is true. Then
  // adds single tokens of the next bin while keep_token(prefix so far, weight) is true.
  template <class KeepBin, class KeepToken>
  Prefix walk(const KeepBin& keep_bin, const KeepToken& keep_token);

  const float* row_;
  int64_t size_, count_ = 0;
  float top_;
  double mass_ = 0;
  int64_t counts_[kBins];
  double masses_[kBins];
  int sorted_bin_ = -1;
};

}  // namespace llmk
