// A row of logits from the most probable token down, sorted only where somebody looks.
//
// Rank: the larger logit first, the smaller id on a tie. A token's weight is e^(logit - largest); tokens of weight 0
// (and NaN) have no rank.
#pragma once
#include <cstdint>

#include "../common/scratch_vector.h"

namespace llmk {

struct Candidate {
  float logit;
  int32_t id;
};

// The best `count` tokens in order; fewer when fewer have a finite logit. One pass over the row per doubling of the
// band below the largest logit that has to be searched, usually one or two, then a partial sort of what was found.
void best_tokens(const float* row, int64_t size, float top, int64_t count, ScratchVector<Candidate>* best);

// A prefix of the ranking by its number of tokens and their mass.
struct Prefix {
  int64_t count;
  double mass;
};

// The whole row in bins of logits, each with its mass. Finding where a running mass or count crosses a limit sorts one
// bin. Mass runs over bins (each added up in an order of its ids), then along the sorted bin, all in double.
class RankedRow {
 public:
  RankedRow(const float* row, int64_t size, float top);

  Prefix all() const { return {count_, mass_}; }
  Prefix best(int64_t count);                    // the first `count`
  Prefix reaching(double mass);                  // the fewest whose mass is at least that; at least one
  Prefix at_least(float weight);                 // those of at least that weight; at least one
  int32_t token_at(double mass, Prefix within);  // the first token at which the running mass exceeds `mass`

 private:
  static constexpr int kBins = 512;

  struct Ranked {
    int32_t id;
    float logit, weight;
  };

  const ScratchVector<Ranked>& sorted(int bin);

  // Walks the ranking while `keep(prefix before the bin, bin)` takes whole bins, then token by token in the next bin
  // while `keep_token(prefix, weight)` does.
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
