// The number formats in which paged attention multiplies. All operands are 32-bit units: one float, two bfloat16
// or four int8. A product broadcasts one unit of a row, multiplies it by 16 units of a panel and adds the result to an
// accumulator.
//
//  FloatForm     float32 FMA. Keys and values of bfloat16, float16 and int8 caches are converted when they are packed.
//  WidenedForm   Gives the same bits as FloatForm. Converts the bfloat16 units of the cache in registers, because this
//                is faster for few rows on AVX2.
//  BFloat16Form  VDPBF16PS for both products; queries and weights are rounded to bfloat16.
//  WordForm      VPMADDWD for both products, for AVX2 and int8 caches. Queries and softmax weights have 15 bits, with
//                scales like those of Int8Form.
//  Int8Form      VPDPBUSD for both products. The integer sums are exact, so the order of additions does not matter.
//                Queries have 15 bits and one scale per row. Softmax weights have 16 bits and one scale per row and
//                partition. Both are stored as a high and a low byte. The sums of the high bytes are shifted, then the
//                sums of the low bytes are added.
//
// The panels (paged_panels.h) are keys [16 groups of keys][unit of dims][16 keys] and values [unit of keys][dim]. The
// last dimension is spread over the lanes of a vector.
#pragma once
#include "../common/types.h"
#include "dot.h"
#include "rotary_attention.h"

namespace llmk::LLMK_ARCH::paged {

using Unit = uint32_t;

// Makes the compiler inline a member function always. LLMK_INLINE does the same for other functions.
#define LLMK_MEMBER inline __attribute__((always_inline))

constexpr int kPartition = 256;  // number of keys of a partition, which share one pass of the softmax
constexpr int kPartGroups = kPartition / static_cast<int>(kGroupKeys);
static_assert(kGroupKeys == kLanes, "a vector of a key panel is a group");
constexpr float kLog2E = 1.44269504088896341f;

// Returns 2^x for x <= 0 (and slightly above), but at least 2^-126. The result for 0 is exactly 1. The polynomial is a
// minimax polynomial with a relative error of 7.5e-8.
LLMK_INLINE Vec power_of_two(Vec x) {
  const Vec clamped = maximum(broadcast(-126.0f), x);
  const Vec n = round_nearest(clamped);
  const Vec r = sub(clamped, n);
  Vec p = fma(broadcast(1.53458120e-4f), r, broadcast(1.33999312e-3f));
  p = fma(p, r, broadcast(9.61848896e-3f));
  p = fma(p, r, broadcast(5.55032878e-2f));
  p = fma(p, r, broadcast(2.40226469e-1f));
  p = fma(p, r, broadcast(6.93147206e-1f));
  return scale_by_power(fma(p, r, broadcast(1.0f)), n);
}

#ifdef LLMK_VEC_AVX512
// Returns 2^x for x <= 0. The relative error is 7.5e-5 for kDegree 3 and 2.6e-6 for kDegree 4, also at x = 0.
// Multiplies by the power of two with the AVX-512 instruction for scaling.
template <int kDegree>
LLMK_INLINE Vec coarse_power_of_two(Vec x) {
  const __m512 clamped = maximum(broadcast(-126.0f), x).v;
  const Vec r = {_mm512_reduce_ps(clamped, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
  Vec p;
  if (kDegree == 3) {
    p = fma(broadcast(0.0780245226f), r, broadcast(0.226067155f));
    p = fma(p, r, broadcast(0.69583354f));
    p = fma(p, r, broadcast(0.999925219f));
  } else {
    p = fma(broadcast(0.0135341679f), r, broadcast(0.0520114606f));
    p = fma(p, r, broadcast(0.241442757f));
    p = fma(p, r, broadcast(0.693003834f));
    p = fma(p, r, broadcast(1.00000259f));
  }
  return {_mm512_scalef_ps(p.v, clamped)};  // multiplies by 2^floor(x)
}
#elif defined(LLMK_VEC_AVX2)
// The version of coarse_power_of_two() for AVX2. The last bits may differ, because r is rounded to nearest here and
// down in the AVX-512 version. The degree must be 4, because this polynomial is at least 1, so that no result is
// subnormal.
template <int kDegree>
LLMK_INLINE Vec coarse_power_of_two(Vec x) {
  static_assert(kDegree == 4, "the polynomial of degree 3 is below 1 at 0");
  const Vec clamped = maximum(broadcast(-126.0f), x);
  const Vec whole = {_mm256_floor_ps(clamped.low), _mm256_floor_ps(clamped.high)};
  const Vec r = sub(clamped, whole);
  Vec p = fma(broadcast(0.0135341679f), r, broadcast(0.0520114606f));
  p = fma(p, r, broadcast(0.241442757f));
  p = fma(p, r, broadcast(0.693003834f));
  p = fma(p, r, broadcast(1.00000259f));
  return scale_by_power(p, whole);
}
#endif

LLMK_INLINE Vec load_int8(const int8_t* p, int64_t n) {
#ifdef LLMK_VEC_AVX512
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(n), p);
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#else
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n && i < kLanes; ++i) lanes[i] = p[i];
  return load(lanes);
#endif
}

// Transposes 16 vectors: panel[i * stride + j] = lane i of rows[j], with unchanged bits.
LLMK_INLINE void store_transposed(const Vec (&rows)[16], Unit* panel, int64_t stride) {
#if defined(LLMK_VEC_AVX512)
  __m512 quads[4][4];  // quads[q][j]: the lanes l of rows 4q to 4q + 3 with l % 4 = j
  LLMK_UNROLL
  for (int q = 0; q < 4; ++q) {
    const __m512 a = rows[4 * q].v, b = rows[4 * q + 1].v, c = rows[4 * q + 2].v, d = rows[4 * q + 3].v;
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    quads[q][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
    quads[q][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    quads[q][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
    quads[q][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
  }
  LLMK_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0xDD);
    const __m512 even_high = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0xDD);
    _mm512_storeu_ps(panel + c * stride, _mm512_shuffle_f32x4(even, even_high, 0x88));
    _mm512_storeu_ps(panel + (c + 4) * stride, _mm512_shuffle_f32x4(odd, odd_high, 0x88));
    _mm512_storeu_ps(panel + (c + 8) * stride, _mm512_shuffle_f32x4(even, even_high, 0xDD));
    _mm512_storeu_ps(panel + (c + 12) * stride, _mm512_shuffle_f32x4(odd, odd_high, 0xDD));
  }
#else
  alignas(64) Unit all[16][kLanes];
  for (int j = 0; j < 16; ++j) std::memcpy(all[j], &rows[j], sizeof(all[j]));
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 16; ++j) panel[i * stride + j] = all[j][i];
  }
#endif
}

