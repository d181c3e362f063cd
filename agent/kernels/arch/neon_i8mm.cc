// The kernels for Arm with USMMLA, the matrix products of bytes of ARMv8.6 (-march=armv8.2-a+dotprod+i8mm).
#define LLMK_ARCH neon_i8mm
#define LLMK_NEON_DOT
#define LLMK_NEON_I8MM
#include "part.h"
