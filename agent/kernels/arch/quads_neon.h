// Exact dot products of bytes with Arm's SDOT. The other operations of the type Ints are in ints_portable.h.
#pragma once
#include <arm_neon.h>

namespace llmk::LLMK_ARCH {

// Four signed bytes in each 32-bit lane: nibbles, or int8 weights. A packed weight stores an int8 weight w as the
// unsigned byte w + 128. The instruction SDOT takes only signed bytes, so quads() converts the stored bytes to w.
// Therefore the sum of a dot product starts at 0. (The other instruction sets multiply by the stored w + 128. To remove
// the 128, their sums start at -128 times the sum of the activations.)
struct Quads {
  int32x4_t part[4];
};
constexpr int kByteZero = 0;

using BroadcastQuad = int8x16_t;  // four int8 activations, the same in every lane

LLMK_INLINE Quads parts_of(Ints a) {
  Quads result;
  std::memcpy(&result, &a.v, sizeof(result));
  return result;
}
LLMK_INLINE Quads quads(Ints a) { return parts_of({a.v ^ static_cast<int32_t>(0x80808080u)}); }
LLMK_INLINE Quads low_nibbles(Ints a) { return parts_of({a.v & 0x0F0F0F0F}); }
LLMK_INLINE Quads high_nibbles(Ints a) { return parts_of({(a.v >> 4) & 0x0F0F0F0F}); }
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return vreinterpretq_s8_s32(vdupq_n_s32(bits));
}
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  int32x4_t sums[4];
  std::memcpy(sums, &total.v, sizeof(sums));
  for (int i = 0; i < 4; ++i) sums[i] = vdotq_s32(sums[i], vreinterpretq_s8_s32(w.part[i]), x);
  Ints result;
  std::memcpy(&result.v, sums, sizeof(sums));
  return result;
}

}  // namespace llmk::LLMK_ARCH
