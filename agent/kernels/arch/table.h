// The table of kernels of one instruction set. Each arch/<isa>.cc ends by including this file.
//
// setup.py compiles the same files once more with LLMK_TABLE_FILE, which names other code for every instruction set:
// the loops of the ceilings program.
#pragma once
#ifdef LLMK_TABLE_FILE
#include LLMK_TABLE_FILE
#else
#include "vec.h"
#include "../common/kernel_table.h"

namespace llmk {

extern const KernelTable LLMK_TABLE;
const KernelTable LLMK_TABLE = {
    LLMK_ISA_NAME,
    LLMK_ARCH::kTileSteps,
    LLMK_ARCH::rms_norm,
    LLMK_ARCH::swiglu,
    LLMK_ARCH::silu,
    LLMK_ARCH::rotary,
    LLMK_ARCH::matmul,
    LLMK_ARCH::linear,
    LLMK_ARCH::quantize_row,
    LLMK_ARCH::paged::rotary_attention,
    {LLMK_ARCH::logits_largest, LLMK_ARCH::logits_sum_exp, LLMK_ARCH::logits_divide, LLMK_ARCH::logits_collect,
     LLMK_ARCH::logits_first_equal, LLMK_ARCH::logits_weights},
};

}  // namespace llmk
#endif
