// ByteForm: what the forms for int8 caches share. Int8Form (paged_units.h): paged attention with products of bytes.
#pragma once

#if defined(LLMK_VNNI) || defined(LLMK_VEC_AVX2)
namespace llmk::LLMK_ARCH::paged {

// Quantises queries, and packs keys and values of caches whose units are not of 4 bytes.
struct ByteForm {
  static constexpr int kPerUnit = 4, kRowWords = 2;
  static constexpr bool kPacks = true;
  static constexpr int64_t kDimStep = 4 * kLanes;

  // Uses a polynomial of degree 4. Its error is about as large as the error of rounding the weight to 16 bits.
  static LLMK_MEMBER Vec power(Vec x) { return coarse_power_of_two<4>(x); }
  // Int8Form stores a query as high * 2^7 + low. `high` is at most 127 and `low` at most 63, so the largest query is
  // 16319.
  static constexpr float kLargestQuery = 16319.0f;

  template <bool kWhole>
  static LLMK_MEMBER Ints load_bytes(const int8_t* p, int64_t n) {
    if (kWhole || n >= 64) return load_ints(p);
#ifdef LLMK_VEC_AVX512
    return {_mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p)};
#else
    int8_t bytes[64] = {};
    std::memcpy(bytes, p, static_cast<size_t>(n));
    return load_ints(bytes);
#endif
  }
  template <bool kWhole>
  static LLMK_MEMBER Vec load_key(const int8_t* p, int64_t n) {
    return as_floats(flip(load_bytes<kWhole>(p, n), kKeyBias));
  }

  // Interleaves the values of four keys. If not kWhole, rows that are null count as zero. The dims are not in order:
  // lane 4 * l + c of vector i holds dim 16 * l + 4 * i + c. The function restore_order() undoes this for the sums.
  template <bool kWhole>
  static LLMK_MEMBER void pack_values(const int8_t* const (&rows)[4], int64_t n, Unit* out) {
    Ints row[4];
    LLMK_UNROLL
    for (int i = 0; i < 4; ++i) {
      row[i] = !kWhole && rows[i] == nullptr ? broadcast_int(0) : load_bytes<kWhole>(rows[i], n);
    }
#ifdef LLMK_VEC_AVX512
    const __m512i low = _mm512_unpacklo_epi8(row[0].v, row[1].v), high = _mm512_unpackhi_epi8(row[0].v, row[1].v);
    const __m512i low2 = _mm512_unpacklo_epi8(row[2].v, row[3].v), high2 = _mm512_unpackhi_epi8(row[2].v, row[3].v);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low, low2));
    _mm512_storeu_si512(out + kLanes, _mm512_unpackhi_epi16(low, low2));
    _mm512_storeu_si512(out + 2 * kLanes, _mm512_unpacklo_epi16(high, high2));
    _mm512_storeu_si512(out + 3 * kLanes, _mm512_unpackhi_epi16(high, high2));
#else
    interleave_bytes(row[0].low, row[1].low, row[2].low, row[3].low, out);
    interleave_bytes(row[0].high, row[1].high, row[2].high, row[3].high, out + kLanes / 2);
#endif
  }

  // Quantises a query to 15 bits. Calls put(d, numbers) with the numbers of 16 dims from d on; those after the last dim
  // are zero. Multiplies *factor by the scale of the query. *offset corrects the products with unsigned keys.
  template <class Put>
  static LLMK_MEMBER void quantize_query(const float* x, int64_t dim, float* factor, int32_t* offset, const Put& put) {
    Vec top = zero();
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec v = load_part(x + d, dim - d);
      top = maximum(top, maximum(v, sub(zero(), v)));
    }
    const float most = largest(top);
    const Vec inverse = broadcast(most > 0 ? kLargestQuery / most : 0.0f);
    Ints total = broadcast_int(0);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Ints q = to_ints(mul(load_part(x + d, dim - d), inverse));
      total = add(total, q);
      put(d, q);
    }
#ifdef LLMK_VEC_AVX512
    *offset = -128 * _mm512_reduce_add_epi32(total.v);
#else
    int32_t parts[kLanes], sum = 0;
    store_ints(parts, total);
    for (const int32_t part : parts) sum += part;
    *offset = -128 * sum;
#endif
    *factor *= most / kLargestQuery;
  }

  // Puts 64 sums back into the order of the dims, which pack_values() has changed. The sums are 16 blocks of 4 sums.
  // Block 4 * i + l becomes block 4 * l + i.
  static inline void restore_order(float* sums) {
    float blocks[16][4];
    std::memcpy(blocks, sums, sizeof(blocks));
    for (int i = 0; i < 16; ++i) std::memcpy(sums + (i % 4 * 4 + i / 4) * 4, blocks[i], sizeof(blocks[i]));
  }

 private:
