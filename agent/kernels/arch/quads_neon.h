// Exact dot products of bytes with Arm's SDOT and USDOT instructions. The other operations of the type Ints are in
// ints_portable.h.
#pragma once
#include <arm_neon.h>

namespace llmk::LLMK_ARCH {

// Four uint8 weights w in each 32-bit lane. The instruction SDOT takes only signed bytes, so the weights are stored as
// w - 128.
struct Quads {
  int32x4_t part[4];
};
// Four int8 activations, the same in every lane. `offset` is 128 times their sum. Adding it to the result of SDOT
// corrects for the weights, which are stored as w - 128.
struct BroadcastQuad {
  int8x16_t x;
  int32x4_t offset;
};

LLMK_INLINE Quads quads(Ints a) {
  Quads result;
  std::memcpy(&result, &a.v, sizeof(result));
#ifndef LLMK_NEON_I8MM
  for (int i = 0; i < 4; ++i) result.part[i] = veorq_s32(result.part[i], vdupq_n_s32(static_cast<int>(0x80808080u)));
#endif
  return result;
}
LLMK_INLINE BroadcastQuad broadcast_quad(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(bits));
#ifdef LLMK_NEON_I8MM
  return {x, vdupq_n_s32(0)};
#else
  return {x, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), x, vdupq_n_s8(1)), 7)};
#endif
}
LLMK_INLINE Ints dot_quads(Ints total, Quads w, BroadcastQuad x) {
  int32x4_t sums[4];
  std::memcpy(sums, &total.v, sizeof(sums));
  for (int i = 0; i < 4; ++i) {
#ifdef LLMK_NEON_I8MM
    sums[i] = vusdotq_s32(sums[i], vreinterpretq_u8_s32(w.part[i]), x.x);
#else
    sums[i] = vdotq_s32(vaddq_s32(sums[i], x.offset), vreinterpretq_s8_s32(w.part[i]), x.x);
#endif
  }
  Ints result;
  std::memcpy(&result.v, sums, sizeof(sums));
  return result;
}

}  // namespace llmk::LLMK_ARCH
