// Samples from the best tokens of each row, which a device has found, instead of the whole row.
#pragma once
#include <cstdint>

#include "sampler.h"

namespace llmk {

// The results that a device computes from the logits of each row. If `parts` agents share the vocabulary, part p has
// `part_size` tokens from token p * part_size on, and its ids begin at 0. Every array has the parts one after another.
struct CandidateArgs {
  const float* values;       // [parts, part_rows, count]: the largest raw logits of the part; equal ones in any order
  const int64_t* ids;        // [parts, part_rows, count]: their tokens
  const float* sums;         // [parts, part_rows]: the sum over the part of e^(x - largest x of the part)
  const float* scaled_sums;  // the same with all x divided by the temperature of the row
  const float* best_values;  // [rows]: the raw logit of SampleArgs::best_ids
  int64_t count;             // number of candidates of a row in each part; 0: there are no candidates
  int64_t parts, part_rows, part_size;
};

// Samples the rows for which the candidates are enough, with the tokens that `sample` would choose. Sets undecided[i]
// to 1 if row i needs its whole logits, otherwise to 0. SampleArgs::logits is not read, best_ids must be there.
//
// The candidates are enough if the token does not depend on the other tokens of the row. That is certain for tokens
// above the smallest candidate. The mass of the whole row is the device's sum, whose rounding error is bounded by
// kMassError. If a boundary of top-p or of the draw is closer than that error, the row is undecided.
//
// Returns 0, or an error code of common/check.h after one line on standard error. Nothing is written on error.
int sample_candidates(const SampleArgs& args, const CandidateArgs& candidates, int32_t* undecided);

}  // namespace llmk