#ifdef LLMK_VEC_AVX512
  static LLMK_MEMBER Vec as_floats(Ints bits) { return {_mm512_castsi512_ps(bits.v)}; }
#else
  static LLMK_MEMBER Vec as_floats(Ints bits) {
    return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)};
  }
  // Interleaves 32 bytes of four rows, in lanes of 128 bits. The four results are stored kLanes units apart.
  static LLMK_MEMBER void interleave_bytes(__m256i a, __m256i b, __m256i c, __m256i d, Unit* out) {
    const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
    const __m256i low2 = _mm256_unpacklo_epi8(c, d), high2 = _mm256_unpackhi_epi8(c, d);
    const __m256i results[4] = {_mm256_unpacklo_epi16(low, low2), _mm256_unpackhi_epi16(low, low2),
                                _mm256_unpacklo_epi16(high, high2), _mm256_unpackhi_epi16(high, high2)};
    LLMK_UNROLL
    for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * kLanes), results[i]);
  }
#endif
};
}  // namespace llmk::LLMK_ARCH::paged
#endif

#ifdef LLMK_VNNI
namespace llmk::LLMK_ARCH::paged {

// Multiplies unsigned by signed bytes (VPDPBUSD). Returns `total` plus the sum of the four products in each 32-bit
// lane. This is assembly, because GCC 12 copies the accumulators of the intrinsic in every iteration of a loop.
LLMK_INLINE Ints dot_bytes(Ints total, Ints unsigned_bytes, Ints signed_bytes) {
#ifdef LLMK_VEC_AVX512
  asm("vpdpbusd %2, %1, %0" : "+v"(total.v) : "v"(unsigned_bytes.v), "v"(signed_bytes.v));
#else
  add_products(&total.low, unsigned_bytes.low, signed_bytes.low);
  add_products(&total.high, unsigned_bytes.high, signed_bytes.high);
#endif
  return total;
}

// Multiplies keys by signed queries. A key is stored as an unsigned byte, with 128 added. This makes each score too
// large by 128 * sum(query). To correct this, shift() adds the row's offset, -128 * sum(query).
struct Int8ScoreProduct {
  using Acc = Ints;
  using Operand = Ints;
  static constexpr int kParts = 1, kShift = 7;
  static constexpr bool kIntegers = true;
  static LLMK_MEMBER Acc clear() { return broadcast_int(0); }
  static LLMK_MEMBER Operand lanes(const Unit* p) { return load_ints(p); }
  static LLMK_MEMBER Operand spread(const Unit* p) { return broadcast_int(static_cast<int>(*p)); }
  static LLMK_MEMBER Acc step(Operand a, Operand b, Acc total) { return dot_bytes(total, b, a); }
  static LLMK_MEMBER Acc shift(Acc total, int32_t offset) {
    return add(shift_left<kShift>(total), broadcast_int(offset));
  }
  static LLMK_MEMBER Acc join(Acc high, Acc low) { return add(high, low); }
  // Loads integer sums that keep() has stored. Until a sum is complete, the memory for its float value holds the
  // integer.
  static LLMK_MEMBER Acc restore(const float* sums) { return load_ints(sums); }
  static LLMK_MEMBER void keep(Acc total, float* sums) { store_ints(sums, total); }
  static LLMK_MEMBER Vec result(Acc total) { return to_floats(total); }
};

// Multiplies values, which are signed bytes, by softmax weights, which are unsigned bytes.
struct Int8ValueProduct : Int8ScoreProduct {
  static constexpr int kShift = 8;
  static LLMK_MEMBER Acc step(Operand a, Operand b, Acc total) { return dot_bytes(total, a, b); }
  static LLMK_MEMBER Acc shift(Acc total, int32_t) { return shift_left<kShift>(total); }
};

struct Int8Form : ByteForm {
  using ScoreProduct = Int8ScoreProduct;
  using ValueProduct = Int8ValueProduct;
  static constexpr int kPasses = 2;
  static constexpr float kLargestWeight = 65535.0f;

  // Stores a quantised query as two rows of units: the high bytes, then the low bytes.
  static inline void pack_query(const float* x, int64_t dim, Unit* out, int64_t units, float* factor, int32_t* offset) {
    int8_t* high = reinterpret_cast<int8_t*>(out);
    int8_t* low = reinterpret_cast<int8_t*>(out + units);
    std::memset(static_cast<void*>(out), 0, static_cast<size_t>(units) * 2 * sizeof(Unit));
    quantize_query(x, dim, factor, offset, [=](int64_t d, Ints q) __attribute__((always_inline)) {
      // q + 64 is upper * 128 + lower + 64, where lower + 64 is not negative.
      const Ints moved = add(q, broadcast_int(64)), upper = shift_right_signed<7>(moved);
      const Ints lower = add(low_bits<7>(moved), broadcast_int(-64));
      store_bytes(high + d, upper, dim - d);
      store_bytes(low + d, lower, dim - d);
    });
  }

