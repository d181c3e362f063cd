// The kernels for AVX-512 with VPDPBUSD, dot products of bytes. The flags are those of avx512.cc and -mavx512vnni.
#define LLMK_ARCH avx512_vnni
#define LLMK_VEC_AVX512
#define LLMK_VNNI
#include "part.h"
