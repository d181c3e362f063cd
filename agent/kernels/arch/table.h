// Included at the end of each arch/<isa>.cc: the table of this instruction set.
#pragma once
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
    {LLMK_ARCH::ceiling_fma, LLMK_ARCH::ceiling_dot_bf16, LLMK_ARCH::ceiling_dot_int8,
     {LLMK_ARCH::ceiling_read<1>, LLMK_ARCH::ceiling_read<2>, LLMK_ARCH::ceiling_read<4>}},
};

}  // namespace llmk
