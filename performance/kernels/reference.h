// Scalar references of linear layers and attention, for tests. A reference computes the result of a kernel with plain
// loops. For int8 and int4 weights it gives the same bits as the kernel. Otherwise it computes in double precision.
// Kernels without a scalar reference are compared with NumPy in the tests.
#pragma once
#include "../../agent/kernels/common/kernel_table.h"

namespace llmk::reference {

// Stores `value` as element `index` of the array `out` of type `dtype`.
static inline void store_any(DType dtype, double value, void* out, int64_t index) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::kFloat32) static_cast<float*>(out)[index] = rounded;
  if (dtype == DType::kFloat16) from_float(rounded, static_cast<half_t*>(out) + index);
  if (dtype == DType::kBFloat16) from_float(rounded, static_cast<bfloat_t*>(out) + index);
}

void rotary_attention(const RotaryAttentionArgs& args);

// Quantizes a row `x` of header.depth elements into row `row` of `rows`, with the same bits as the kernel.
void quantize_row(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const PackedWeightHeader& header);

// Computes a linear layer. For weights of int8 and int4, the result has the same bits as the kernel's result. The
// function reads `rows`, the quantized activations, only for these formats.
void linear(const LinearArgs& args, const QuantizedRows& rows);

}  // namespace llmk::reference
