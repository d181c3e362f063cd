// Chooses experts within the best groups of experts, as DeepSeek's routers do (grouped_routing.h). The functions are
// plain loops without vector instructions, because their time is negligible compared to the experts' matrix products.
#include "grouped_routing.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace llmk {
namespace {

// Returns the index of the largest value whose entry in `taken` is false, the first index on a tie. NaN counts as
// smaller than any number. If all remaining values are NaN, returns the first index that is not taken.
int64_t best_left(const std::vector<float>& values, const std::vector<bool>& taken) {
  int64_t best = -1;
  for (size_t i = 0; i < values.size(); ++i) {
    if (taken[i]) continue;
    if (best < 0 || values[i] > values[static_cast<size_t>(best)]) best = static_cast<int64_t>(i);
  }
  return best;
}

void score_row(const GroupedRoutingArgs& args, const float* logits, float* scores) {
  if (!args.sigmoid) return softmax_row(logits, args.experts, scores);
  for (int64_t i = 0; i < args.experts; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
}

float group_rank(const float* rankings, int64_t size, bool corrected) {
  float best = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    if (rankings[i] > best) {
      second = best;
      best = rankings[i];
    } else if (rankings[i] > second) {
      second = rankings[i];
    }
  }
  return corrected ? best + second : best;
}

void route_row(const GroupedRoutingArgs& args, int64_t row) {
  const auto experts = static_cast<size_t>(args.experts), size = experts / static_cast<size_t>(args.groups);
  std::vector<float> scores(experts), rankings(experts), ranks(static_cast<size_t>(args.groups));
  score_row(args, args.logits + row * args.experts, scores.data());
  for (size_t i = 0; i < experts; ++i) rankings[i] = scores[i] + args.correction[i];
  for (size_t group = 0; group < ranks.size(); ++group) {
    ranks[group] = group_rank(rankings.data() + group * size, static_cast<int64_t>(size), args.corrected);
  }
  std::vector<bool> taken_groups(ranks.size()), taken(experts, true);
  for (int64_t i = 0; i < args.chosen_groups; ++i) {
    const auto group = static_cast<size_t>(best_left(ranks, taken_groups));
    taken_groups[group] = true;
    std::fill_n(taken.begin() + static_cast<int64_t>(group * size), size, false);
  }
  int32_t* ids = args.ids + row * args.chosen;
  float* weights = args.weights + row * args.chosen;
  float sum = 0;
  for (int64_t rank = 0; rank < args.chosen; ++rank) {
    const int64_t best = best_left(rankings, taken);
    taken[static_cast<size_t>(best)] = true;
    ids[rank] = static_cast<int32_t>(best);
    weights[rank] = scores[static_cast<size_t>(best)];
    sum += weights[rank];
  }
  for (int64_t rank = 0; rank < args.chosen; ++rank) {
    if (args.normalised) weights[rank] /= sum + 1e-20f;
    weights[rank] *= args.factor;
  }
}

}  // namespace

void softmax_row(const float* logits, int64_t count, float* scores) {
  const float top = *std::max_element(logits, logits + count);
  float mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = std::exp(logits[i] - top);
    mass += scores[i];
  }
  for (int64_t i = 0; i < count; ++i) scores[i] /= mass;
}

void route_to_groups(const GroupedRoutingArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) route_row(args, row);
}

}  // namespace llmk
