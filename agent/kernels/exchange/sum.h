// The sum of several arrays, element by element in their order, in float32, rounded once.
#pragma once
#include <cstdint>

#include "../common/types.h"

namespace llmk {

// parts[0..num_parts) and out have `count` elements; out may be one of the parts. Its type is that of the parts, or any
// where they are float32.
void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count);

}  // namespace llmk
