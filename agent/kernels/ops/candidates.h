// Samples from candidates. The candidates of a row are the tokens with its largest logits, which a device has already
// found. So the sampler does not have to read all logits of the row.
#pragma once
#include <cstdint>

#include "sampler.h"

namespace llmk {

// The values that a device computes from each row of logits. If `parts` agents share the vocabulary, part p has the
// `part_size` tokens from token p * part_size on. `ids` are counted from the first token of the part. The first axis of
// an array is the part.
struct CandidateArgs {
  const float* values;       // [parts, part_rows, count]: the largest raw logits of the part; equal logits in any order
  const int64_t* ids;        // [parts, part_rows, count]: the ids of the tokens with these logits
  const float* sums;         // [parts, part_rows]: the sum of e^(x - largest x) over all logits x of the part
  const float* scaled_sums;  // like `sums`, but all x are divided by the temperature of the row
  const float* best_values;  // [rows]: raw logits of the tokens SampleArgs::best_ids; NaN if the row has a NaN
  int64_t count;             // number of candidates of a row in each part; 0: there are no candidates
  int64_t parts, part_rows, part_size;
};

// Samples each row whose token the candidates determine. The token is the same as with `sample`. Sets undecided[i] to 1
// if row i needs all of its logits, otherwise to 0. Reads SampleArgs::best_ids, but not SampleArgs::logits.
//
// The candidates determine a token if it does not depend on the logits of the tokens that are not candidates. The rank
// of a candidate is certain if its logit is larger than the smallest candidate's logit. Top-p and the draw compare
// running sums of probabilities with limits. The limits depend on the device's sum over the whole row, whose rounding
// error is bounded by kMassError. If a running sum is closer to a limit than this error, the row is undecided.
//
// Returns 0. If an argument is invalid, samples nothing, writes one line to standard error and returns an error code of
// common/check.h.
int sample_candidates(const SampleArgs& args, const CandidateArgs& candidates, int32_t* undecided);

}  // namespace llmk
