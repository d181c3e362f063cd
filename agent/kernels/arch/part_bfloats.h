// The part `bfloats` of an instruction set: bfloat16 weights and caches, and integer weights with float activations.
#pragma once
#include "vec.h"
#include "../common/kernel_parts.h"
#include "../ops/linear_bfloats.h"
#include "../ops/paged_attention.h"

namespace llmk::LLMK_ARCH {

static void attention_bfloats(const RotaryAttentionArgs& args) {
#ifdef LLMK_BF16_DOT
  if (lies_in_rows(args)) return paged::attend_ready<paged::BFloat16Form, bfloat_t>(args);
  paged::attend_paged<paged::BFloat16Form, bfloat_t>(args);
#else
  paged::attend_paged<paged::FloatForm, bfloat_t>(args);
#endif
}

static void shrink_bfloats(DType, const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& part) {
#ifdef LLMK_AMX
  if (ShrinkTiles::fit(tile)) return ShrinkTiles::multiply(job, tile, part);
#endif
  lora_shrink<bfloat_t>(job, tile, part);
}

extern const ProductKernels kBFloats;
const ProductKernels kBFloats = {kTileSteps, linear_bfloats, attention_bfloats, shrink_bfloats};

}  // namespace llmk::LLMK_ARCH
