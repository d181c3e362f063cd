// Int8Form (paged_units.h): paged attention with products of bytes.
#pragma once

#ifdef LLMK_VNNI
namespace llmk::LLMK_ARCH::paged {

// Runs the instruction VPDPBUSD. This is assembly, because GCC 12 copies the accumulators of the intrinsic in every
// iteration of a loop.
LLMK_INLINE __m512i dot_quads(__m512i total, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(unsigned_bytes), "v"(signed_bytes));
  return total;
}

// Multiplies keys by signed queries. The keys are unsigned bytes, because 128 was added to them. The row's offset
// removes the excess of 128 * sum(query).
struct Int8ScoreProduct {
  using Acc = __m512i;
  using Operand = __m512i;
  static constexpr int kShift = 7;
  static inline Acc clear() { return _mm512_setzero_si512(); }
  static inline Operand lanes(const Unit* p) { return _mm512_loadu_si512(p); }
  static inline Operand spread(const Unit* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static inline Acc step(Operand a, Operand b, Acc total) { return dot_quads(total, b, a); }
  static inline Acc shift(Acc total, int32_t offset) {
    return _mm512_add_epi32(_mm512_slli_epi32(total, kShift), _mm512_set1_epi32(offset));
  }
  static inline Acc join(Acc high, Acc low) { return _mm512_add_epi32(high, low); }
  // Loads integer sums from the memory where their final float values will be stored.
  static inline Acc restore(const float* sums) { return _mm512_loadu_si512(sums); }
  static inline void keep(Acc total, float* sums) { _mm512_storeu_si512(sums, total); }
  static inline Vec result(Acc total) { return {_mm512_cvtepi32_ps(total)}; }
};

// Multiplies unsigned weights by signed values.
struct Int8ValueProduct : Int8ScoreProduct {
  static constexpr int kShift = 8;
  static inline Acc step(Operand a, Operand b, Acc total) { return dot_quads(total, a, b); }
  static inline Acc shift(Acc total, int32_t) { return _mm512_slli_epi32(total, kShift); }
};

struct Int8Form {
  using ScoreProduct = Int8ScoreProduct;
  using ValueProduct = Int8ValueProduct;
  static constexpr int kPerUnit = 4, kPasses = 2;
  static constexpr int64_t kDimStep = 4 * kLanes;

  // Uses a polynomial of degree 4, because its error is about as large as the rounding error of a 16-bit weight.
  static LLMK_MEMBER Vec power(Vec x) { return coarse_power_of_two<4>(x); }
  // A query is high * 2^7 + low with two int8 numbers, so it is at most 127 * 2^7 + 63.
  static constexpr float kLargestQuery = 16319.0f;
  static constexpr float kLargestWeight = 65535.0f;

  template <bool kWhole>
  static inline __attribute__((always_inline)) __m512i load_bytes(const int8_t* p, int64_t n) {
    if (kWhole || n >= 64) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p);
  }
  template <bool kWhole>
  static inline __attribute__((always_inline)) Vec load_key(const int8_t* p, int64_t n) {
    return {_mm512_castsi512_ps(_mm512_xor_si512(load_bytes<kWhole>(p, n), _mm512_set1_epi8(-128)))};
  }