// Multiplies rows by panels of floats. The product classes of all other forms have the same functions:
//
//  lanes(p)             loads 16 units of a panel.
//  spread(p)            broadcasts one unit of a row.
//  step(a, b, total)    adds the products of both operands to an accumulator.
//  shift(), join()      combine the sums of the two passes of Int8Form. WordForm has one pass and only uses shift().
//  restore(sums)        loads an accumulator from memory
//  result(total)        converts an accumulator to floats
struct FloatProduct {
  // Number of parts in which a unit is multiplied. 1: the whole unit is multiplied by one word of a row. With
  // WidenedForm, each element of a unit is a part, and is multiplied by its own word of the row. With WordForm, two
  // elements are a part.
  static constexpr int kParts = 1;
  static constexpr bool kIntegers = false;  // true: the accumulators are integers
  using Acc = Vec;
  using Operand = Vec;
  static inline Acc clear() { return zero(); }
  static inline Operand lanes(const Unit* p) { return load(reinterpret_cast<const float*>(p)); }
  static inline Operand spread(const Unit* p) { return broadcast(bits_to_float(*p)); }
#ifdef LLMK_VEC_AVX2
  static LLMK_MEMBER Vec part(const Unit* p, int) { return lanes(p); }
#endif
  static inline Acc step(Operand a, Operand b, Acc total) { return fma(a, b, total); }
  static inline Acc shift(Acc total, int32_t) { return total; }
  static inline Acc join(Acc, Acc low) { return low; }
  static inline Acc restore(const float* sums) { return load(sums); }
  static inline Vec result(Acc total) { return total; }
};

struct FloatForm {
  using ScoreProduct = FloatProduct;
  using ValueProduct = FloatProduct;
  // The constant kPerUnit is the number of elements in a unit, and kPasses is the number of passes over the units. A
  // packed row has kRowWords 32-bit words for each unit.
  static constexpr int kPerUnit = 1, kPasses = 1, kRowWords = 1;
  static constexpr bool kPacks = true;         // true: keys and values of a cache without 4-byte units are packed
  static constexpr int64_t kDimStep = kLanes;  // dim is padded to a multiple of this number

  static inline Vec power(Vec x) { return power_of_two(x); }

  // Loads 16 elements of a row of the cache as floats. If not kWhole, only the first `n` elements exist.
  template <bool kWhole, class C>
  static inline __attribute__((always_inline)) Vec load_key(const C* p, int64_t n) {
    return kWhole ? load(p) : load_n(p, n);
  }
  template <bool kWhole>
  static inline __attribute__((always_inline)) Vec load_key(const int8_t* p, int64_t n) {
    return load_int8(p, n);
  }

  // Copies kDimStep dims of the value of one key to a panel. If not kWhole, only the first `n` dims exist.
  template <bool kWhole, class C>
  static inline __attribute__((always_inline)) void pack_values(const C* const (&rows)[1], int64_t n, Unit* out) {
    store(reinterpret_cast<float*>(out), load_key<kWhole>(rows[0], n));
  }

  static inline void pack_query(const float* x, int64_t dim, Unit* out, int64_t, float*, int32_t* offset) {
    std::memcpy(static_cast<void*>(out), x, static_cast<size_t>(dim) * sizeof(float));
    *offset = 0;
  }

  // Receives the softmax weights of a row and stores them. A call of put() stores the weights of two groups of keys,
  // kLanes keys each. If the values have scales, multiplies each weight by the scale of its value.
  struct Weights {
    const float* value_scales;  // scales of the values [kPartition], or null
    Unit* out;
    Vec masses = zero();  // each lane: sum of the weights of its keys

    LLMK_MEMBER Weights(const float* value_scales, float, Unit* out) : value_scales(value_scales), out(out) {}
    LLMK_MEMBER void put(int64_t group, Vec first, Vec second) {
      masses = add(masses, add(first, second));
      put_one(group, first);
      put_one(group + 1, second);
    }
    LLMK_MEMBER void put_one(int64_t group, Vec p) {
      const Vec weight = value_scales == nullptr ? p : mul(p, load(value_scales + group * kLanes));
      store(reinterpret_cast<float*>(out) + group * kLanes, weight);
    }
    LLMK_MEMBER Vec mass() const { return masses; }
    // Returns the factor by which the sums of weight * value must be multiplied.
    LLMK_MEMBER float step() const { return 1.0f; }
  };

  static inline void restore_order(float*) {}
};

}  // namespace llmk::LLMK_ARCH::paged

#include "paged_units_bf16.h"
#include "paged_units_int8.h"
#include "paged_units_words.h"
#include "paged_units_widened.h"
