// A mixture of experts: chooses the experts of each token, and groups tokens by expert, so that a step reads each
// expert's weights once. The result of a token depends only on its own row. Grouping only changes the order of the
// rows. The outputs of a token's experts are added in the order of their probability, the largest first.
//
//   probabilities  softmax of the logits over all experts, in float32
//   ids            the `chosen` experts with the largest probabilities, the smaller id on a tie
//   weights        their probabilities; if `normalised`, divided by the sum of these probabilities
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

// Sorts the choices of all rows by expert, in a stable order. A choice is an expert that a row uses: choice number row
// * chosen + i is the row's expert with the i-th largest probability.
//
// Writes each choice's position in the sorted order to place [choices]. Writes the position of each expert's first
// choice to starts [experts + 1], and the number of choices to its last element.
void group_by_expert(const int32_t* ids, int64_t choices, int64_t experts, int64_t* starts, int64_t* place);

}  // namespace llmk