  // Interleaves the values of four keys. If not kWhole, rows that are null count as zero. The dims are not in order:
  // lane 4 * l + c of vector i holds dim 16 * l + 4 * i + c. The function restore_order() undoes this for the sums.
  template <bool kWhole>
  static inline __attribute__((always_inline)) void pack_values(const int8_t* const (&rows)[4], int64_t n, Unit* out) {
    __m512i row[4];
    LLMK_UNROLL
    for (int i = 0; i < 4; ++i) {
      row[i] = !kWhole && rows[i] == nullptr ? _mm512_setzero_si512() : load_bytes<kWhole>(rows[i], n);
    }
    const __m512i low = _mm512_unpacklo_epi8(row[0], row[1]), high = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i low2 = _mm512_unpacklo_epi8(row[2], row[3]), high2 = _mm512_unpackhi_epi8(row[2], row[3]);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low, low2));
    _mm512_storeu_si512(out + kLanes, _mm512_unpackhi_epi16(low, low2));
    _mm512_storeu_si512(out + 2 * kLanes, _mm512_unpacklo_epi16(high, high2));
    _mm512_storeu_si512(out + 3 * kLanes, _mm512_unpackhi_epi16(high, high2));
  }

  static LLMK_MEMBER void store_bytes(int8_t* p, __m128i bytes, int64_t n) {
    if (n >= kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    _mm_mask_storeu_epi8(p, first_lanes(n), bytes);
  }

  static inline void pack_query(const float* x, int64_t dim, Unit* out, int64_t units, float* factor, int32_t* offset) {
    Vec top = zero();
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec v = load_part(x + d, dim - d);
      top = maximum(top, maximum(v, sub(zero(), v)));
    }
    const float most = largest(top);
    const Vec inverse = broadcast(most > 0 ? kLargestQuery / most : 0.0f);
    int8_t* high = reinterpret_cast<int8_t*>(out);
    int8_t* low = reinterpret_cast<int8_t*>(out + units);
    std::memset(static_cast<void*>(out), 0, static_cast<size_t>(units) * 2 * sizeof(Unit));
    __m512i total = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim; d += kLanes) {
      const __m512i q = _mm512_cvtps_epi32(mul(load_part(x + d, dim - d), inverse).v);
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      const __m512i lower = _mm512_sub_epi32(q, _mm512_slli_epi32(upper, 7));
      total = _mm512_add_epi32(total, q);
      store_bytes(high + d, _mm512_cvtepi32_epi8(upper), dim - d);
      store_bytes(low + d, _mm512_cvtepi32_epi8(lower), dim - d);
    }
    *offset = -128 * _mm512_reduce_add_epi32(total);
    *factor *= most / kLargestQuery;
  }

  // Rounds the weights of a row to 16 bits, after multiplying each weight by the scale of its value.
  //
  // The largest possible weight is that of the best key if its value has the largest scale. The rounding error of any
  // weight is at most 2^-17 of this weight. A sum of kPartition weights times values is below 2^31.
  struct Weights {
    const float* value_scales;
    const float largest_scale;
    const Vec inverse;
    uint8_t* const high;
    uint8_t* const low;
    Vec masses = zero();
    __m512i words;  // 16-bit weights of the previous two groups

    LLMK_MEMBER Weights(const float* value_scales, float largest_scale, Unit* out)
        : value_scales(value_scales),
          largest_scale(largest_scale),
          inverse(broadcast(largest_scale > 0 ? kLargestWeight / largest_scale : 0.0f)),
          high(reinterpret_cast<uint8_t*>(out)),
          low(high + kPartition) {}

    // Takes the weights of two groups of keys. The caller passes the groups in ascending order, and their number is a
    // multiple of four. Every second call stores the weights of four groups.
    LLMK_MEMBER void put(int64_t group, Vec first, Vec second) {
      masses = add(masses, add(first, second));
      // The 16-bit weights of both groups: four of the first group, then four of the second group, and so on.
      const __m512i mixed = _mm512_packus_epi32(whole(first, group), whole(second, group + 1));
      if (group % 4 == 0) {
        words = mixed;
        return;
      }
      const __m512i byte = _mm512_set1_epi16(0xFF);
      const int64_t key = (group - 2) * kGroupKeys;
      _mm512_storeu_si512(low + key, in_order(_mm512_and_si512(words, byte), _mm512_and_si512(mixed, byte)));
      _mm512_storeu_si512(high + key, in_order(_mm512_srli_epi16(words, 8), _mm512_srli_epi16(mixed, 8)));
    }
    // Returns the low (or high) bytes of the weights of four groups, group after group.
    static LLMK_MEMBER __m512i in_order(__m512i words, __m512i more_words) {
      const __m512i quads = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      return _mm512_permutexvar_epi32(quads, _mm512_packus_epi16(words, more_words));
    }
    LLMK_MEMBER __m512i whole(Vec p, int64_t group) const {
      return _mm512_cvtps_epi32(mul(p, mul(load(value_scales + group * kLanes), inverse)).v);
    }
    LLMK_MEMBER Vec mass() const { return masses; }
    LLMK_MEMBER float step() const { return largest_scale / kLargestWeight; }
  };
  static_assert(int64_t{kPartition} * 65535 * 127 < int64_t{1} << 31, "a sum of weights times values is an int32");

  // Restores the order of the 64 sums that pack_values changed.
  static inline void restore_order(float* sums) {
    const __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16), c = _mm512_loadu_ps(sums + 32),
                 d = _mm512_loadu_ps(sums + 48);
    const __m512 ab_even = _mm512_shuffle_f32x4(a, b, 0x88), ab_odd = _mm512_shuffle_f32x4(a, b, 0xDD);
    const __m512 cd_even = _mm512_shuffle_f32x4(c, d, 0x88), cd_odd = _mm512_shuffle_f32x4(c, d, 0xDD);
    _mm512_storeu_ps(sums, _mm512_shuffle_f32x4(ab_even, cd_even, 0x88));
    _mm512_storeu_ps(sums + 16, _mm512_shuffle_f32x4(ab_odd, cd_odd, 0x88));
    _mm512_storeu_ps(sums + 32, _mm512_shuffle_f32x4(ab_even, cd_even, 0xDD));
    _mm512_storeu_ps(sums + 48, _mm512_shuffle_f32x4(ab_odd, cd_odd, 0xDD));
  }
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
