// The kernels for Arm with SDOT, the dot products of ARMv8.2 (-march=armv8.2-a+dotprod).
#define LLMK_ARCH neon_dot
#define LLMK_NEON_DOT
#include "part.h"
