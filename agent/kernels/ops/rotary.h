// Rotary position embedding (Su et al. 2021): rotates pairs of elements of every head by an angle per position.
//
//   x [tokens, heads * dim], rows `x_stride` elements apart; out the same with `out_stride`
//   cos, sin [table_rows, dim]; positions [tokens] give the table row of each token
//   halves:      out[i] = x[i] * cos[i] - x[i + dim/2] * sin[i],   out[i + dim/2] = x[i + dim/2] * cos + x[i] * sin
//   interleaved: the same with pairs (2i, 2i + 1)
//
// Every product and every sum rounds to float32 on its own, without fused multiply-adds. So the result equals that of
// the expression written out in any language. It rounds once more to the type of x.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct RotaryArgs {
  const void* x;
  void* out;
  const void* cos;
  const void* sin;
  const int32_t* positions;  // null: token t uses row t
  int64_t tokens, heads, dim;
  int64_t x_stride, out_stride;  // elements from one token to the next
  DType dtype, table_dtype;
  bool interleaved;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

template <class T, class C>
static inline void rotate_half_lanes(const T* x, T* out, const C* cos, const C* sin, int64_t half, int64_t i,
                                     int64_t n) {
  const Vec first = load_n(x + i, n), second = load_n(x + half + i, n);
  const Vec low = sub(mul(first, load_n(cos + i, n)), mul(second, load_n(sin + i, n)));
  const Vec high = add(mul(second, load_n(cos + half + i, n)), mul(first, load_n(sin + half + i, n)));
  store_n(out + i, low, n);
  store_n(out + half + i, high, n);
}

template <class T, class C>
static inline void rotate_half_head(const T* x, T* out, const C* cos, const C* sin, int64_t dim) {
  const int64_t half = dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(x + i), second = load(x + half + i);
    const Vec low = sub(mul(first, load(cos + i)), mul(second, load(sin + i)));
    const Vec high = add(mul(second, load(cos + half + i)), mul(first, load(sin + half + i)));
    store(out + i, low);
    store(out + half + i, high);
  }
  if (i < half) rotate_half_lanes(x, out, cos, sin, half, i, half - i);
}

template <class T, class C>
static inline void rotate_pairs_head(const T* x, T* out, const C* cos, const C* sin, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 2) {
    const float first = to_float(x[i]), second = to_float(x[i + 1]);
    from_float(first * to_float(cos[i]) - second * to_float(sin[i]), out + i);
    from_float(second * to_float(cos[i + 1]) + first * to_float(sin[i + 1]), out + i + 1);
  }
}

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

template <class T>
static inline void rotary_table(const RotaryArgs& args) {
  if (args.table_dtype == DType::kFloat32) rotary_tokens<T, float>(args);
  if (args.table_dtype == DType::kFloat16) rotary_tokens<T, half_t>(args);
  if (args.table_dtype == DType::kBFloat16) rotary_tokens<T, bfloat_t>(args);
}

static void rotary(const RotaryArgs& args) {
  if (args.dtype == DType::kFloat32) rotary_table<float>(args);
  if (args.dtype == DType::kFloat16) rotary_table<half_t>(args);
  if (args.dtype == DType::kBFloat16) rotary_table<bfloat_t>(args);
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
