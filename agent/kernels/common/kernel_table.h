// The table of function pointers to the kernels of one instruction set. Each arch/<isa>.cc defines a table. kernels()
// returns the table in use.
#pragma once
#include "../ops/gated_delta.h"
#include "../ops/linear.h"
#include "../ops/logits.h"
#include "../ops/matmul.h"
#include "../ops/rms_norm.h"
#include "../ops/rotary.h"
#include "../ops/rotary_attention.h"
#include "../ops/silu.h"
#include "../ops/sum_parts.h"
#include "../ops/swiglu.h"

namespace llmk {

struct KernelTable {
  const char* isa;
  int64_t tile_steps;  // number of steps in a tile of packed weights, called T in ops/linear.h
  void (*rms_norm)(const RmsNormArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*silu)(const SiluArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*matmul)(const MatMulArgs&);
  void (*linear)(const LinearArgs&);
  // LoRA (lora.h): multiplies a tile's rows of activations by rows [16 * group, 16 * group + 16) of the matrix A.
  void (*lora_shrink)(const ShrinkTile& tile, int64_t group);
  // Quantises the activations `x` of one row to int8, and stores them as row `row` of `rows`. `blob` is the packed
  // weight of the layer. It determines the groups, and may have scales for the inputs (ops/quantize_row.h).
  void (*quantize_row)(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const void* blob);
  void (*sum_parts)(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count);
  void (*rotary_attention)(const RotaryAttentionArgs&);
  void (*gated_delta)(const GatedDeltaArgs&);
  void (*sigmoid_gate)(const SigmoidGateArgs&);
  LogitsPasses logits;
};

// Returns the best table for this processor, or the table that LLM_KERNELS_ISA names: portable, avx2, avx2_vnni,
// avx512, avx512_vnni, avx512_bf16, avx512_amx, neon_dot, neon_i8mm or neon_bf16. If the build or the processor does
// not have the named instruction set, ends the process. Silently using another instruction set would hide the mistake.
const KernelTable& kernels();

// Returns the names of the instruction sets that were compiled, the fastest first, separated by spaces.
const char* compiled_sets();

}  // namespace llmk
