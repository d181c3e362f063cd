// Multiplies int8 weights with quantisation groups by several rows, for AVX2 without AVX-VNNI (linear_bytes.h).
//
// VPMADDWD multiplies 16-bit numbers (words). If the rows form several tiles, all of them multiply the same weights. So
// the first tile also stores the weights of a piece as words. The other tiles read these words from the L1 cache.
//
// A tile multiplies one group by all vectors of a panel, then the next group. So it reads the weights in the order of
// memory. The float totals stay in memory, because the integer sums of 6 rows take 12 of the 16 registers.
#pragma once
#include "linear_driver.h"

namespace llmk::LLMK_ARCH {

struct GroupedWords : GroupedForm<ByteStep> {
  // Returns true if the sums of a group are less than 256 * 128 * 128 = 2^22, as kMagic below requires.
  static bool fits(const LinearJob& job) { return job.header.group <= 256; }

  // If there are several tiles, the words of a piece must fit the L1 cache. They are twice as large as the weights.
  static int64_t piece_bytes(int64_t rows) { return rows > Step::kMostRows ? 10 << 10 : kPieceBytes; }

  static void prepare(const LinearJob& job, int64_t row, int64_t rows, Piece* piece) {
    if (rows <= Step::kMostRows) return;
    const int64_t steps = (piece->end - piece->begin) * job.shape.group_steps;
    piece->words = static_cast<uint8_t*>(thread_scratch(kScratchWidened, 2 * steps * job.shape.step_bytes));
    piece->widening_row = row;
  }

  template <int R, int kLines>
  LLMK_OUTLINE void tile(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    if constexpr (R == 1) {
      return GroupedForm<ByteStep>::tile<1, kLines>(job, piece, row, sums, next);
    } else if constexpr (kLines == 4) {
      add_piece<R, kLines, Weights::kBytes>(job, piece, row, sums, next);
    } else {
      if (kLines != 0 && row == piece.widening_row) {
        add_piece<R, kLines, Weights::kWidened>(job, piece, row, sums, next);
      } else {
        add_piece<R, kLines, Weights::kWords>(job, piece, row, sums, next);
      }
    }
  }

 private:
  // Which weights a tile reads: bytes; bytes, which it also stores as words; or words.
  enum class Weights { kBytes, kWidened, kWords };

  // Distance in bytes between the weights of a vector in consecutive steps, and between their words. The words of a
  // group are in the order [4 vectors][steps][2 parts][16 columns][2 depths].
  static constexpr int64_t kStepStride = 2 * Step::kVectorBytes;
  // An integer n with |n| < 2^22, added to kMagicBits, has the bits of the float kMagic + n. So a subtraction makes n a
  // float. It is exact, and can use other ports than the products.
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  static constexpr int32_t kMagicBits = 0x4B400000;

  // Adds the scaled products of the piece and R rows to `sums`.
  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_piece(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    const WeightShape shape = job.shape;  // a copy, because the stores below could change the original
    const int64_t x_stride = job.x_stride;
    const uint8_t* weights = piece.weights;
    uint8_t* words = piece.words;
    const int16_t* x =
        static_cast<const int16_t*>(job.x) + row * x_stride + piece.begin * shape.group_steps * Step::kDepth;
    const int32_t* x_sums = job.rows.sums + row * shape.groups;
    if (piece.first) std::memset(sums, 0, R * kPanelColumns * sizeof(float));
    for (int64_t group = piece.begin; group < piece.end; ++group) {
      if (piece.adapters != nullptr) piece.adapters->fetch(kAdapterLines);
      const int64_t steps = smaller(shape.group_steps, shape.steps - group * shape.group_steps);
      const int64_t half = steps * kStepStride, bytes = 2 * half + shape.scale_bytes;
      int32_t starts[R];
      for (int r = 0; r < R; ++r) starts[r] = kMagicBits - Step::kZero * x_sums[r * shape.groups + group];
      for (int v = 0; v < 4; ++v) {
        if constexpr (kLines == 1 || kLines == 2) next = fetch_lines(next, bytes * kLines / 16);
        const uint8_t* from = weights + v / 2 * half + v % 2 * Step::kVectorBytes;
        const float* scales = reinterpret_cast<const float*>(weights + 2 * half) + v * kLanes;
        add_group<R, kLines, kWeights>(from, words + v * half, steps, x, x_stride, starts, scales, sums + v * kLanes);
      }
      weights += bytes;
      words += 4 * half;
      x += shape.group_steps * Step::kDepth;
    }
  }

  // Prefetches `bytes` bytes, and returns their end.
  LLMK_INLINE const uint8_t* fetch_lines(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, kFetchLocality);
    return from + bytes;
  }

  // Adds the scaled products of a group, for R rows and 16 columns.
  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_group(const uint8_t* weights, uint8_t* words, int64_t steps, const int16_t* x, int64_t x_stride,
                             const int32_t (&starts)[R], const float* scales, float* sums) {
    Ints total[R];
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) total[r] = load_everywhere(&starts[r]);
    do {  // a group has at least one step
      if constexpr (kLines == 4) fetch_ahead(weights);
      LLMK_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint8_t* at = words + part * Step::kVectorBytes;
        const Ints weight = kWeights == Weights::kWords ? load_ints(at) : Step::weight(weights, part);
        if constexpr (kWeights == Weights::kWidened) store_ints(at, weight);
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_product(&total[r], weight, x + r * x_stride + part * Step::kPartDepth);
      }
      weights += kStepStride, words += kStepStride, x += Step::kDepth;
    } while (--steps != 0);
    const Vec scale = load(scales);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec moved{_mm256_castsi256_ps(total[r].low), _mm256_castsi256_ps(total[r].high)};
      float* to = sums + r * kPanelColumns;
      store(to, fused(sub(moved, broadcast(kMagic)), scale, load(to)));
    }
  }

  // Returns the number at `p` in each lane. The function uses an asm statement. Without it, GCC 12 loads all
  // numbers of a tile before the loop over the vectors, and keeps them in memory.
  LLMK_INLINE Ints load_everywhere(const int32_t* p) {
    __m256i all;
    asm volatile("vpbroadcastd %[p], %[all]" : [all] "=x"(all) : [p] "m"(*p));
    return {all, all};
  }
};

}  // namespace llmk::LLMK_ARCH
