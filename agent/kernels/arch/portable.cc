// Any processor.
#define LLMK_ARCH portable
#define LLMK_TABLE kPortableTable
#define LLMK_ISA_NAME "portable"
#include "table.h"
