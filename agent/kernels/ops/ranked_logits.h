// Ranks a row of logits by probability, and sorts only the parts that are used.
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

// Returns the best `count` tokens in order, or fewer if fewer have a finite logit. Searches a band of logits below the
// largest, and doubles the band until it holds enough tokens, which usually takes one or two passes. Then sorts them.
void best_tokens(const float* row, int64_t size, float top, int64_t count, ScratchVector<Candidate>* best);

// A prefix of the ranking: its number of tokens and their mass.
struct Prefix {
  int64_t count;
  double mass;
};

// Divides a whole row into bins of logits with their masses. To find the place where a running mass or count crosses a
// limit, it sorts a single bin. The mass runs over the bins (each added up in the order of its ids), then along the
// sorted bin, in double.
class RankedRow {
 public:
  RankedRow(const float* row, int64_t size, float top);

  Prefix all() const { return {count_, mass_}; }
  Prefix best(int64_t count);                    // the first `count` tokens
  Prefix reaching(double mass);                  // the fewest tokens with at least this mass; at least one
  Prefix at_least(float weight);                 // the tokens with at least this weight; at least one
  int32_t token_at(double mass, Prefix within);  // the first token at which the running mass exceeds `mass`

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
