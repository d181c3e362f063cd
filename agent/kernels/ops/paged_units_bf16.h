// BFloat16Form (paged_units.h): paged attention with products of bfloat16.
#pragma once

#ifdef LLMK_BF16_DOT
namespace llmk::LLMK_ARCH::paged {

struct BFloat16Product {
  static constexpr int kParts = 1;
  static constexpr bool kIntegers = false;
  using Acc = Vec;
  using Operand = __m512bh;
  static inline Acc clear() { return zero(); }
  static inline Operand lanes(const Unit* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static inline Operand spread(const Unit* p) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static inline Acc step(Operand a, Operand b, Acc total) { return {_mm512_dpbf16_ps(total.v, b, a)}; }
  static inline Acc shift(Acc total, int32_t) { return total; }
  static inline Acc join(Acc, Acc low) { return low; }
  static inline Acc restore(const float* sums) { return load(sums); }
  static inline Vec result(Acc total) { return total; }
};

struct BFloat16Form {
  using ScoreProduct = BFloat16Product;
  using ValueProduct = BFloat16Product;
  static constexpr int kPerUnit = 2, kPasses = 1, kRowWords = 1;
  static constexpr bool kPacks = true;
  static constexpr int64_t kDimStep = 2 * kLanes;

  // Uses a polynomial of degree 3. Its error is smaller than the error of rounding the weight to bfloat16.
  static LLMK_MEMBER Vec power(Vec x) { return coarse_power_of_two<3>(x); }

  template <bool kWhole>
  static inline __attribute__((always_inline)) Vec load_key(const bfloat_t* p, int64_t n) {
    if (kWhole) return {_mm512_loadu_ps(p)};
    const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p))};
  }

  // Interleaves the values of two keys: `out` receives 32 pairs, one for each dim. If not kWhole, the second row may be
  // null and counts as zero.
  template <bool kWhole>
  static inline __attribute__((always_inline)) void pack_values(const bfloat_t* const (&rows)[2], int64_t n,
                                                                Unit* out) {
    const __m512i first = _mm512_castps_si512(load_key<kWhole>(rows[0], n).v);
    const __m512i second = !kWhole && rows[1] == nullptr ? _mm512_setzero_si512()
                                                         : _mm512_castps_si512(load_key<kWhole>(rows[1], n).v);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(first, low, second));
    _mm512_storeu_si512(out + kLanes, _mm512_permutex2var_epi16(first, high, second));
  }

  static inline void pack_query(const float* x, int64_t dim, Unit* out, int64_t, float*, int32_t* offset) {
    bfloat_t* rounded = reinterpret_cast<bfloat_t*>(out);
    for (int64_t d = 0; d < dim; d += kLanes) store_part(rounded + d, load_part(x + d, dim - d), dim - d);
    *offset = 0;
  }

  // Rounds the softmax weights of a row to bfloat16. The mass is the sum of the rounded weights, so the weighted mean
  // of the values is not biased by rounding.
  struct Weights {
    Unit* out;
    Vec masses[2] = {zero(), zero()};  // sums of rounded weights: of the even and of the odd pairs of key groups

    LLMK_MEMBER Weights(const float*, float, Unit* out) : out(out) {}
    LLMK_MEMBER void put(int64_t group, Vec first, Vec second) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(second.v, first.v);
      _mm512_storeu_si512(out + group / 2 * kLanes, reinterpret_cast<__m512i>(pairs));
      Vec& mass = masses[group / 2 % 2];
      mass = {_mm512_dpbf16_ps(mass.v, pairs, reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3F80)))};
    }
    LLMK_MEMBER Vec mass() const { return add(masses[0], masses[1]); }
    LLMK_MEMBER float step() const { return 1.0f; }
  };

  static inline void restore_order(float*) {}
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
