// DeepSeek's routers: choose experts within the best groups of experts. All numbers are float32.
//
//   scores   softmax of the logits over all experts (V2), or the sigmoid of each logit (V3)
//   ranking  score + correction
//   groups   `groups` groups of equal size; a group's rank is its largest ranking, or with `corrected` the sum of its
//            two largest rankings; the `chosen_groups` best groups are chosen
//   choice   the `chosen` experts of these groups with the largest ranking
//   weights  the scores of the choice; `normalised`: divided by (their sum + 1e-20); then times `factor`
//
// The first of equal groups, and of equal experts, is chosen. The numbers of a row depend only on that row.
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

}  // namespace llmk