  // Multiplies each softmax weight of a row by the scale of its value, and stores the product in 16 bits.
  //
  // The largest possible product, weight 1 times the largest scale of a value, is stored as 65535. So the rounding
  // error is at most 2^-17 of this product. A sum of kPartition stored products times values is below 2^31.
  struct Weights {
    const float* value_scales;
    const float largest_scale;
    const Vec inverse;
    uint8_t* const high;
    uint8_t* const low;
    Vec masses = zero();
    Ints words;  // 16-bit weights of the previous two groups

    LLMK_MEMBER Weights(const float* value_scales, float largest_scale, Unit* out)
        : value_scales(value_scales),
          largest_scale(largest_scale),
          inverse(broadcast(largest_scale > 0 ? kLargestWeight / largest_scale : 0.0f)),
          high(reinterpret_cast<uint8_t*>(out)),
          low(high + kPartition) {}

    // Receives the softmax weights of two groups of keys: groups `group` and `group` + 1. The caller must pass the
    // groups in ascending order, and an even number of pairs. Every second call stores the weights of four groups.
    LLMK_MEMBER void put(int64_t group, Vec first, Vec second) {
      masses = add(masses, add(first, second));
      const Ints mixed = pack_words(whole(first, group), whole(second, group + 1));
      if (group % 4 == 0) {
        words = mixed;
        return;
      }
      const int64_t key = (group - 2) * kGroupKeys;
      store_ints(low + key, in_order(low_byte(words), low_byte(mixed)));
      store_ints(high + key, in_order(high_byte(words), high_byte(mixed)));
    }
    LLMK_MEMBER Ints whole(Vec p, int64_t group) const {
      return to_ints(mul(p, mul(load(value_scales + group * kLanes), inverse)));
    }
    LLMK_MEMBER Vec mass() const { return masses; }
    LLMK_MEMBER float step() const { return largest_scale / kLargestWeight; }
  };
  static_assert(int64_t{kPartition} * 65535 * 127 < int64_t{1} << 31, "a sum of weights times values is an int32");

 private:
  static LLMK_MEMBER void store_bytes(int8_t* p, Ints numbers, int64_t n) {
    if (n >= kLanes) return store_signed_bytes(p, numbers);
    int8_t bytes[kLanes];
    store_signed_bytes(bytes, numbers);
    std::memcpy(p, bytes, static_cast<size_t>(n));
  }

#ifdef LLMK_VEC_AVX512
  // Packs the numbers of two groups of keys to 16 bits: four of the first group, then four of the second group, and so
  // on. The functions low_byte() and high_byte() return one byte of each number.
  static LLMK_MEMBER Ints pack_words(Ints first, Ints second) { return {_mm512_packus_epi32(first.v, second.v)}; }
  static LLMK_MEMBER Ints low_byte(Ints words) { return {_mm512_and_si512(words.v, _mm512_set1_epi16(0xFF))}; }
  static LLMK_MEMBER Ints high_byte(Ints words) { return {_mm512_srli_epi16(words.v, 8)}; }
  // Packs the 16-bit numbers of four groups of keys to bytes, group after group.
  static LLMK_MEMBER Ints in_order(Ints words, Ints more) {
    const __m512i quads = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return {_mm512_permutexvar_epi32(quads, _mm512_packus_epi16(words.v, more.v))};
  }
#else
  static LLMK_MEMBER Ints pack_words(Ints first, Ints second) {
    return {_mm256_packus_epi32(first.low, second.low), _mm256_packus_epi32(first.high, second.high)};
  }
  static LLMK_MEMBER Ints low_byte(Ints words) {
    const __m256i byte = _mm256_set1_epi16(0xFF);
    return {_mm256_and_si256(words.low, byte), _mm256_and_si256(words.high, byte)};
  }
  static LLMK_MEMBER Ints high_byte(Ints words) {
    return {_mm256_srli_epi16(words.low, 8), _mm256_srli_epi16(words.high, 8)};
  }
  static LLMK_MEMBER Ints in_order(Ints words, Ints more) {
    // A packed register has one quad (4 bytes) of each of the four groups, then the next quad of each group. The
    // permutation puts both quads of each group side by side.
    const __m256i pairs = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words.low, more.low), pairs);
    const __m256i high = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words.high, more.high), pairs);
    const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
    return {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
  }
#endif
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
