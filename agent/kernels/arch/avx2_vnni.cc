// The kernels for AVX-VNNI without AVX-512. AVX-VNNI has VPDPBUSD, which computes dot products of bytes, for 256-bit
// registers. Intel's processors have it since Alder Lake, AMD's since Zen 5. The compiler flags are those of avx2.cc
// and -mavxvnni.
#define LLMK_ARCH avx2_vnni
#define LLMK_VEC_AVX2
#define LLMK_VNNI
#include "part.h"
