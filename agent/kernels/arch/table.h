// Defines the table of function pointers to the kernels of one instruction set. Each arch/<isa>.cc ends by including
// this file.
//
// tools/kernel_build.py compiles each arch/<isa>.cc a second time for the ceilings program, which measures the speed of
// the processor. In that build, LLMK_TABLE_FILE is the path of the file loops.h of the program. This file then includes
// loops.h instead of the kernels.
#pragma once
#ifdef LLMK_TABLE_FILE
#include LLMK_TABLE_FILE
#else
#include "vec.h"
#include "../common/kernel_table.h"

#define LLMK_TEXT(name) #name
#define LLMK_NAME_OF(arch) LLMK_TEXT(arch)

namespace llmk::LLMK_ARCH {

extern const KernelTable kTable;
const KernelTable kTable = {
    LLMK_NAME_OF(LLMK_ARCH),
    kTileSteps,
    rms_norm,
    swiglu,
    silu,
    rotary,
    matmul,
    linear,
    lora_shrink,
    quantize_row,
    sum_parts,
    paged::rotary_attention,
    gated_delta,
    sigmoid_gate,
    {logits_largest, logits_sum_exp, logits_divide, logits_collect,
     logits_first_equal, logits_weights},
};

}  // namespace llmk::LLMK_ARCH
#endif
