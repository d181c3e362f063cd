// The rules of the sampler for one row. The file sampler.cc defines these functions, explains the sampler's steps and
// applies the rules to whole rows of logits. The file candidates.cc applies the same rules to the best tokens of a row.
#pragma once
#include <limits>

#include "../common/scratch_vector.h"
#include "ranked_logits.h"
#include "sampler.h"

namespace llmk {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kFewTokens = 4096;  // maximum top_k for which the sampler sorts the best tokens directly

// Returns a random number that depends only on the arguments. It is at least 0 and below 1.
double uniform(uint64_t seed, int32_t position);

bool is_skipped(const SampleArgs& args, int64_t row);
bool has_penalties(const SampleArgs& args, int64_t row);

// Returns true if candidates.cc implements every filter of the row. Then candidates.cc may choose the row's token from
// the candidates, without the other logits.
bool candidates_have_filters(const SampleArgs& args, int64_t row);

// Returns the allowed tokens of a row as bits, or null if all tokens are allowed.
const uint32_t* mask_of(const SampleArgs& args, int64_t row);

inline bool is_allowed(const uint32_t* mask, int32_t id) {
  return mask == nullptr || (mask[id / 32] >> (id % 32) & 1u) != 0;
}

// Returns 0. If the parameters, the history or the mask are invalid, writes one line to standard error and returns an
// error code.
int check_row(const SampleArgs& args, int64_t row);

// Returns the logit after the penalties, for a token of the history that occurs `count` times in the output.
float penalized_logit(const SampleArgs& args, int64_t row, float logit, int32_t count);

// Draws one of the `count` best tokens of a row, after the filters top-k, top-p and min-p. `best` has these tokens in
// sorted order, with logits divided by the temperature. So each filter keeps a prefix of `best`.
int32_t draw_of_sorted(const SampleArgs& args, int64_t row, const Candidate* best, size_t count, double u,
                       ScratchVector<float>* buffer);

// These functions write results of a row. Call skip_row() for a row that does not sample. The function report_top()
// writes the best tokens. The function publish() writes the sampled token with its raw logit.
void skip_row(const SampleArgs& args, int64_t row);
void report_top(const SampleArgs& args, int64_t row, const Candidate* best, size_t count);
void publish(const SampleArgs& args, int64_t row, int32_t id, float logit);

// Writes the results of a row whose logits cannot be used. Sets the row's element of last_tokens to 0, because the next
// step may have been sent already and uses this token as input. No client sees the result of that step.
void publish_not_finite(const SampleArgs& args, int64_t row);

}  // namespace llmk
