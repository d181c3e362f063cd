// Includes the part of the kernels that the compiler makes. Each arch/<isa>.cc ends by including this file.
//
// The kernels have four parts: part_general.h, part_floats.h, part_bfloats.h and part_bytes.h. Each part of a set is an
// object file of its own. A set has its own copy of a part only if its additional instructions change the part.
// Otherwise it uses the part of a smaller set. tools/kernel_build.py has the list (SHARED_PARTS). It defines
// LLMK_PART_FILE as the path of the part to compile.
//
// tools/kernel_build.py also compiles each arch/<isa>.cc for the ceilings program, which measures the speed of the
// processor. LLMK_PART_FILE is then the path of the file loops.h of this program.
#pragma once
#include LLMK_PART_FILE
