// Picks the vector type of the instruction set a file is compiled for. Every arch/<isa>.cc defines LLMK_ARCH (the
// namespace) and one LLMK_VEC_*; all kernels are then written once, against these names:
//
//   Vec                                16 floats
//   zero() broadcast(x)                load(p) load_n(p, n) store(p, v) store_n(p, v, n)   p: float, half_t, bfloat_t
//   add sub mul div fma(a, b, c) = a * b + c   maximum minimum (NaN in the second operand wins)
//   keep_first(v, n, other)            lanes >= n replaced by `other`; hide_first(v, n, other): lanes < n
//   round_nearest(v)  scale_by_power(v, n) = v * 2^n   zero_below(v, x, limit): v where x >= limit, else 0
//   sum(v)  largest(v)                 over the lanes, by the one tree below; sums(v[4 or 16], out): of each vector
//   fused(a, b, c)                     as fma, but rounded once on every instruction set
//   first_lane_equal(v, x)  find_between(v, low, high, indices): which lanes are x, or in (low, high]
//
//   Ints                               16 int32: broadcast_int load_ints store_ints add multiply shift_right to_floats
//                                      and others
//   Quads BroadcastQuad                4 uint8 weights a lane, 4 int8 activations: dot_quads(total, w, x) is exact
//
// Loads of n < 16 elements never touch memory past them; missing lanes are 0. Stores round to nearest even.
// The tree of sum(): lanes l and l + 8, then l + 4, l + 2, l + 1.
#pragma once
#include "../common/types.h"

#if defined(LLMK_VEC_AVX512)
#include "vec_avx512.h"
#include "ints_avx512.h"
#elif defined(LLMK_VEC_AVX2)
#include "vec_avx2.h"
#include "ints_avx2.h"
#else
#include "vec_portable.h"
#include "ints_portable.h"
#endif

namespace llmk {
namespace LLMK_ARCH {

constexpr int kLanes = 16;

// exp(x) to about 1 ulp for -87.3 <= x <= 88.3, 0 below, clamped above; NaN stays NaN. Range reduction to
// |r| <= ln(2)/2 and the degree-6 polynomial of Cephes' expf (S. L. Moshier).
LLMK_INLINE Vec exponential(Vec x) {
  constexpr float kLowest = -87.33654f, kHighest = 88.37626f;
  const Vec clamped = maximum(broadcast(kLowest), minimum(broadcast(kHighest), x));
  const Vec n = round_nearest(mul(clamped, broadcast(1.44269504088896341f)));
  Vec r = fused(n, broadcast(-0.693359375f), clamped);
  r = fused(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fused(p, r, broadcast(1.3981999507e-3f));
  p = fused(p, r, broadcast(8.3334519073e-3f));
  p = fused(p, r, broadcast(4.1665795894e-2f));
  p = fused(p, r, broadcast(1.6666665459e-1f));
  p = fused(p, r, broadcast(5.0000001201e-1f));
  p = fused(p, mul(r, r), add(r, broadcast(1.0f)));
  return zero_below(scale_by_power(p, n), x, kLowest);
}

LLMK_INLINE float exponential(float x) {
  float lanes[kLanes] = {x};
  store(lanes, exponential(load(lanes)));
  return lanes[0];
}

}  // namespace LLMK_ARCH
}  // namespace llmk
