// The kernels for any processor of the architecture.
#define LLMK_ARCH portable
#define LLMK_TABLE kPortableTable
#define LLMK_ISA_NAME "portable"
#include "table.h"
