// Rotary position embedding (Su et al. 2021): rotates pairs of elements of every head by an angle per position.
//
//  x, out   [tokens, heads * dim]; consecutive rows are `x_stride` and `out_stride` elements apart
//  cos, sin [table_rows, dim]; positions [tokens] has the row of both tables for each token
//  halves: rotates the pairs (i, i + dim/2):
//    out[i]         = x[i] * cos[i] - x[i + dim/2] * sin[i]
//    out[i + dim/2] = x[i + dim/2] * cos[i + dim/2] + x[i] * sin[i + dim/2]
//  interleaved: rotates the pairs (2i, 2i + 1) in the same way
//
// Every product and every sum is rounded to float32 separately, without fused multiply-adds. So the result equals that
// of the same expression in any programming language. At the end, the result is rounded to the type of x.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct RotaryArgs {
  const void* x;
  void* out;
  const void* cos;
  const void* sin;
  const int32_t* positions;  // null: token t uses row t of cos and sin
  int64_t tokens, heads, dim;
  int64_t x_stride, out_stride;  // elements from one token to the next
  DType dtype, table_dtype;
  bool interleaved;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

// Rotates the pairs (i, i + dim/2) of a head. `out` may be `x`.
template <class T, class Out, class C>
LLMK_INLINE void rotate_half_head(const T* x, Out* out, const C* cos, const C* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i, j = half + i;
    const Vec first = load_part(x + i, n), second = load_part(x + j, n);
    store_part(out + i, sub(mul(first, load_part(cos + i, n)), mul(second, load_part(sin + i, n))), n);
    store_part(out + j, add(mul(second, load_part(cos + j, n)), mul(first, load_part(sin + j, n))), n);
  }
}

template <class T, class C>
static inline void rotate_pairs_head(const T* x, T* out, const C* cos, const C* sin, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 2) {
    const float first = to_float(x[i]), second = to_float(x[i + 1]);
    from_float(first * to_float(cos[i]) - second * to_float(sin[i]), out + i);
    from_float(second * to_float(cos[i + 1]) + first * to_float(sin[i + 1]), out + i + 1);
  }
}

// Rotates all heads of all tokens, in parallel over tokens. Without positions, token i has position i.
template <class T, class C>
static inline void rotary_tokens(const RotaryArgs& args) {
  const int64_t per_task = larger(1, 8192 / (args.heads * args.dim));
  parallel_for(ceil_div(args.tokens, per_task), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * per_task, args.tokens);
    for (int64_t token = task * per_task; token < end; ++token) {
      const int64_t position = args.positions == nullptr ? token : args.positions[token];
      const C* cos = static_cast<const C*>(args.cos) + position * args.dim;
      const C* sin = static_cast<const C*>(args.sin) + position * args.dim;
      const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
      T* out = static_cast<T*>(args.out) + token * args.out_stride;
      for (int64_t head = 0; head < args.heads; ++head, x += args.dim, out += args.dim) {
        if (args.interleaved) {
          rotate_pairs_head(x, out, cos, sin, args.dim);
        } else {
          rotate_half_head(x, out, cos, sin, args.dim);
        }
      }
    }
  });
}

static void rotary(const RotaryArgs& args) {
  with_element_type(args.dtype, [&](auto x) {
    with_element_type(args.table_dtype, [&](auto table) { rotary_tokens<decltype(x), decltype(table)>(args); });
  });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
