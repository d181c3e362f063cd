// The part `bytes` of an instruction set: integer weights with int8 activations, and int8 caches.
#pragma once
#include "vec.h"
#include "../common/kernel_parts.h"
#include "../ops/linear_bytes.h"
#include "../ops/paged_attention.h"

namespace llmk::LLMK_ARCH {

static void attention_bytes(const RotaryAttentionArgs& args) {
#ifdef LLMK_VNNI
  paged::attend_paged<paged::Int8Form, int8_t>(args);
#elif defined(LLMK_VEC_AVX2)
  paged::attend_paged<paged::WordForm, int8_t>(args);
#else
  paged::attend_paged<paged::FloatForm, int8_t>(args);
#endif
}

extern const ProductKernels kBytes;
const ProductKernels kBytes = {kTileSteps, linear_bytes, attention_bytes, nullptr};

}  // namespace llmk::LLMK_ARCH
