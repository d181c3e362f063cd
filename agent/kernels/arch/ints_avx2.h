// Implements the type Ints of vec.h for AVX2: 16 int32 numbers in two registers. With AVX-VNNI, dot products of bytes
// use VPDPBUSD. Without it, pairs of 16-bit numbers are multiplied. Both are exact.
#pragma once

namespace llmk::LLMK_ARCH {

struct Ints {
  __m256i low, high;
};

LLMK_INLINE Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
LLMK_INLINE Ints load_ints(const void* p) {
  const __m256i* from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
LLMK_INLINE Ints load_unsigned_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
LLMK_INLINE void store_ints(void* p, Ints a) {
  __m256i* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, a.low);
  _mm256_storeu_si256(to + 1, a.high);
}
LLMK_INLINE Ints multiply(Ints a, Ints b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
LLMK_INLINE Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
template <int kBits>
LLMK_INLINE Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.low, kBits), _mm256_srli_epi32(a.high, kBits)};
}
template <int kBits>
LLMK_INLINE Ints low_bits(Ints a) {
  const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
template <int kBits>
LLMK_INLINE Ints shift_right_signed(Ints a) {
  return {_mm256_srai_epi32(a.low, kBits), _mm256_srai_epi32(a.high, kBits)};
}
template <int kBits>
LLMK_INLINE Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.low, kBits), _mm256_slli_epi32(a.high, kBits)};
}
LLMK_INLINE Ints flip(Ints a, uint32_t bits) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_xor_si256(a.low, mask), _mm256_xor_si256(a.high, mask)};
}
LLMK_INLINE Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
LLMK_INLINE Ints to_ints(Vec a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
LLMK_INLINE void store_signed_bytes(int8_t* p, Ints a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
LLMK_INLINE Vec low_bfloats(Ints a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.high, 16))};
}
LLMK_INLINE Vec high_bfloats(Ints a) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(a.low, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.high, mask))};
}

LLMK_INLINE Ints low_nibbles(Ints a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
LLMK_INLINE Ints high_nibbles(Ints a) { return low_nibbles(shift_right<4>(a)); }

#ifdef LLMK_VNNI
using Quads = Ints;             // 4 uint8 weights in each lane
using BroadcastQuad = __m256i;  // 4 int8 activations, the same in every lane

// Multiplies unsigned by signed bytes (VPDPBUSD) and adds the four products of each 32-bit lane to `total`. {vex}
// selects the encoding of AVX-VNNI. Otherwise the assembler would choose the encoding of AVX-512, which some processors
// with AVX-VNNI do not have. The function uses assembly instead of the intrinsic. With the intrinsic, GCC 12 copies the
// sums in every iteration of a loop.
LLMK_INLINE void add_products(__m256i* total, __m256i unsigned_bytes, __m256i signed_bytes) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(*total) : "x"(unsigned_bytes), "x"(signed_bytes));
}
LLMK_INLINE Quads quads(Ints a) { return a; }
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return _mm256_set1_epi32(bits);
}
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  add_products(&total.low, w.low, x);
  add_products(&total.high, w.high, x);
  return total;
}
#else
// The bytes 0 and 2 of each 32-bit lane as 16-bit numbers, and the bytes 1 and 3.
LLMK_INLINE Ints even_bytes(Ints a) {
  const __m256i mask = _mm256_set1_epi16(255);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
LLMK_INLINE Ints odd_bytes(Ints a) { return {_mm256_srli_epi16(a.low, 8), _mm256_srli_epi16(a.high, 8)}; }

// Each 32-bit lane of `a` has two 16-bit numbers. Multiplies them by the two numbers at `x` with VPMADDWD, and adds
// both products to the lane of `total`. This is exact. It is one asm statement, like add_product() of vec_avx2.h.
LLMK_INLINE void add_product(Ints* total, Ints a, const int16_t* x) {
  __m256i spread, product;
  asm("vpbroadcastd %[x], %[spread]\n\t"
      "vpmaddwd %[spread], %[low], %[product]\n\t"
      "vpmaddwd %[spread], %[high], %[spread]\n\t"
      "vpaddd %[product], %[low_total], %[low_total]\n\t"
      "vpaddd %[spread], %[high_total], %[high_total]"
      : [low_total] "+&x"(total->low), [high_total] "+&x"(total->high), [spread] "=&x"(spread),
        [product] "=&x"(product)
      : [low] "x"(a.low), [high] "x"(a.high), [x] "m"(*reinterpret_cast<const int16_t(*)[2]>(x)));
}
// Returns the pair of 16-bit numbers at `x` in each 32-bit lane.
LLMK_INLINE Ints broadcast_words(const int16_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof(bits));
  return broadcast_int(bits);
}
// Multiplies 16-bit numbers, and adds the two exact products of each 32-bit lane.
LLMK_INLINE Ints multiply_words(Ints a, Ints b) {
  return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
}

// Adds the two 16-bit numbers of each 32-bit lane.
LLMK_INLINE Ints add_words(Ints a) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(a.low, ones), _mm256_madd_epi16(a.high, ones)};
}
#endif

// Returns a * b + c, rounded once.
LLMK_INLINE Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }

LLMK_INLINE Vec bits_below(uint32_t bits, Vec v) {
  const __m256i from = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_castsi256_ps(_mm256_sub_epi32(from, _mm256_castps_si256(v.low))),
          _mm256_castsi256_ps(_mm256_sub_epi32(from, _mm256_castps_si256(v.high)))};
}

}  // namespace llmk::LLMK_ARCH
