// The part `floats` of an instruction set: float32 and float16 weights and caches.
#pragma once
#include "vec.h"
#include "../common/kernel_parts.h"
#include "../ops/linear_floats.h"
#include "../ops/paged_attention.h"

namespace llmk::LLMK_ARCH {

static void attention_floats(const RotaryAttentionArgs& args) {
  if (args.dtype == DType::kFloat32) paged::attend_paged<paged::FloatForm, float>(args);
  if (args.dtype == DType::kFloat16) paged::attend_paged<paged::FloatForm, half_t>(args);
}

static void shrink_floats(DType dtype, const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& part) {
  if (dtype == DType::kFloat16) return lora_shrink<half_t>(job, tile, part);
  lora_shrink<float>(job, tile, part);
}

extern const ProductKernels kFloats;
const ProductKernels kFloats = {kFloatTileSteps, linear_floats, attention_floats, shrink_floats};

}  // namespace llmk::LLMK_ARCH
