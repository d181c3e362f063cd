// Swiglu (Shazeer 2020): splits the input along one axis into a gate and a value.
//
//  input [outer, 2 * inner]  ->  out [outer, inner],  out = gate / (1 + exp(-gate)) * value, rounded once
//
// `outer` is the product of the sizes of the axes before the split axis. `inner` is the product of half the size of the
// split axis and the sizes of the axes after it.
#pragma once

#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct SwigluArgs {
  const void* input;
  void* out;
  int64_t outer, inner;
  DType dtype;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

static inline Vec swiglu_lanes(Vec gate, Vec value) { return mul(mul(gate, sigmoid(gate)), value); }

template <class T>
static inline void swiglu_rows(const SwigluArgs& args) {
  constexpr int64_t kSpan = 8192;  // elements per task
  const int64_t spans = ceil_div(args.inner, kSpan), rows_per_task = larger(1, kSpan / args.inner);
  parallel_for(ceil_div(args.outer, rows_per_task) * spans, [&](int64_t task) {
    const int64_t begin = task % spans * kSpan, end = smaller(begin + kSpan, args.inner);
    const int64_t first = task / spans * rows_per_task, last = smaller(first + rows_per_task, args.outer);
    for (int64_t row = first; row < last; ++row) {
      const T* gate = static_cast<const T*>(args.input) + row * 2 * args.inner;
      const T* value = gate + args.inner;
      T* out = static_cast<T*>(args.out) + row * args.inner;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) store(out + i, swiglu_lanes(load(gate + i), load(value + i)));
      if (i < end) store_n(out + i, swiglu_lanes(load_n(gate + i, end - i), load_n(value + i, end - i)), end - i);
    }
  });
}

static void swiglu(const SwigluArgs& args) {
  with_element_type(args.dtype, [&](auto type) { swiglu_rows<decltype(type)>(args); });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
