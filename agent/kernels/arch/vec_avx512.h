// The type Vec of vec.h for AVX-512: 16 floats in one register. Needs AVX-512 F, BW, VL and DQ.
#pragma once
#include <immintrin.h>

namespace llmk::LLMK_ARCH {

struct Vec {
  __m512 v;
};

LLMK_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
LLMK_INLINE Vec zero() { return {_mm512_setzero_ps()}; }

LLMK_INLINE __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << n) - 1);
}

LLMK_INLINE __m512 widen(__m256i bits, const half_t*) { return _mm512_cvtph_ps(bits); }
LLMK_INLINE __m512 widen(__m256i bits, const bfloat_t*) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
LLMK_INLINE __m256i narrow(__m512 v, half_t*) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
LLMK_INLINE __m256i narrow(__m512 v, bfloat_t*) {
#ifdef LLMK_BF16_DOT
  // VCVTNEPS2BF16 rounds all numbers like the code below, except that it turns subnormal numbers into zeros. So it is
  // used only if no number is subnormal.
  constexpr int kDenormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(v, kDenormal) == 0, 1)) {
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
  }
#endif
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

LLMK_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
template <class T>
LLMK_INLINE Vec load(const T* p) {
  return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p)};
}
LLMK_INLINE Vec load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
template <class T>
LLMK_INLINE Vec load_n(const T* p, int64_t n) {
  return {widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), p)};
}
LLMK_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v.v); }
template <class T>
LLMK_INLINE void store(T* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v.v, p));
}
LLMK_INLINE void store_n(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v.v); }
template <class T>
LLMK_INLINE void store_n(T* p, Vec v, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(v.v, p));
}

LLMK_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
LLMK_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
LLMK_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLMK_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
LLMK_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LLMK_INLINE Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
LLMK_INLINE Vec minimum(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

LLMK_INLINE Vec keep_first(Vec v, int64_t n, float other) {
  return {_mm512_mask_blend_ps(first_lanes(n), _mm512_set1_ps(other), v.v)};
}
LLMK_INLINE Vec hide_first(Vec v, int64_t n, float other) {
  return {_mm512_mask_blend_ps(first_lanes(n), v.v, _mm512_set1_ps(other))};
}
LLMK_INLINE Vec round_nearest(Vec v) {
  return {_mm512_roundscale_ps(v.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
LLMK_INLINE Vec scale_by_power(Vec v, Vec n) { return {_mm512_scalef_ps(v.v, n.v)}; }
LLMK_INLINE Vec zero_below(Vec v, Vec x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), v.v)};
}

LLMK_INLINE __m128 sum_to_four(Vec v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
LLMK_INLINE float sum(Vec v) {
  const __m128 four = sum_to_four(v);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Reduces each of the four vectors to four partial sums. Adds in the order of sum(). Lanes 4i to 4i + 3 of the result
// are the partial sums of vector i.
LLMK_INLINE __m512 sums_of_four(Vec a, Vec b, Vec c, Vec d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}
LLMK_INLINE __m512 sums_of_two(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}
LLMK_INLINE void sums(const Vec (&v)[16], float* out) {
  const __m512 even = sums_of_two(sums_of_four(v[0], v[4], v[8], v[12]), sums_of_four(v[1], v[5], v[9], v[13]));
  const __m512 odd = sums_of_two(sums_of_four(v[2], v[6], v[10], v[14]), sums_of_four(v[3], v[7], v[11], v[15]));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xDD)));
}
LLMK_INLINE void sums(const Vec (&v)[4], float* out) {
  const __m128 a = sum_to_four(v[0]), b = sum_to_four(v[1]), c = sum_to_four(v[2]), d = sum_to_four(v[3]);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD)));
}
LLMK_INLINE float largest(Vec v) { return _mm512_reduce_max_ps(v.v); }

// Returns the first lane that equals x, or 16 if no lane does.
LLMK_INLINE int first_lane_equal(Vec v, float x) {
  return __builtin_ctz(_mm512_cmp_ps_mask(v.v, _mm512_set1_ps(x), _CMP_EQ_OQ) | 1u << 16);
}
// Writes the indices of the lanes with low < v <= high, in ascending order. Returns their number.
LLMK_INLINE int find_between(Vec v, float low, float high, int32_t* indices) {
  const __mmask16 above = _mm512_cmp_ps_mask(v.v, _mm512_set1_ps(low), _CMP_GT_OQ);
  unsigned mask = _mm512_mask_cmp_ps_mask(above, v.v, _mm512_set1_ps(high), _CMP_LE_OQ);
  int found = 0;
  for (; mask != 0; mask &= mask - 1) indices[found++] = __builtin_ctz(mask);
  return found;
}

}  // namespace llmk::LLMK_ARCH
