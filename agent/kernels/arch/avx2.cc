// The kernels for AVX2, FMA and F16C (-mavx2 -mfma -mf16c).
#define LLMK_ARCH avx2
#define LLMK_VEC_AVX2
#include "part.h"
