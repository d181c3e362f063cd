// The type Vec of vec.h for AVX2: 16 floats in two registers. Needs AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

namespace llmk::LLMK_ARCH {

struct Vec {
  __m256 low, high;
};

LLMK_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLMK_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

LLMK_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
LLMK_INLINE __m256 load8(const half_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LLMK_INLINE __m256 load8(const bfloat_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
LLMK_INLINE void store8(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
LLMK_INLINE void store8(half_t* p, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LLMK_INLINE void store8(bfloat_t* p, __m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i wide = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

template <class T>
LLMK_INLINE Vec load(const T* p) {
  return {load8(p), load8(p + 8)};
}
template <class T>
LLMK_INLINE Vec load_n(const T* p, int64_t n) {
  T buffer[16];
  std::memset(static_cast<void*>(buffer), 0, sizeof(buffer));
  std::memcpy(static_cast<void*>(buffer), p, static_cast<size_t>(n < 16 ? n : 16) * sizeof(T));
  return load(buffer);
}
template <class T>
LLMK_INLINE void store(T* p, Vec v) {
  store8(p, v.low);
  store8(p + 8, v.high);
}
template <class T>
LLMK_INLINE void store_n(T* p, Vec v, int64_t n) {
  T buffer[16];
  store(buffer, v);
  std::memcpy(static_cast<void*>(p), buffer, static_cast<size_t>(n < 16 ? n : 16) * sizeof(T));
}

LLMK_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
LLMK_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
LLMK_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
LLMK_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
LLMK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// Adds a * x to total, where x is a number in memory. Load and addition are one asm statement. Otherwise GCC 12 would
// use registers for several x, and would keep some totals of a tile in memory.
LLMK_INLINE void add_product(Vec* total, Vec a, const float* x) {
  __m256 spread;
  asm("vbroadcastss %[x], %[spread]\n\t"
      "vfmadd231ps %[spread], %[low], %[low_total]\n\t"
      "vfmadd231ps %[spread], %[high], %[high_total]"
      : [low_total] "+&x"(total->low), [high_total] "+&x"(total->high), [spread] "=&x"(spread)
      : [low] "x"(a.low), [high] "x"(a.high), [x] "m"(*x));
}
LLMK_INLINE Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
LLMK_INLINE Vec minimum(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

LLMK_INLINE Vec keep_first(Vec v, int64_t n, float other) {
  const __m256i count = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lane8 = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  const __m256 fill = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(fill, v.low, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane))),
          _mm256_blendv_ps(fill, v.high, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane8)))};
}
LLMK_INLINE Vec hide_first(Vec v, int64_t n, float other) {
  const __m256i count = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lane8 = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  const __m256 fill = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(v.low, fill, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane))),
          _mm256_blendv_ps(v.high, fill, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane8)))};
}
LLMK_INLINE Vec round_nearest(Vec v) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.low, kMode), _mm256_round_ps(v.high, kMode)};
}
LLMK_INLINE __m256 scale_by_power8(__m256 v, __m256 n) {
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shift));
}
LLMK_INLINE Vec scale_by_power(Vec v, Vec n) {
  return {scale_by_power8(v.low, n.low), scale_by_power8(v.high, n.high)};
}
LLMK_INLINE Vec zero_below(Vec v, Vec x, float limit) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, bound, _CMP_LT_OQ), v.low),
          _mm256_andnot_ps(_mm256_cmp_ps(x.high, bound, _CMP_LT_OQ), v.high)};
}

LLMK_INLINE __m128 sum_to_four(Vec v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
LLMK_INLINE float sum(Vec v) {
  const __m128 four = sum_to_four(v);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Writes out[i] = sum(v[i]), added in the order of sum().
LLMK_INLINE void sums(const Vec (&v)[4], float* out) {
  const __m128 a = sum_to_four(v[0]), b = sum_to_four(v[1]), c = sum_to_four(v[2]), d = sum_to_four(v[3]);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD)));
}
LLMK_INLINE void sums(const Vec (&v)[16], float* out) {
  for (int i = 0; i < 16; i += 4) sums({v[i], v[i + 1], v[i + 2], v[i + 3]}, out + i);
}
LLMK_INLINE float largest(Vec v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

LLMK_INLINE unsigned equal8(__m256 v, float x) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(x), _CMP_EQ_OQ)));
}
LLMK_INLINE int first_lane_equal(Vec v, float x) {
  return __builtin_ctz(equal8(v.low, x) | equal8(v.high, x) << 8 | 1u << 16);
}
LLMK_INLINE unsigned between8(__m256 v, float low, float high) {
  const __m256 above = _mm256_cmp_ps(v, _mm256_set1_ps(low), _CMP_GT_OQ);
  const __m256 below = _mm256_cmp_ps(v, _mm256_set1_ps(high), _CMP_LE_OQ);
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_and_ps(above, below)));
}
LLMK_INLINE int find_between(Vec v, float low, float high, int32_t* indices) {
  unsigned mask = between8(v.low, low, high) | between8(v.high, low, high) << 8;
  int found = 0;
  for (; mask != 0; mask &= mask - 1) indices[found++] = __builtin_ctz(mask);
  return found;
}

}  // namespace llmk::LLMK_ARCH
