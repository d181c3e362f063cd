// As avx512.cc, with -mavx512vnni: dot products of bytes by VPDPBUSD.
#define LLMK_ARCH avx512_vnni
#define LLMK_VEC_AVX512
#define LLMK_VNNI
#define LLMK_TABLE kAvx512VnniTable
#define LLMK_ISA_NAME "avx512_vnni"
#include "table.h"
