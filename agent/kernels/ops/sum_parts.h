// Adds several arrays element by element, in the order of the arrays, in float32, and rounds once.
//
//  parts[0] to parts[num_parts - 1] and `out` have `count` elements. `out` may be one of the parts.
//
// If the parts are float32, `out_dtype` may be any type. Otherwise it must be the type of the parts.
#pragma once
#include "../common/types.h"

#ifdef LLMK_ARCH
namespace llmk::LLMK_ARCH {

template <class In, class Out>
static void sum_typed_parts(const void* const* parts, int num_parts, void* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec total = load_part(static_cast<const In*>(parts[0]) + i, count - i);
    for (int r = 1; r < num_parts; ++r) total = add(total, load_part(static_cast<const In*>(parts[r]) + i, count - i));
    store_part(static_cast<Out*>(out) + i, total, count - i);
  }
}

static void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count) {
  const auto run = [&](auto function) { function(parts, num_parts, out, count); };
  if (dtype == DType::kFloat16) return run(sum_typed_parts<half_t, half_t>);
  if (dtype == DType::kBFloat16) return run(sum_typed_parts<bfloat_t, bfloat_t>);
  if (out_dtype == DType::kFloat16) return run(sum_typed_parts<float, half_t>);
  if (out_dtype == DType::kBFloat16) return run(sum_typed_parts<float, bfloat_t>);
  run(sum_typed_parts<float, float>);
}

}  // namespace llmk::LLMK_ARCH
#endif
