// NibbleStep: multiplies 4-bit weights (nibbles) by int8 activations with AVX2, for linear_tiles.h.
//
// VPMADDUBSW multiplies unsigned by signed bytes, adds neighbouring products, and saturates each sum at 16 bits. Sums
// with nibbles are too small to saturate, so the results are exact. This takes fewer instructions than widening every
// nibble to 16 bits.
//
// The 16-bit sums of a tile take 12 of the 16 registers of AVX2. So NibbleStep has its own loop (kOwnLoop). It loads
// each vector of weights twice: for the low nibbles, and for the high nibbles. The 32-bit sums stay in memory.
#pragma once

namespace llmk::LLMK_ARCH {

// Multiplies the unsigned bytes of `bytes` by the four signed bytes at `four`, and adds the two products of each 16-bit
// lane to this lane of `total`. Load, products and additions are one asm statement. Otherwise GCC 12 would compute all
// products of an unrolled loop first, and they would not fit the registers.
LLMK_INLINE void add_product(Ints* total, Ints bytes, const int8_t* four) {
  __m256i x, product;
  asm("vpbroadcastd %[four], %[x]\n\t"
      "vpmaddubsw %[x], %[low], %[product]\n\t"
      "vpmaddubsw %[x], %[high], %[x]\n\t"
      "vpaddw %[product], %[low_total], %[low_total]\n\t"
      "vpaddw %[x], %[high_total], %[high_total]"
      : [low_total] "+&x"(total->low), [high_total] "+&x"(total->high), [x] "=&x"(x), [product] "=&x"(product)
      : [low] "x"(bytes.low), [high] "x"(bytes.high), [four] "m"(*reinterpret_cast<const int8_t(*)[4]>(four)));
}

// Multiplies unsigned nibbles by signed bytes. A 16-bit lane adds up the 16 products of kSteps steps. Each product is
// at most 15 * 128, so the sum is at most 30,720. Then the lanes are added to the 32-bit sums.
struct NibbleStep : WideTiles {
  static constexpr bool kOwnLoop = true;
  using X = int8_t;
  using Sum = Ints;
  static constexpr int kDepth = 8, kVectorBytes = 64, kZero = 8, kPartDepth = 4;
  static constexpr int64_t kSteps = 4;

  // Returns the weights of a step for depths 0 to 3, or for depths 4 to 7, as bytes.
  LLMK_INLINE Ints weight(const uint8_t* p, int part) {
    const Ints bytes = load_ints(p);
    return part == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
  }

  // Adds the products of R rows and C vectors to `total`. This is the loop of sum_steps() for 4-bit weights;
  // linear_tiles.h explains the arguments.
  template <int R, int C, int kLines>
  LLMK_INLINE void sum(const uint8_t* w, int64_t half_bytes, int v, const X* x, int64_t x_stride, int64_t steps,
                       const uint8_t* next, Ints (&total)[R][C]) {
    // Consecutive steps of a vector are 128 bytes apart.
    const uint8_t* at[C];
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) at[c] = w + (v + c) / 2 * half_bytes + (v + c) % 2 * 64;
    Ints sums[R][C];
    const auto add_step = [&] {
      if (kLines == 1 || kLines == 2) fetch_next<kFetchBytes<NibbleStep, C, kLines>>(next);
      next += kFetchBytes<NibbleStep, C, kLines>;
      LLMK_UNROLL
      for (int i = 0; i < 2 * C; ++i) {
        const int c = i / 2, part = i % 2;
        if (kLines == 4 && part == 0) fetch_ahead(at[c]);
        const Ints nibbles = weight(at[c], part);
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_product(&sums[r][c], nibbles, x + r * x_stride + part * kPartDepth);
      }
      LLMK_UNROLL
      for (int c = 0; c < C; ++c) at[c] += 128;
      x += kDepth;
    };
    for (int64_t begin = 0; begin < steps; begin += kSteps) {
      LLMK_UNROLL
      for (int i = 0; i < R * C; ++i) sums[i / C][i % C] = broadcast_int(0);
      if (steps - begin >= kSteps) {
        LLMK_UNROLL
        for (int64_t s = 0; s < kSteps; ++s) add_step();
      } else {
        for (int64_t s = begin; s < steps; ++s) add_step();
      }
      LLMK_UNROLL
      for (int i = 0; i < R * C; ++i) total[i / C][i % C] = add(total[i / C][i % C], add_words(sums[i / C][i % C]));
    }
  }
};

}  // namespace llmk::LLMK_ARCH
