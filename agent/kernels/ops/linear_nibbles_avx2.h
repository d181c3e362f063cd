// NibbleStep: multiplies 4-bit weights (nibbles) by int8 activations with AVX2, for linear_tiles.h.
//
// VPMADDUBSW multiplies unsigned by signed bytes, adds neighbouring products, and saturates each sum at 16 bits. Sums
// with nibbles are too small to saturate, so the results are exact. This takes fewer instructions than widening every
// nibble to 16 bits.
//
// AVX2 has only 16 registers, so NibbleStep has its own loop (kOwnLoop). A register holds the sums of 8 columns of a
// row. A pass of the loop computes the sums of 8 columns for all rows of the tile. If the tile has few rows, a pass
// computes 16 or 32 columns. The loop reads the activations from memory again for every 8 columns.
#pragma once
#include <cstring>

namespace llmk::LLMK_ARCH {

// Returns the address of the weights of 8 columns in one step. `w` is the address of the step. Consecutive steps are
// 128 bytes apart. `half` is the number of the 8 columns, counted from vector v of the panel. Numbers 0 and 1 are the
// 16 columns of vector v, and number 2 is the first 8 columns of vector v + 1.
LLMK_INLINE const uint8_t* half_at(const uint8_t* w, int64_t half_bytes, int v, int half) {
  const int vector = v + half / 2;
  return w + vector / 2 * half_bytes + vector % 2 * 64 + half % 2 * 32;
}
LLMK_INLINE __m256i& half_of(Ints& total, int half) { return half % 2 == 0 ? total.low : total.high; }
LLMK_INLINE __m256i load_half(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
LLMK_INLINE __m256i broadcast_four(const int8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

// Multiplies unsigned by signed bytes, and adds the two products of each 16-bit lane to this lane of `total`.
//
// Product and addition are one asm statement. Otherwise GCC 12 would compute all products of an unrolled loop first,
// and they would not fit the registers.
LLMK_INLINE void add_pairs(__m256i* total, __m256i unsigned_bytes, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %[x], %[bytes], %[product]\n\t"
      "vpaddw %[product], %[total], %[total]"
      : [total] "+x"(*total), [product] "=&x"(product)
      : [bytes] "x"(unsigned_bytes), [x] "x"(x));
}

// Multiplies unsigned nibbles by signed bytes. A 16-bit lane adds up the 16 products of kSteps steps. Each product is
// at most 15 * 128, so the sum is at most 30,720. Then the lanes are added to the 32-bit sums.
struct NibbleStep {
  static constexpr bool kOwnLoop = true;
  using X = int8_t;
  using Sum = Ints;
  static constexpr int kDepth = 8, kVectorBytes = 64, kZero = 8;
  static constexpr int kMostRows = 6, kTallRows = kMostRows;
  static constexpr int kSums = 6;  // number of registers for 16-bit sums
  static constexpr int64_t kSteps = 4;
  static constexpr int columns(int rows) { return rows == 1 ? 2 : 1; }

  // Prefetches weights during one step. linear_tiles.h explains kLines: if it is 4, these are weights that this tile
  // reads later. If it is 1 or 2, they are cache lines at `next`, for later tiles. Only the first pass of the loop
  // calls this function, because the other passes read the same weights again.
  template <int C, int kLines>
  LLMK_INLINE void fetch(const uint8_t* step, int64_t half_bytes, int v, const uint8_t* next) {
    if (kLines == 4) {
      LLMK_UNROLL
      for (int c = 0; c < C; ++c) fetch_ahead(half_at(step, half_bytes, v, 2 * c));
    }
    if (kLines == 1 || kLines == 2) __builtin_prefetch(next, 0, 2);
    if (kLines == 2) __builtin_prefetch(next + 64, 0, 2);
  }

  // Multiplies R rows of activations by C vectors of 16 columns over all steps, and adds the products to `total`. This
  // is the loop of sum_steps() for 4-bit weights; linear_tiles.h explains the arguments.
  //
  // There may be more sums than registers. So each pass of the outer loop runs over all steps, but only for H groups of
  // 8 columns. After every kSteps steps, it adds the 16-bit sums to the 32-bit sums in `total`.
  template <int R, int C, int kLines>
  LLMK_INLINE void sum(const uint8_t* w, int64_t half_bytes, int v, const X* x, int64_t x_stride, int64_t steps,
                       const uint8_t* next, Ints (&total)[R][C]) {
    constexpr int H = R * 2 * C <= kSums ? 2 * C : R * 2 <= kSums ? 2 : 1;
    const __m256i nibbles = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    LLMK_UNROLL
    for (int first = 0; first < 2 * C; first += H) {
      for (int64_t begin = 0; begin < steps; begin += kSteps) {
        __m256i sums[R][H];
        LLMK_UNROLL
        for (int i = 0; i < R * H; ++i) sums[i / H][i % H] = _mm256_setzero_si256();
        const auto add = [&](int64_t s) {
          const uint8_t* step = w + s * 128;
          const int8_t* at = x + s * kDepth;
          if (first == 0) fetch<C, kLines>(step, half_bytes, v, next + s * kLines * 64);
          LLMK_UNROLL
          for (int h = 0; h < H; ++h) {
            const __m256i bytes = load_half(half_at(step, half_bytes, v, first + h));
            const __m256i low = _mm256_and_si256(bytes, nibbles);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibbles);
            LLMK_UNROLL
            for (int r = 0; r < R; ++r) {
              const int8_t* four = at + r * x_stride;
              add_pairs(&sums[r][h], low, broadcast_four(four));
              add_pairs(&sums[r][h], high, broadcast_four(four + 4));
            }
          }
        };
        if (steps - begin >= kSteps) {
          LLMK_UNROLL
          for (int64_t i = 0; i < kSteps; ++i) add(begin + i);
        } else {
          for (int64_t s = begin; s < steps; ++s) add(s);
        }
        LLMK_UNROLL
        for (int i = 0; i < R * H; ++i) {
          __m256i& wide = half_of(total[i / H][(first + i % H) / 2], first + i % H);
          wide = _mm256_add_epi32(wide, _mm256_madd_epi16(sums[i / H][i % H], ones));
        }
      }
    }
  }
};

}  // namespace llmk::LLMK_ARCH
