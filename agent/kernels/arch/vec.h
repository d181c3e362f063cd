// Picks the vector type of the instruction set a file is compiled for. Every arch/<isa>.cc defines LLMK_ARCH (the
// namespace) and one LLMK_VEC_*; all kernels are then written once, against these names:
//
//   Vec                                16 floats
//   zero() broadcast(x)                load(p) load_n(p, n) store(p, v) store_n(p, v, n)   p: float, half_t, bfloat_t
//                                      load_part store_part: the same for n that is mostly 16 or more
//   add sub mul div fma(a, b, c) = a * b + c   maximum minimum (NaN in the second operand wins)
//   keep_first(v, n, other)            lanes >= n replaced by `other`; hide_first(v, n, other): lanes < n
//   round_nearest(v)  scale_by_power(v, n) = v * 2^n   zero_below(v, x, limit): v where x >= limit, else 0
//   sum(v)  largest(v)                 over the lanes, by the one tree below; sums(v[4 or 16], out): of each vector
//   fused(a, b, c)                     as fma, but rounded once on every instruction set
//   bits_below(bits, v)                the float whose bits are those of v less than `bits`
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

// As load_n and store_n, of any n >= 0: whole vectors, which most are, without a mask.
template <class T>
LLMK_INLINE Vec load_part(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_n(p, n);
}
template <class T>
LLMK_INLINE void store_part(T* p, Vec v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
  } else if (n > 0) {
    store_n(p, v, n);
  }
}

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

// 1 / (1 + exp(-x)) to 3e-7 of itself for |x| <= 86, as at 86 beyond that; of NaN anything. No division: exp(-x) =
// 2^n * 2^-r for |r| <= 1/2, by a minimax polynomial; 1 / d begins from its bits taken for a logarithm, which is within
// 5.1 %, a step of the third order leaves 1.3e-4, one of the second 1.7e-8. Instructions that approximate would differ
// from processor to processor.
LLMK_INLINE Vec sigmoid(Vec x) {
  constexpr float kLimit = 86.0f, kLog2E = 1.44269504088896341f, kRest = 1.92596299e-8f;  // log2(e) - kLog2E
  constexpr uint32_t kGuess = 0xFEF311C3u;
  const Vec one = broadcast(1.0f), clamped = maximum(broadcast(-kLimit), minimum(broadcast(kLimit), x));
  const Vec n = round_nearest(mul(clamped, broadcast(-kLog2E)));
  const Vec r = fused(clamped, broadcast(kRest), fused(clamped, broadcast(kLog2E), n));
  Vec p = fused(broadcast(-1.32764725e-3f), r, broadcast(9.67554096e-3f));
  p = fused(p, r, broadcast(-5.55071309e-2f));
  p = fused(p, r, broadcast(2.40221202e-1f));
  p = fused(p, r, broadcast(-6.93146944e-1f));
  p = fused(p, r, one);
  const Vec minus_d = sub(broadcast(-1.0f), scale_by_power(p, n));
  Vec y = bits_below(kGuess, minus_d), error = fused(minus_d, y, one);
  y = fused(y, fused(error, error, error), y);
  error = fused(minus_d, y, one);
  return fused(y, error, y);
}

LLMK_INLINE float exponential(float x) {
  float lanes[kLanes] = {x};
  store(lanes, exponential(load(lanes)));
  return lanes[0];
}

}  // namespace LLMK_ARCH
}  // namespace llmk
