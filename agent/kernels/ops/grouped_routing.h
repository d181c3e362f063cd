// DeepSeek's routers: choose experts within the best groups of experts. All numbers are float32.
//
//   score    of an expert: softmax of the logits over all experts (V2), or sigmoid of the expert's logit (V3)
//   ranking  of an expert: score + correction
//   groups   the experts form `groups` groups of equal size; the ranking of a group is the largest ranking of its
//            experts, or with `corrected` the sum of the two largest; the `chosen_groups` groups with the largest
//            rankings are chosen
//   ids      the `chosen` experts with the largest rankings in these groups
//   weights  the scores of these experts; if `normalised`, divided by (the sum of these scores + 1e-20); then times
//            `factor`
//
// On a tie, the first group or expert is chosen. The results of a row depend only on that row.
#pragma once
#include <cstdint>

namespace llmk {

struct GroupedRoutingArgs {
  const float* logits;      // [rows, experts]
  const float* correction;  // [experts]
  int32_t* ids;             // [rows, chosen], the best ranking first
  float* weights;           // [rows, chosen]
  int64_t rows, experts, chosen, groups, chosen_groups;
  float factor;
  bool sigmoid, corrected, normalised;
};

void route_to_groups(const GroupedRoutingArgs& args);

// Writes the softmax of `count` logits to `scores`. Subtracts the largest logit, and adds in the order of the logits.
void softmax_row(const float* logits, int64_t count, float* scores);

}  // namespace llmk
