// The kernels for AVX-512 with AMX: linear layers multiply tiles of 16 rows. The flags are those of avx512_bf16.cc and
// -mamx-tile -mamx-int8 -mamx-bf16.
#define LLMK_ARCH avx512_amx
#define LLMK_VEC_AVX512
#define LLMK_VNNI
#define LLMK_BF16_DOT
#define LLMK_AMX
#include "part.h"
