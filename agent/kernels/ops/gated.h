// The activations of gated linear layers. Each activation computes one float32 number from two: the gate, and a second
// factor `up`.
//
//   kSilu         gate * sigmoid(gate) * up                                   SwiGLU (Shazeer 2020)
//   kGelu         gate * sigmoid(1.5957691 * (gate + 0.044715 gate^3)) * up   GeGLU, in the form that uses tanh:
//                 0.5 * (1 + tanh(x)) = sigmoid(2x), and 1.5957691 = 2 * sqrt(2 / pi)
//   kClampedSilu  g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up clamped to -7 to 7   (gpt-oss)
//
// If an input is NaN, the result is NaN.
#pragma once
#include "swiglu.h"

namespace llmk {

enum class Gate : int32_t { kNone = 0, kSilu = 1, kGelu = 2, kClampedSilu = 3 };

constexpr int32_t kNumGates = 4;
constexpr float kGeluSlope = 1.5957691216057308f, kGeluCube = 0.044715f;
constexpr float kClampedSlope = 1.702f, kClampedLimit = 7.0f;

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

LLMK_INLINE Vec gelu_lanes(Vec x) {
  const Vec bent = mul(add(x, mul(mul(mul(x, x), x), broadcast(kGeluCube))), broadcast(kGeluSlope));
  return mul(x, sigmoid(bent));
}

// Computes kClampedSilu for 16 elements. If one argument of minimum() or maximum() is NaN, the result is the second
// argument. So the number to clamp is passed as the second argument, and a NaN stays a NaN.
LLMK_INLINE Vec clamped_silu_lanes(Vec gate, Vec up) {
  const Vec limit = broadcast(kClampedLimit), g = minimum(limit, gate);
  const Vec u = maximum(broadcast(-kClampedLimit), minimum(limit, up));
  return mul(mul(g, sigmoid(mul(g, broadcast(kClampedSlope)))), add(u, broadcast(1.0f)));
}

LLMK_INLINE Vec gated_lanes(Gate kind, Vec gate, Vec up) {
  if (kind == Gate::kGelu) return mul(gelu_lanes(gate), up);
  return kind == Gate::kClampedSilu ? clamped_silu_lanes(gate, up) : swiglu_lanes(gate, up);
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
