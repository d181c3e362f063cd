// The kernels for AVX-512 F, BW, VL and DQ (-mavx512f -mavx512bw -mavx512vl -mavx512dq and the flags of avx2.cc).
#define LLMK_ARCH avx512
#define LLMK_VEC_AVX512
#include "part.h"
