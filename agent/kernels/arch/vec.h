// The vector types Vec and Ints for the instruction set that a file is compiled for. Every arch/<isa>.cc defines
// LLMK_ARCH (the namespace) and, except for the portable set, one LLMK_VEC_*. Kernels are written once for all
// instruction sets, with these names:
//
//   Vec                                a vector of 16 floats (lanes)
//   zero()  broadcast(x)               all lanes are 0; all lanes are x
//   load(p)  store(p, v)               16 elements at p, which are float, half_t or bfloat_t
//   load_n(p, n)  store_n(p, v, n)     the first n elements, n < 16
//   load_part(p, n)  store_part(p, v, n)   the first n elements, for any n; fastest if n is 16 or more
//   add sub mul div                    element by element
//   fma(a, b, c)                       a * b + c; rounds twice on the portable instruction set
//   fused(a, b, c)                     a * b + c, rounded once on every instruction set
//   maximum minimum                    of two vectors, lane by lane; a NaN in the second operand is returned
//   keep_first(v, n, other)            replaces the lanes n to 15 by `other`
//   hide_first(v, n, other)            replaces the lanes 0 to n - 1 by `other`
//   round_nearest(v)                   to whole numbers
//   scale_by_power(v, n)               v * 2^n
//   zero_below(v, x, limit)            v in the lanes where x >= limit, otherwise 0
//   sum(v)  largest(v)                 the sum of the lanes, the largest lane
//   sums(v, out)                       out[i] = sum(v[i]) for an array of 4 or 16 vectors
//   bits_below(bits, v)                the float whose bits, as an integer, are `bits` minus the bits of v
//   first_lane_equal(v, x)             the first lane that equals x, or 16 if there is none
//   find_between(v, low, high, indices)   writes the lanes with low < v <= high, ascending; returns their number
//
//   Ints                               a vector of 16 int32. It has the functions broadcast_int load_ints store_ints
//                                      add multiply shift_right to_floats and others.
//   Quads                              four weights w in each 32-bit lane. quads() makes them from bytes w + 128. AVX2
//                                      without AVX-VNNI has no Quads; it multiplies 16-bit numbers.
//   kByteZero                          the byte for the weight 0 in Quads: 128, or 0 if the bytes are signed
//   BroadcastQuad                      four int8 activations, the same in each lane
//   dot_quads(total, w, x)             adds the exact dot product of each lane's four weights and activations
//
// A load of n < 16 elements does not touch the memory after them, and the other lanes become 0. Stores round to nearest
// even. sum() adds lanes l and l + 8, then l + 4, then l + 2, then l + 1.
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

namespace llmk::LLMK_ARCH {

constexpr int kLanes = 16;
#ifndef LLMK_NEON_DOT
constexpr int kByteZero = 128;
#endif

// Loads the first n elements of a vector, for any n >= 0. If n is at least 16, which is the usual case, loads without a
// mask. The function store_part() stores the first n elements in the same way.
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

// Returns exp(x) with an error of about 1 ulp for -87.3 <= x <= 88.3. Returns 0 below this range and exp(88.3) above
// it. A NaN stays a NaN. Writes x as n * ln(2) + r with |r| <= ln(2)/2. For e^r, uses the polynomial of degree 6 of
// Cephes' expf (S. L. Moshier).
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

// Returns 1 / (1 + exp(-x)) with a relative error of 3e-7. Clamps x to the range from -86 to 86. The result for a NaN
// is undefined.
//
// The function computes exp(-x) as 2^n * 2^-r with |r| <= 1/2, where a minimax polynomial gives 2^-r. Then it computes
// 1 / d for d = 1 + exp(-x) without a division, because divisions are slow. The first guess comes from the bits of d
// and has an error of up to 5.1 %. A refinement of third order reduces the error to 1.3e-4, a refinement of second
// order to 1.7e-8. The instructions for approximate reciprocals are not used, because their results differ between
// processors.
LLMK_INLINE Vec sigmoid(Vec x) {
  constexpr float kLimit = 86.0f, kLog2E = 1.44269504088896341f, kRest = 1.92596299e-8f;  // kRest = log2(e) - kLog2E
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

}  // namespace llmk::LLMK_ARCH
