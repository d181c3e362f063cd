// WordForm (paged_units.h): paged attention over int8 caches with products of 16-bit words, for AVX2 without VPDPBUSD.
//
// A product meets bytes 0 and 2 of a unit first, then bytes 1 and 3. It widens both pairs to words and multiplies them
// by the pairs of the row with VPMADDWD. So a row has two pairs for each unit. All sums are exact.
#pragma once

#if defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
namespace llmk::LLMK_ARCH::paged {

// Multiplies keys by signed queries. A key is stored as an unsigned byte, with 128 added. To correct this, shift() adds
// the row's offset, -128 * sum(query).
struct WordScoreProduct {
  using Acc = Ints;
  static constexpr int kParts = 2;
  static constexpr bool kIntegers = true;
  static LLMK_MEMBER Acc clear() { return broadcast_int(0); }
  static LLMK_MEMBER Ints part(const Unit* p, int i) {
    const Ints bytes = load_ints(p);
    return i == 0 ? even_bytes(bytes) : odd_bytes(bytes);
  }
  static LLMK_MEMBER Acc shift(Acc total, int32_t offset) { return add(total, broadcast_int(offset)); }
  static LLMK_MEMBER Acc join(Acc, Acc low) { return low; }
  // Loads integer sums that keep() has stored. Until a sum is complete, the memory for its float value holds the
  // integer.
  static LLMK_MEMBER Acc restore(const float* sums) { return load_ints(sums); }
  static LLMK_MEMBER void keep(Acc total, float* sums) { store_ints(sums, total); }
  static LLMK_MEMBER Vec result(Acc total) { return to_floats(total); }
};

// Multiplies values, which are signed bytes, by softmax weights.
struct WordValueProduct : WordScoreProduct {
  static LLMK_MEMBER Ints part(const Unit* p, int i) {
    const Ints bytes = load_ints(p);
    const __m256i low = i == 0 ? _mm256_slli_epi16(bytes.low, 8) : bytes.low;
    const __m256i high = i == 0 ? _mm256_slli_epi16(bytes.high, 8) : bytes.high;
    return {_mm256_srai_epi16(low, 8), _mm256_srai_epi16(high, 8)};
  }
  static LLMK_MEMBER Acc shift(Acc total, int32_t) { return total; }
};

struct WordForm : ByteForm {
  using ScoreProduct = WordScoreProduct;
  using ValueProduct = WordValueProduct;
  static constexpr int kPasses = 1;
  static constexpr float kLargestWeight = 32767.0f;

  // Stores a quantised query as pairs of words.
  static inline void pack_query(const float* x, int64_t dim, Unit* out, int64_t, float* factor, int32_t* offset) {
    int16_t* words = reinterpret_cast<int16_t*>(out);
    quantize_query(x, dim, factor, offset,
                   [=](int64_t d, Ints q) __attribute__((always_inline)) { store_pairs(words + d, q); });
  }

  // Multiplies each softmax weight of a row by the scale of its value, and stores the product in 15 bits. The largest
  // possible product, weight 1 times the largest scale of a value, is stored as 32767.
  struct Weights {
    const float* value_scales;
    const float largest_scale;
    const Vec inverse;
    int16_t* const words;
    Vec masses = zero();

    LLMK_MEMBER Weights(const float* value_scales, float largest_scale, Unit* out)
        : value_scales(value_scales),
          largest_scale(largest_scale),
          inverse(broadcast(largest_scale > 0 ? kLargestWeight / largest_scale : 0.0f)),
          words(reinterpret_cast<int16_t*>(out)) {}

    LLMK_MEMBER void put(int64_t group, Vec first, Vec second) {
      masses = add(masses, add(first, second));
      put_one(group, first);
      put_one(group + 1, second);
    }
    LLMK_MEMBER void put_one(int64_t group, Vec p) {
      const Vec scale = mul(load(value_scales + group * kLanes), inverse);
      store_pairs(words + group * kLanes, to_ints(mul(p, scale)));
    }
    LLMK_MEMBER Vec mass() const { return masses; }
    LLMK_MEMBER float step() const { return largest_scale / kLargestWeight; }
  };
  static_assert(int64_t{kPartition} * 32767 * 127 < int64_t{1} << 31, "a sum of weights times values is an int32");

 private:
  // Stores 16 numbers as words. Each four numbers are in the order 0, 2, 1, 3, in which a product meets bytes.
  static LLMK_MEMBER void store_pairs(int16_t* p, Ints numbers) {
    const __m256i low = _mm256_shuffle_epi32(numbers.low, 0xD8), high = _mm256_shuffle_epi32(numbers.high, 0xD8);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
  }
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
