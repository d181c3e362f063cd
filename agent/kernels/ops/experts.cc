// Chooses experts by a softmax over all experts, and groups tokens by expert (experts.h). The functions are plain loops
// without vector instructions, because their time is negligible compared to the experts' matrix products.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace llmk {
namespace {

// Returns the index of the largest value whose index is not in `taken`. On a tie, returns the first index. NaN counts
// as smaller than any number. If only NaN is left, returns the first index that is not in `taken`.
int64_t best_left(const float* values, int64_t count, const int32_t* taken, int64_t num_taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (std::find(taken, taken + num_taken, static_cast<int32_t>(i)) != taken + num_taken) continue;
    if (best < 0 || values[i] > values[best]) best = i;
  }
  return best;
}

void route_row(const RoutingArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.experts;
  int32_t* ids = args.ids + row * args.chosen;
  float* weights = args.weights + row * args.chosen;
  const float top = *std::max_element(logits, logits + args.experts);
  float mass = 0;
  for (int64_t i = 0; i < args.experts; ++i) mass += std::exp(logits[i] - top);
  float sum = 0;
  for (int64_t rank = 0; rank < args.chosen; ++rank) {
    ids[rank] = static_cast<int32_t>(best_left(logits, args.experts, ids, rank));
    weights[rank] = std::exp(logits[ids[rank]] - top) / mass;
    sum += weights[rank];
  }
  for (int64_t rank = 0; args.normalised && rank < args.chosen; ++rank) weights[rank] /= sum;
}

}  // namespace

void route_tokens(const RoutingArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) route_row(args, row);
}

void group_by_expert(const int32_t* ids, int64_t choices, int64_t experts, int64_t* starts, int64_t* place) {
  std::fill(starts, starts + experts + 1, 0);
  for (int64_t i = 0; i < choices; ++i) ++starts[ids[i] + 1];
  std::partial_sum(starts, starts + experts + 1, starts);
  for (int64_t i = 0; i < choices; ++i) place[i] = starts[ids[i]]++;
  std::copy_backward(starts, starts + experts, starts + experts + 1);
  starts[0] = 0;
}

}  // namespace llmk
