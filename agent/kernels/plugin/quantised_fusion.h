// The fused functions around a matrix product (fusion.h). The chains that they replace:
//
//   [RmsNorm, AddRmsNorm or Swiglu,] DynamicQuantExt [, QuantBatchMatmul [, Swiglu]]
//   a product with a kept weight: MatMul, QuantBatchMatmul or WeightQuantBatchMatmul, and Swiglu
//
// Rows are quantised right after they are computed, while they are in the processor's cache. The product reads these
// rows from the memory of the fused function. With Swiglu, the product computes it from its sums, and its own result is
// never written.
#pragma once
#include "recording.h"

namespace llmk {

// The arguments of the primitives in these chains. A product has its output after its inputs, and `x` at index 0.
enum QuantArgument { kQuantX, kSmoothScales, kQuantY, kQuantScale, kQuantCount };
enum ProductArgument { kProductX, kProductWeight };
constexpr size_t kProductRowScales = 5;  // QuantBatchMatmul: the argument with the scales of the rows

static inline bool is(const Launch& launch, const char* op) { return std::strcmp(launch.op, op) == 0; }

// Runs the launches of a fusion one after the other, without fusing them. A fused function calls this if it does not
// support the sizes of the step.
int run_apart(Launch* const* parts, int count);

// Each of these functions runs a fusion whose first launch its name states. `quantise` begins with DynamicQuantExt,
// `product` with a product.
int run_norm_quantise(Launch* const* parts, const Fusion& fusion);
int run_swiglu_quantise(Launch* const* parts, const Fusion& fusion);
int run_quantise(Launch* const* parts, const Fusion& fusion);
int run_product(Launch* const* parts, const Fusion& fusion);

}  // namespace llmk
