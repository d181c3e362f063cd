// The type Vec of vec.h without intrinsics: 16 floats as a GCC vector. The compiler turns its operations into the basic
// vector instructions of the architecture, such as SSE2 or NEON. On Arm, the multiply-adds are intrinsics.
#pragma once
#ifdef LLMK_NEON_DOT
#include <arm_neon.h>
#endif

namespace llmk::LLMK_ARCH {

typedef float Vec __attribute__((vector_size(64), aligned(64)));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(64)));

LLMK_INLINE Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
LLMK_INLINE Vec zero() { return broadcast(0.0f); }

LLMK_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
LLMK_INLINE Vec load(const T* p) {
  Vec v;
  for (int i = 0; i < 16; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T>
LLMK_INLINE Vec load_n(const T* p, int64_t n) {
  Vec v = zero();
  for (int64_t i = 0; i < n && i < 16; ++i) v[i] = to_float(p[i]);
  return v;
}
LLMK_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
template <class T>
LLMK_INLINE void store(T* p, Vec v) {
  for (int i = 0; i < 16; ++i) from_float(v[i], p + i);
}
template <class T>
LLMK_INLINE void store_n(T* p, Vec v, int64_t n) {
  for (int64_t i = 0; i < n && i < 16; ++i) from_float(v[i], p + i);
}

LLMK_INLINE Vec add(Vec a, Vec b) { return a + b; }
LLMK_INLINE Vec sub(Vec a, Vec b) { return a - b; }
LLMK_INLINE Vec mul(Vec a, Vec b) { return a * b; }
LLMK_INLINE Vec div(Vec a, Vec b) { return a / b; }
#ifdef LLMK_NEON_DOT
LLMK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  float32x4_t parts[3][4];
  std::memcpy(parts[0], &a, sizeof(a));
  std::memcpy(parts[1], &b, sizeof(b));
  std::memcpy(parts[2], &c, sizeof(c));
  for (int i = 0; i < 4; ++i) parts[2][i] = vfmaq_f32(parts[2][i], parts[0][i], parts[1][i]);
  Vec result;
  std::memcpy(&result, parts[2], sizeof(result));
  return result;
}
#else
// Rounds the product and then the sum: the compiler flag -ffp-contract=off forbids a fused multiply-add.
LLMK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
LLMK_INLINE Vec select(IntVec mask, Vec a, Vec b) { return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask)); }
LLMK_INLINE Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }
LLMK_INLINE Vec minimum(Vec a, Vec b) { return select(a < b, a, b); }

LLMK_INLINE Vec keep_first(Vec v, int64_t n, float other) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select(lane < static_cast<int32_t>(n), v, broadcast(other));
}
LLMK_INLINE Vec hide_first(Vec v, int64_t n, float other) {
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select(lane < static_cast<int32_t>(n), broadcast(other), v);
}
// Rounds to the nearest whole number, ties to even, if |v| < 2^22. After adding 1.5 * 2^23, the mantissa has no bits
// for the fraction, so the addition rounds it away.
LLMK_INLINE Vec round_nearest(Vec v) { return (v + 12582912.0f) - 12582912.0f; }
LLMK_INLINE Vec scale_by_power(Vec v, Vec n) {
  const IntVec shift = (IntVec)(n + 12582912.0f) << 23;
  return (Vec)((IntVec)v + shift);
}
LLMK_INLINE Vec zero_below(Vec v, Vec x, float limit) { return (Vec)((IntVec)v & ~(IntVec)(x < limit)); }

LLMK_INLINE float sum(Vec v) {
  float a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = v[i] + v[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}
template <int N>
LLMK_INLINE void sums(const Vec (&v)[N], float* out) {
  for (int i = 0; i < N; ++i) out[i] = sum(v[i]);
}
LLMK_INLINE float largest(Vec v) {
  float best = v[0];
  for (int i = 1; i < 16; ++i) best = best > v[i] ? best : v[i];
  return best;
}

LLMK_INLINE int first_lane_equal(Vec v, float x) {
  int lane = 0;
  while (lane < 16 && v[lane] != x) ++lane;
  return lane;
}

// Writes the indices of the lanes with low < v <= high, in ascending order. Returns their number.
LLMK_INLINE int find_between(Vec v, float low, float high, int32_t* indices) {
  int found = 0;
  for (int i = 0; i < 16; ++i) {
    indices[found] = i;
    found += v[i] > low && v[i] <= high;
  }
  return found;
}

}  // namespace llmk::LLMK_ARCH
