// The step for nibbles with AVX-VNNI (linear_tiles.h). VPDPBUSD multiplies unsigned nibbles by signed bytes and adds
// four products to each 32-bit sum, so the results are exact.
//
// The sums of a tile take 12 of the 16 registers, and the general loop needs more than the other four. This step
// therefore has its own loop. This loop loads each vector of weights twice: once for the low nibbles, and once for the
// high nibbles.
#pragma once

namespace llmk::LLMK_ARCH {

// Adds to each 32-bit sum the products of the four unsigned bytes in its lane of `bytes` and the four signed bytes at
// `four`. Load and product are one asm statement. Otherwise GCC 12 would keep the activations of several rows in
// registers, and the sums in memory.
LLMK_INLINE void add_products_of(Ints* total, Ints bytes, const int8_t* four) {
  __m256i x;
  asm("vpbroadcastd %[four], %[x]\n\t"
      "%{vex%} vpdpbusd %[x], %[low], %[low_total]\n\t"
      "%{vex%} vpdpbusd %[x], %[high], %[high_total]"
      : [low_total] "+&x"(total->low), [high_total] "+&x"(total->high), [x] "=&x"(x)
      : [low] "x"(bytes.low), [high] "x"(bytes.high), [four] "m"(*reinterpret_cast<const int8_t(*)[4]>(four)));
}

struct NibbleStep : WideTiles {
  static constexpr bool kOwnLoop = true;
  using X = int8_t;
  using Sum = Ints;
  static constexpr int kDepth = 8, kVectorBytes = 64, kZero = 8;

  // Adds the products of R rows and C vectors to `total`. This is the loop of sum_steps() for 4-bit weights;
  // linear_tiles.h explains the arguments. Multiplies the low nibbles of a step before it unpacks the high nibbles, so
  // that they can use the same register.
  template <int R, int C, int kLines>
  LLMK_INLINE void sum(const uint8_t* w, int64_t half_bytes, int v, const X* x, int64_t x_stride, int64_t steps,
                       const uint8_t* next, Ints (&total)[R][C]) {
    // Consecutive steps of a vector are 128 bytes apart.
    const uint8_t* at[C];
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) at[c] = w + (v + c) / 2 * half_bytes + (v + c) % 2 * 64;
    for (int64_t s = 0; s < steps; ++s, x += kDepth) {
      if (kLines == 1 || kLines == 2) {
        fetch_next<kFetchBytes<NibbleStep, C, kLines>>(next);
        next += kFetchBytes<NibbleStep, C, kLines>;
      }
      LLMK_UNROLL
      for (int c = 0; c < C; ++c) {
        if (kLines == 4) fetch_ahead(at[c]);
        const Ints low = low_nibbles(load_ints(at[c]));
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_products_of(&total[r][c], low, x + r * x_stride);
        const Ints high = high_nibbles(load_ints(at[c]));
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_products_of(&total[r][c], high, x + r * x_stride + 4);
        at[c] += 128;
      }
    }
  }
};

}  // namespace llmk::LLMK_ARCH
