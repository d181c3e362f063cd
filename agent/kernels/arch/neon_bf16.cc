// The kernels for Arm with BFMMLA, the matrix products of bfloat16 of ARMv8.6 (-march=armv8.2-a+dotprod+i8mm+bf16).
#define LLMK_ARCH neon_bf16
#define LLMK_NEON_DOT
#define LLMK_NEON_I8MM
#define LLMK_NEON_BF16
#include "part.h"
