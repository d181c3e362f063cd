// Scalar references of the kernels, for tests. Each computes the same result as its kernel with plain loops: in double
// precision, or to the bit if the kernel's arithmetic is exact.
#pragma once
#include "../../agent/kernels/common/kernel_table.h"
#include "../../agent/kernels/ops/experts.h"

namespace llmk {
namespace reference {

// Element `index` of an array of `dtype`. Storing rounds once.
static inline float load_any(DType dtype, const void* x, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(x)[index];
  if (dtype == DType::kFloat16) return to_float(static_cast<const half_t*>(x)[index]);
  return to_float(static_cast<const bfloat_t*>(x)[index]);
}
static inline void store_any(DType dtype, double value, void* out, int64_t index) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::kFloat32) static_cast<float*>(out)[index] = rounded;
  if (dtype == DType::kFloat16) from_float(rounded, static_cast<half_t*>(out) + index);
  if (dtype == DType::kBFloat16) from_float(rounded, static_cast<bfloat_t*>(out) + index);
}

void rms_norm(const RmsNormArgs& args);
void swiglu(const SwigluArgs& args);
void silu(const SiluArgs& args);
void rotary(const RotaryArgs& args);
void matmul(const MatMulArgs& args);
void route_tokens(const RoutingArgs& args);
void rotary_attention(const RotaryAttentionArgs& args);

// Exact, as the kernels: every addition rounds to float32.
void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count);

// Exact. `x` has the weight's depth.
void quantize_row(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const PackedWeightHeader& header);

// Exact for integer formats. `rows` are the quantized activations if the format uses them.
void linear(const LinearArgs& args, const QuantizedRows& rows);

}  // namespace reference
}  // namespace llmk
