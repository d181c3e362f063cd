// The kernels of one instruction set. arch/<isa>.cc fills one table each; kernels() is the one chosen at run time.
#pragma once
#include "../ops/linear.h"
#include "../ops/logits.h"
#include "../ops/matmul.h"
#include "../ops/rms_norm.h"
#include "../ops/rotary.h"
#include "../ops/rotary_attention.h"
#include "../ops/silu.h"
#include "../ops/swiglu.h"

namespace llmk {

struct KernelTable {
  const char* isa;
  int64_t tile_steps;  // of packed weights, ops/linear.h
  void (*rms_norm)(const RmsNormArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*silu)(const SiluArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*matmul)(const MatMulArgs&);
  void (*linear)(const LinearArgs&);
  // Quantises row `row` of `rows` (x: its depth elements); any thread may do any row.
  void (*quantize_row)(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const void* blob);
  void (*rotary_attention)(const RotaryAttentionArgs&);
  LogitsPasses logits;
};

// The best table this processor runs, or the one LLM_KERNELS_ISA names (portable, avx2, avx512, avx512_vnni,
// avx512_bf16, avx512_amx). A name that is unknown, not compiled in or beyond the processor ends the process: a silent
// fallback would hide it.
const KernelTable& kernels();

}  // namespace llmk
