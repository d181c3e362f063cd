// The part `general` of an instruction set: all kernels except linear layers and attention.
#pragma once
#include "vec.h"
#include "../common/kernel_parts.h"
#include "../ops/gated_delta.h"
#include "../ops/logits.h"
#include "../ops/matmul.h"
#include "../ops/quantize_row.h"
#include "../ops/rms_norm.h"
#include "../ops/rotary.h"
#include "../ops/silu.h"
#include "../ops/sum_parts.h"
#include "../ops/swiglu.h"

namespace llmk::LLMK_ARCH {

extern const GeneralKernels kGeneral;
const GeneralKernels kGeneral = {
    rms_norm,
    swiglu,
    silu,
    rotary,
    matmul,
    quantize_row,
    sum_parts,
    gated_delta,
    sigmoid_gate,
    {logits_largest, logits_sum_exp, logits_divide, logits_collect,
     logits_first_equal, logits_weights},
};

}  // namespace llmk::LLMK_ARCH
