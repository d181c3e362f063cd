// A mixture of experts: selects the experts of each token, and groups tokens by expert so that a step reads each
// expert's weights once. The numbers of a token depend only on its own row. Grouping moves rows, and the sum of a row
// runs over its experts in the order of their rank. Therefore other tokens of the step cannot change a result.
//
//   probabilities  softmax of the logits over all experts, in float32
//   choice         the `chosen` largest, the first of equal ones; `normalised`: divided by their sum
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

// Sorts the choices of all rows by expert (stable counting sort). place[i] receives the new place of choice i, which is
// row * chosen + rank. starts[e] [experts + 1] receives the place of the first choice of expert e.
void group_by_expert(const int32_t* ids, int64_t choices, int64_t experts, int64_t* starts, int64_t* place);

}  // namespace llmk
