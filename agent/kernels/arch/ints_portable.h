// Implements the type Ints of vec.h without intrinsics: 16 int32 numbers as a GCC vector. Its dot products of bytes are
// exact.
#pragma once

namespace llmk::LLMK_ARCH {

// Sixteen integers. Ints is a struct around an IntVec, because IntVec is also the type of masks: comparing two Vec
// gives an IntVec.
struct Ints {
  IntVec v;
};

LLMK_INLINE Ints broadcast_int(int32_t x) { return {IntVec{} + x}; }
LLMK_INLINE Ints load_ints(const void* p) {
  Ints a;
  std::memcpy(&a.v, p, sizeof(a.v));
  return a;
}
LLMK_INLINE Ints load_unsigned_bytes(const uint8_t* p) {
  Ints a;
  for (int i = 0; i < 16; ++i) a.v[i] = p[i];
  return a;
}
LLMK_INLINE void store_ints(void* p, Ints a) { std::memcpy(p, &a.v, sizeof(a.v)); }
LLMK_INLINE Ints multiply(Ints a, Ints b) { return {a.v * b.v}; }
LLMK_INLINE Ints add(Ints a, Ints b) { return {a.v + b.v}; }
typedef uint32_t UnsignedVec __attribute__((vector_size(64), aligned(64)));
template <int kBits>
LLMK_INLINE Ints shift_right(Ints a) {
  return {(IntVec)((UnsignedVec)a.v >> kBits)};
}
template <int kBits>
LLMK_INLINE Ints low_bits(Ints a) {
  return {a.v & ((1 << kBits) - 1)};
}
LLMK_INLINE Vec to_floats(Ints a) { return __builtin_convertvector(a.v, Vec); }
// Converts floats to integers. The floats must be whole numbers.
LLMK_INLINE Ints to_ints(Vec a) { return {__builtin_convertvector(a, IntVec)}; }
LLMK_INLINE void store_signed_bytes(int8_t* p, Ints a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
LLMK_INLINE Vec low_bfloats(Ints a) { return (Vec)(a.v << 16); }
LLMK_INLINE Vec high_bfloats(Ints a) { return (Vec)(a.v & static_cast<int32_t>(0xFFFF0000u)); }

#ifdef LLMK_NEON_DOT
}  // namespace llmk::LLMK_ARCH
#include "quads_neon.h"
namespace llmk::LLMK_ARCH {
#else
// Four uint8 weights of each lane, widened to 32 bits: byte[i] has byte i of every lane.
struct Quads {
  IntVec byte[4];
};
// Four int8 activations, each widened to 32 bits. Every lane uses the same four.
struct BroadcastQuad {
  int32_t value[4];
};
LLMK_INLINE Quads quads(Ints a) {
  return {{a.v & 255, (a.v >> 8) & 255, (a.v >> 16) & 255, (a.v >> 24) & 255}};
}
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  return {total.v + w.byte[0] * x.value[0] + w.byte[1] * x.value[1] + w.byte[2] * x.value[2] +
          w.byte[3] * x.value[3]};
}
LLMK_INLINE Quads low_nibbles(Ints a) { return quads({a.v & 0x0F0F0F0F}); }
LLMK_INLINE Quads high_nibbles(Ints a) { return quads({(a.v >> 4) & 0x0F0F0F0F}); }
#endif

// Returns a * b + c, rounded once.
#ifdef LLMK_NEON_DOT
LLMK_INLINE Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
#else
// This version is slow, because it may call the C library for each lane. fma() in vec_portable.h is faster, but rounds
// twice.
LLMK_INLINE Vec fused(Vec a, Vec b, Vec c) {
  Vec result;
  for (int i = 0; i < 16; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
}
#endif

LLMK_INLINE Vec bits_below(uint32_t bits, Vec v) { return (Vec)(bits - (UnsignedVec)v); }

}  // namespace llmk::LLMK_ARCH
