// The steps of linear_tiles.h with Arm's matrix instructions: USMMLA for bytes and nibbles, BFMMLA for bfloat16.
//
// One instruction multiplies two columns of weights by two rows of activations, over 8 bytes of depth. It adds the four
// results to a register: column 0 with rows 0 and 1, then column 1 with rows 0 and 1. A step of packed weights has only
// 4 bytes of depth for each column. Zipping the 32-bit lanes of two steps puts 8 bytes of a column side by side. For
// nibbles, the low and the high nibbles of a single step are zipped.
//
// A tile multiplies its rows in pairs. If the number of rows is odd, the last row forms a pair with itself, and the
// second result is dropped. So each result depends on its own row only, and a single row gets the same bits as many
// rows.
#pragma once
#include <arm_neon.h>

namespace llmk::LLMK_ARCH {

struct MatrixTiles {
  static constexpr bool kOwnLoop = true;
  static constexpr int kMostRows = 6, kTallRows = kMostRows;  // the sums of 6 rows take 24 of 32 registers
  static constexpr int columns(int) { return 1; }
};

// One matrix instruction and its types. Sums is a register with the four sums of two columns and two rows. Total is a
// vector with 16 sums.
struct ByteProducts {
  using X = int8_t;
  using Sums = int32x4_t;
  using Total = Ints;
  LLMK_INLINE Sums from(int32x4_t bits) { return bits; }
  LLMK_INLINE int32x4_t bits(Sums sums) { return sums; }
  LLMK_INLINE Sums add(Sums sums, int32x4_t columns, int32x4_t rows) {
    return vusmmlaq_s32(sums, vreinterpretq_u8_s32(columns), vreinterpretq_s8_s32(rows));
  }
};
#ifdef LLMK_NEON_BF16
struct BFloatProducts {
  using X = bfloat_t;
  using Sums = float32x4_t;
  using Total = Vec;
  LLMK_INLINE Sums from(int32x4_t bits) { return vreinterpretq_f32_s32(bits); }
  LLMK_INLINE int32x4_t bits(Sums sums) { return vreinterpretq_s32_f32(sums); }
  LLMK_INLINE Sums add(Sums sums, int32x4_t columns, int32x4_t rows) {
    return vbfmmlaq_f32(sums, vreinterpretq_bf16_s32(columns), vreinterpretq_bf16_s32(rows));
  }
};
#endif

// Multiplies R rows by one vector (16 columns). A matrix instruction needs 8 bytes of depth for each column. If
// kNibbles, one step has these 8 bytes, otherwise two steps.
template <class Products, bool kNibbles>
struct MatrixStep : MatrixTiles {
  using X = typename Products::X;
  using Sum = typename Products::Total;
  static constexpr int kVectorBytes = 64;

  // Adds the products of R rows and one vector to `total`. This is the loop of sum_steps() for matrix instructions;
  // linear_tiles.h explains the arguments.
  template <int R, int C, int kLines>
  LLMK_INLINE void sum(const uint8_t* w, int64_t half_bytes, int v, const X* x, int64_t x_stride, int64_t steps,
                               const uint8_t* next, Sum (&total)[R][C]) {
    static_assert(C == 1, "a tile has one vector of columns");
    constexpr int kPairs = (R + 1) / 2;
    const uint8_t* at = w + v / 2 * half_bytes + v % 2 * 64;  // consecutive steps are 128 bytes apart
    const char* rows = reinterpret_cast<const char*>(x);
    const int64_t stride = x_stride * static_cast<int64_t>(sizeof(X));
    typename Products::Sums sums[kPairs][8];
    load_sums<R>(total, sums);
    const auto fetch = [&](const uint8_t* step) {
      if (kLines == 4) fetch_ahead(step);
      if (kLines == 1 || kLines == 2) fetch_next<kFetchBytes<MatrixStep, C, kLines>>(next);
      next += kFetchBytes<MatrixStep, C, kLines>;
    };
    const auto multiply = [&](const int32x4_t (&pairs)[kPairs], int p, int32x4_t first, int32x4_t second) {
      const int32x4_t low = vzip1q_s32(first, second), high = vzip2q_s32(first, second);
      LLMK_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        sums[i][2 * p] = Products::add(sums[i][2 * p], low, pairs[i]);
        sums[i][2 * p + 1] = Products::add(sums[i][2 * p + 1], high, pairs[i]);
      }
    };
    constexpr int kSteps = kNibbles ? 1 : 2;
    int64_t s = 0;
    for (; s + kSteps <= steps; s += kSteps, at += kSteps * 128, rows += 8) {
      int32x4_t pairs[kPairs];
      load_pairs<R, 8>(rows, stride, pairs);
      LLMK_UNROLL
      for (int i = 0; i < kSteps; ++i) fetch(at + i * 128);
      LLMK_UNROLL
      for (int p = 0; p < 4; ++p) {
        const int32x4_t step = part(at, p);
        if constexpr (kNibbles) {
          multiply(pairs, p, vandq_s32(step, vdupq_n_s32(0x0F0F0F0F)),
                   vandq_s32(vshrq_n_s32(step, 4), vdupq_n_s32(0x0F0F0F0F)));
        } else {
          multiply(pairs, p, step, part(at + 128, p));
        }
      }
    }
    if (s < steps) {  // the last of an odd number of steps; the missing depths count as zeros
      int32x4_t pairs[kPairs];
      load_pairs<R, 4>(rows, stride, pairs);
      fetch(at);
      LLMK_UNROLL
      for (int p = 0; p < 4; ++p) multiply(pairs, p, part(at, p), vdupq_n_s32(0));
    }
    store_sums<R>(sums, total);
  }

