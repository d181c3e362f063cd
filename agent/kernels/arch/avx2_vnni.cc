// The kernels for AVX-VNNI: VPDPBUSD, dot products of bytes, with 256 bits and without AVX-512. Processors with it are
// Intel's since Alder Lake and AMD's since Zen 5. The flags are those of avx2.cc and -mavxvnni.
#define LLMK_ARCH avx2_vnni
#define LLMK_VEC_AVX2
#define LLMK_VNNI
#include "table.h"
