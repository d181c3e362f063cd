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

// Writes the `count` tokens with the largest logits to `best`, largest first, or fewer if fewer have a finite logit.
// Searches a band of logits below the largest, and doubles the band until it holds enough tokens, which usually takes
// one or two passes. Then sorts them.
void best_tokens(const float* row, int64_t size, float top, int64_t count, ScratchVector<Candidate>* best);

// A prefix of the ranking: its number of tokens and their mass.
struct Prefix {
  int64_t count;
  double mass;
};

// Ranks a whole row. Divides the tokens into bins by logit, and stores the mass of each bin. To find where a running
// mass or count crosses a limit, it sorts only the bin that contains this place. Masses are added in double: first
// whole bins (each in the order of its ids), then the tokens of the sorted bin.
class RankedRow {
 public:
  RankedRow(const float* row, int64_t size, float top);

  Prefix all() const { return {count_, mass_}; }
  Prefix best(int64_t count);                    // returns the first `count` tokens
  // returns the shortest prefix with at least this mass; at least one token
  Prefix reaching(double mass);
  Prefix at_least(float weight);                 // returns the tokens with at least this weight; at least one token
  int32_t token_at(double mass, Prefix within);  // returns the first token at which the running mass exceeds `mass`

 private:
  static constexpr int kBins = 512;

  struct Ranked {
    int32_t id;
    float logit, weight;
  };

  const ScratchVector<Ranked>& sorted(int bin);

  // Walks the ranking. Takes whole bins while keep(prefix before the bin, bin) is true, then single tokens of the next
  // bin while keep_token(prefix, weight) is true.
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
