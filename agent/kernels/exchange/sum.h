// Adds several arrays, element by element, in their order, in float32, and rounds once.
#pragma once
#include <cstdint>

#include "../common/types.h"

namespace llmk {

// parts[0..num_parts) and out have `count` elements; out may be one of the parts. If the parts are float32, `out_dtype`
// may be any type, else it must be the type of the parts.
void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count);

}  // namespace llmk
