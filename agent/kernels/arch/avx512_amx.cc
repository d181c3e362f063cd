// As avx512_bf16.cc, with -mamx-tile -mamx-int8 -mamx-bf16: linear layers on tiles of 16 rows.
#define LLMK_ARCH avx512_amx
#define LLMK_VEC_AVX512
#define LLMK_VNNI
#define LLMK_BF16_DOT
#define LLMK_AMX
#define LLMK_TABLE kAvx512AmxTable
#define LLMK_ISA_NAME "avx512_amx"
#include "table.h"
