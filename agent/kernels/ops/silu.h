// SiLU (Elfwing et al. 2018): out = x / (1 + exp(-x)), computed in float32 and rounded once. A result depends only on
// its element, not on the element's place or on the number of elements.
#pragma once

#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct SiluArgs {
  const void* input;
  void* out;
  int64_t count;
  DType dtype;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

static inline Vec silu_lanes(Vec x) { return mul(x, sigmoid(x)); }

template <class T>
static inline void silu_span(const SiluArgs& args) {
  constexpr int64_t kSpan = 16384;  // elements per task
  const T* input = static_cast<const T*>(args.input);
  T* out = static_cast<T*>(args.out);
  parallel_for(ceil_div(args.count, kSpan), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * kSpan, args.count);
    int64_t i = task * kSpan;
    for (; i + kLanes <= end; i += kLanes) store(out + i, silu_lanes(load(input + i)));
    if (i < end) store_n(out + i, silu_lanes(load_n(input + i, end - i)), end - i);
  });
}

static void silu(const SiluArgs& args) {
  with_element_type(args.dtype, [&](auto type) { silu_span<decltype(type)>(args); });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
