// The table of the kernels of one instruction set. kernels() returns the table in use.
#pragma once
#include "kernel_parts.h"
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

// The kernels of one instruction set. Several sets may share a part (arch/part.h).
struct KernelTable : GeneralKernels {
  const char* isa;
  ProductKernels floats, bfloats, bytes;

  void linear(const LinearArgs& args) const;
  void rotary_attention(const RotaryAttentionArgs& args) const;
  // Computes products with a matrix A of an adapter (lora.h). `dtype` is the type of the adapter.
  void lora_shrink(DType dtype, const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& part) const {
    (dtype == DType::kBFloat16 ? bfloats : floats).lora_shrink(dtype, job, tile, part);
  }
  // Returns the number of steps in a tile of packed weights, called T in ops/linear.h.
  int64_t tile_steps(WeightFormat format) const { return products(format).tile_steps; }

 private:
  // Returns the part that multiplies by weights of a format.
  const ProductKernels& products(WeightFormat format) const;
};

// Returns the best table for this processor, or the table that LLM_KERNELS_ISA names: portable, avx2, avx2_vnni,
// avx512, avx512_vnni, avx512_bf16, avx512_amx, neon_dot, neon_i8mm or neon_bf16. If the build or the processor does
// not have the named instruction set, ends the process. Silently using another instruction set would hide the mistake.
const KernelTable& kernels();

// Returns the names of the instruction sets that were compiled, the fastest first, separated by spaces.
const char* compiled_sets();

}  // namespace llmk
