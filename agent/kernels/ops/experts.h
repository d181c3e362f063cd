// A mixture of experts: which experts a token goes to, and tokens grouped by expert so that each expert's weights are
// read once a step. Every number of a token comes from its own row in an order of its own, so what shares the step
// cannot change it: the grouping moves rows, and a row's sum runs over its experts in the order of their rank.
//
//   probabilities  softmax of the logits over all experts, in float32
//   choice         the `chosen` largest, of equals the first; `normalised`: divided by their sum
#pragma once
#include <cstdint>

namespace llmk {

struct RoutingArgs {
  const float* logits;  // [rows, experts]
  int32_t* ids;         // [rows, chosen], the most probable first
  float* weights;       // [rows, chosen]
  int64_t rows, experts, chosen;
  bool normalised;
};

void route_tokens(const RoutingArgs& args);

// Stable counting sort of the choices by expert: place[i] is where choice i (row * chosen + rank) goes,
// starts[experts + 1] where each expert's rows begin.
void group_by_expert(const int32_t* ids, int64_t choices, int64_t experts, int64_t* starts, int64_t* place);

namespace reference {

void route_tokens(const RoutingArgs& args);

}  // namespace reference
}  // namespace llmk