 private:
  LLMK_INLINE int32x4_t part(const uint8_t* step, int p) {
    return vld1q_s32(reinterpret_cast<const int32_t*>(step) + 4 * p);
  }
  // For each pair of rows, loads kBytes bytes (4 or 8) of both rows into one register.
  template <int R, int kBytes, int kPairs>
  LLMK_INLINE void load_pairs(const char* rows, int64_t stride, int32x4_t (&pairs)[kPairs]) {
    LLMK_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      int64_t both[2] = {};
      std::memcpy(both, rows + 2 * i * stride, kBytes);
      std::memcpy(both + 1, rows + smaller(2 * i + 1, R - 1) * stride, kBytes);
      pairs[i] = vreinterpretq_s32_s64(vld1q_s64(both));
    }
  }
  // Copies sums from `total`, a vector of 16 sums for each row, to `sums`, registers for pairs of rows. The matrix
  // instruction adds to these registers. The function store_sums() copies the sums back.
  template <int R, int kPairs, int C>
  LLMK_INLINE void load_sums(const Sum (&total)[R][C], typename Products::Sums (&sums)[kPairs][8]) {
    LLMK_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      int32x4_t even[4], odd[4];
      std::memcpy(even, &total[2 * i][0], sizeof(even));
      std::memcpy(odd, &total[smaller(2 * i + 1, R - 1)][0], sizeof(odd));
      LLMK_UNROLL
      for (int p = 0; p < 4; ++p) {
        sums[i][2 * p] = Products::from(vzip1q_s32(even[p], odd[p]));
        sums[i][2 * p + 1] = Products::from(vzip2q_s32(even[p], odd[p]));
      }
    }
  }
  template <int R, int kPairs, int C>
  LLMK_INLINE void store_sums(const typename Products::Sums (&sums)[kPairs][8], Sum (&total)[R][C]) {
    LLMK_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      int32x4_t even[4], odd[4];
      LLMK_UNROLL
      for (int p = 0; p < 4; ++p) {
        const int32x4_t low = Products::bits(sums[i][2 * p]), high = Products::bits(sums[i][2 * p + 1]);
        even[p] = vuzp1q_s32(low, high);
        odd[p] = vuzp2q_s32(low, high);
      }
      std::memcpy(&total[2 * i][0], even, sizeof(even));
      if (2 * i + 1 < R) std::memcpy(&total[2 * i + 1][0], odd, sizeof(odd));
    }
  }
};

struct ByteStep : MatrixStep<ByteProducts, false> {
  static constexpr int kDepth = 4, kZero = 128;
};
struct NibbleStep : MatrixStep<ByteProducts, true> {
  static constexpr int kDepth = 8, kZero = 8;
};
#ifdef LLMK_NEON_BF16
struct BFloatMatrixStep : MatrixStep<BFloatProducts, false> {
  static constexpr int kDepth = 2;
};
#endif

}  // namespace llmk::LLMK_ARCH
