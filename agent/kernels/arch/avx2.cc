// The kernels for AVX2, FMA and F16C (-mavx2 -mfma -mf16c).
#define LLMK_ARCH avx2
#define LLMK_VEC_AVX2
#define LLMK_TABLE kAvx2Table
#define LLMK_ISA_NAME "avx2"
#include "table.h"
