// The kernels without special instructions, for any processor of the architecture.
#define LLMK_ARCH portable
#include "part.h"
