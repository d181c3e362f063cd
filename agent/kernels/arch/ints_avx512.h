// Implements the type Ints of vec.h for AVX-512: 16 int32 numbers in one register. Its dot products of bytes are exact.
// They use VPDPBUSD if the processor has this instruction.
#pragma once

namespace llmk::LLMK_ARCH {

struct Ints {
  __m512i v;
};

LLMK_INLINE Ints broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
LLMK_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
LLMK_INLINE Ints load_unsigned_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
LLMK_INLINE void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
LLMK_INLINE Ints multiply(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
LLMK_INLINE Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
template <int kBits>
LLMK_INLINE Ints shift_right(Ints a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
LLMK_INLINE Ints low_bits(Ints a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32((1 << kBits) - 1))};
}
template <int kBits>
LLMK_INLINE Ints shift_right_signed(Ints a) {
  return {_mm512_srai_epi32(a.v, kBits)};
}
template <int kBits>
LLMK_INLINE Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
LLMK_INLINE Ints flip(Ints a, uint32_t bits) {
  return {_mm512_xor_si512(a.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
LLMK_INLINE Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
LLMK_INLINE Ints to_ints(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }
LLMK_INLINE void store_signed_bytes(int8_t* p, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
LLMK_INLINE Vec low_bfloats(Ints a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
LLMK_INLINE Vec high_bfloats(Ints a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
// Converts a and b to bfloat16 and interleaves them. The lower half of lane i comes from lane i of a, the upper half
// from lane i of b. Drops the lower 16 bits of each float, so the conversion is exact only for bfloat16 values.
LLMK_INLINE Ints pair_bfloats(Vec a, Vec b) {
  const __m512i high = _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
  return {_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16), high)};
}

#ifdef LLMK_VNNI
using Quads = Ints;          // 4 uint8 weights in each lane
using BroadcastQuad = Ints;  // 4 int8 activations, the same in every lane
LLMK_INLINE Quads quads(Ints a) { return a; }
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return broadcast_int(bits);
}
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  return {_mm512_dpbusd_epi32(total.v, w.v, x.v)};
}
#else
// The four bytes of each 32-bit lane as 16-bit numbers: bytes 0 and 2 in `even`, bytes 1 and 3 in `odd`. VPMADDWD
// multiplies 16-bit numbers exactly. VPMADDUBSW would multiply the bytes directly, but its sums saturate.
struct Quads {
  __m512i even, odd;
};
using BroadcastQuad = Quads;
LLMK_INLINE Quads quads(Ints a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi16(255)), _mm512_srli_epi16(a.v, 8)};
}
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  const __m512i x = _mm512_set1_epi32(bits);
  return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  const __m512i sums = _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd));
  return {_mm512_add_epi32(total.v, sums)};
}
#endif

LLMK_INLINE Quads low_nibbles(Ints a) { return quads({_mm512_and_si512(a.v, _mm512_set1_epi8(15))}); }
LLMK_INLINE Quads high_nibbles(Ints a) {
  return quads({_mm512_and_si512(_mm512_srli_epi32(a.v, 4), _mm512_set1_epi8(15))});
}

// Returns a * b + c, rounded once.
LLMK_INLINE Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }

LLMK_INLINE Vec bits_below(uint32_t bits, Vec v) {
  const __m512i from = _mm512_set1_epi32(static_cast<int>(bits));
  return {_mm512_castsi512_ps(_mm512_sub_epi32(from, _mm512_castps_si512(v.v)))};
}

}  // namespace llmk::LLMK_ARCH
