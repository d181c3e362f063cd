// The kernels for AVX-512 with VDPBF16PS, dot products of bfloat16. The flags are those of avx512_vnni.cc and
// -mavx512bf16.
#define LLMK_ARCH avx512_bf16
#define LLMK_VEC_AVX512
#define LLMK_VNNI
#define LLMK_BF16_DOT
#include "part.h"
