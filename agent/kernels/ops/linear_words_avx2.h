// Multiplies int8 weights without quantisation groups by several rows, for AVX2 without AVX-VNNI (linear_bytes.h).
//
// As in linear_expanded_avx2.h, the first tile stores the weights of a piece as 16-bit numbers (words). The other tiles
// read these words from the L1 cache.
#pragma once
#include "linear_driver.h"

namespace llmk::LLMK_ARCH {

// Multiplies weights without quantisation groups. A tile adds up the products of a piece and one vector, then those of
// the next vector.
struct PlainWords : PlainForm<ByteStep> {
  // Returns true if words are faster than bytes. They were slower with a depth of 576.
  static bool fits(const LinearJob& job) { return job.header.depth >= 768; }

  // If there are several tiles, the words of a piece must fit the L1 cache. They are twice as large as the weights.
  static int64_t piece_bytes(int64_t rows) { return rows > Step::kMostRows ? 10 << 10 : kPieceBytes; }

  static void prepare(const LinearJob& job, int64_t row, int64_t rows, Piece* piece) {
    if (rows <= Step::kMostRows) return;
    const int64_t steps = piece->end - piece->begin;
    piece->expanded = static_cast<uint8_t*>(thread_scratch(kScratchExpanded, 2 * steps * job.shape.step_bytes));
    piece->expanding_row = row;
  }

  template <int R, int kLines>
  LLMK_OUTLINE void tile(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    if constexpr (kLines == 4) {
      PlainForm<ByteStep>::tile<R, kLines>(job, piece, row, sums, next);
    } else if (kLines != 0 && row == piece.expanding_row) {
      add_piece<R, kLines, true>(job, piece, row, sums, next);
    } else {
      add_piece<R, kLines, false>(job, piece, row, sums, next);
    }
  }

 private:
  // Distance in bytes between the weights of a vector in consecutive steps, and between their words. The words of a
  // piece are in the order [4 vectors][steps][2 parts][16 columns][2 depths].
  static constexpr int64_t kStepStride = 2 * Step::kVectorBytes;

  // Adds the products of the piece and R rows to `sums`.
  template <int R, int kLines, bool kStores>
  LLMK_INLINE void add_piece(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    const int64_t x_stride = job.x_stride, steps = piece.end - piece.begin;
    for (int v = 0; v < 4; ++v) {
      Ints total[R];
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) {
        if (piece.first) {
          start(job, row + r, &total[r]);
        } else {
          total[r] = load_ints(sums + r * kPanelColumns + v * kLanes);
        }
      }
      const uint8_t* from = piece.weights + v / 2 * piece.half_bytes + v % 2 * Step::kVectorBytes;
      uint8_t* words = piece.expanded + v * steps * kStepStride;
      const int16_t* x = static_cast<const int16_t*>(job.x) + row * x_stride + piece.begin * Step::kDepth;
      for (int64_t count, rest = steps; rest != 0; rest -= count) {
        count = piece.adapters != nullptr ? smaller(kAdapterSteps, rest) : rest;
        if (piece.adapters != nullptr) piece.adapters->fetch(kAdapterLines);
        add_steps<R, kLines, kStores>(from, words, count, x, x_stride, next, total);
        from += count * kStepStride, words += count * kStepStride, x += count * Step::kDepth;
        next += count * kFetchBytes<Step, 1, kLines>;
      }
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) store_ints(sums + r * kPanelColumns + v * kLanes, total[r]);
    }
  }

  // Adds the products of at least one step, for R rows and 16 columns. If kStores, reads bytes and stores them
  // as words. Otherwise reads the words.
  template <int R, int kLines, bool kStores>
  LLMK_INLINE void add_steps(const uint8_t* weights, uint8_t* words, int64_t steps, const int16_t* x, int64_t x_stride,
                             const uint8_t* next, Ints (&total)[R]) {
    do {
      if constexpr (kLines == 1 || kLines == 2) {
        fetch_next<kFetchBytes<Step, 1, kLines>>(next);
        next += kFetchBytes<Step, 1, kLines>;
      }
      LLMK_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint8_t* at = words + part * Step::kVectorBytes;
        const Ints weight = kStores ? Step::weight(weights, part) : load_ints(at);
        if constexpr (kStores) store_ints(at, weight);
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_product(&total[r], weight, x + r * x_stride + part * Step::kPartDepth);
      }
      weights += kStepStride, words += kStepStride, x += Step::kDepth;
    } while (--steps != 0);
  }
};

}  // namespace llmk::LLMK_ARCH
