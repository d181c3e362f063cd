// The function pointers to the kernels of one instruction set, in four parts. Each part is compiled alone
// (arch/part.h). kernel_table.h joins the parts of a set to a table.
#pragma once
#include "types.h"
#include "../ops/logits.h"

namespace llmk {

enum class WeightFormat : int32_t;
struct GatedDeltaArgs;
struct LinearArgs;
struct MatMulArgs;
struct QuantizedRows;
struct RmsNormArgs;
struct RotaryArgs;
struct RotaryAttentionArgs;
struct ShrinkJob;
struct ShrinkPart;
struct ShrinkTile;
struct SigmoidGateArgs;
struct SiluArgs;
struct SwigluArgs;

// All kernels except linear layers and attention.
struct GeneralKernels {
  void (*rms_norm)(const RmsNormArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*silu)(const SiluArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*matmul)(const MatMulArgs&);
  // Quantises the activations `x` of one row to int8, and stores them as row `row` of `rows`. `blob` is the packed
  // weight of the layer. It determines the groups, and may have scales for the inputs (ops/quantize_row.h).
  void (*quantize_row)(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const void* blob);
  void (*sum_parts)(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count);
  void (*gated_delta)(const GatedDeltaArgs&);
  void (*sigmoid_gate)(const SigmoidGateArgs&);
  LogitsPasses logits;
};

// Linear layers and attention with one kind of operands: the part `floats`, `bfloats` or `bytes`.
struct ProductKernels {
  int64_t tile_steps;  // number of steps in a tile of packed weights, called T in ops/linear.h
  void (*linear)(const LinearArgs&);
  void (*attention)(const RotaryAttentionArgs&);
  // LoRA (lora.h): multiplies a tile's rows of activations by a part of the matrix A. Null in the part `bytes`, because
  // adapters are floats.
  void (*lora_shrink)(DType dtype, const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& part);
};

}  // namespace llmk
