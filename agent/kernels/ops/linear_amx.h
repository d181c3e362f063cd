// The inner loops of linear.h on AMX tiles: two blocks of rows by two vectors of a panel at a time, or, up to 16 rows,
// one block by all four. int8 gives the integers of any other instruction set. bfloat16 has its own order of adding
// (amx_tiles.h), so every product with such a weight is made here, one row or many.
#pragma once
#include "amx_tiles.h"
#include "linear_epilogue.h"
#include "linear_tiles.h"

namespace llmk {
namespace LLMK_ARCH {

struct ByteTiles16 {
  using X = int8_t;
  static constexpr int64_t kDepth = 4 * kAmxSteps;  // of one product of tiles
  template <int S, int A, int W>
  LLMK_INLINE void multiply_tiles() {
    multiply_bytes<S, A, W>();
  }
};

struct BFloatTiles16 {
  using X = bfloat_t;
  static constexpr int64_t kDepth = 2 * kAmxSteps;
  template <int S, int A, int W>
  LLMK_INLINE void multiply_tiles() {
    multiply_bfloats<S, A, W>();
  }
};

// int8 products of fewer rows are faster in registers, and the same.
constexpr int64_t kLeastTiledRows = 5;

// Whole products of tiles only: a shorter last one would read past the weights and the rows.
static inline bool fits_tiles(const LinearJob& job) {
  return job.header.depth % (kAmxSteps * job.shape.step_depth) == 0;
}

// How the weights to come are fetched while those of a piece are multiplied: `lines` cache lines a unit from `next`.
struct Fetch {
  const uint8_t* next;
  int64_t lines;
};

LLMK_INLINE void fetch_lines(const Fetch& fetch, int64_t unit) {
  const uint8_t* at = fetch.next + unit * fetch.lines * 64;
  for (int64_t i = 0; i < fetch.lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
}

template <class Kind>
struct TiledForm {
  static constexpr int64_t kSumsStride = kPanelColumns * 4, kWeightStride = kPanelColumns * 4;
  using X = typename Kind::X;

  // One block of rows passes over the weights once; for more, a piece of them stays in the first-level cache.
  static int64_t piece_bytes(int64_t rows) { return rows <= kAmxRows ? 384 << 10 : 32 << 10; }
  static int64_t units(const WeightShape& shape) { return shape.steps / kAmxSteps; }
  static int64_t unit_bytes(const WeightShape& shape) { return kAmxSteps * shape.step_bytes; }

  // Up to 16 rows, all 64 columns.
  static void one_block(const X* x, int64_t x_bytes, const uint8_t* w, int64_t units, int64_t unit_bytes,
                        const Fetch& fetch, bool first, float* sums) {
    start_tile<0>(first, sums);
    start_tile<1>(first, sums + 16);
    start_tile<2>(first, sums + 32);
    start_tile<3>(first, sums + 48);
    for (int64_t u = 0; u < units; ++u, x += Kind::kDepth, w += unit_bytes) {
      fetch_lines(fetch, u);
      load_tile<4>(x, x_bytes);
      load_tile<6>(w, kWeightStride);
      Kind::template multiply_tiles<0, 4, 6>();
      load_tile<7>(w + 64, kWeightStride);
      Kind::template multiply_tiles<1, 4, 7>();
      load_tile<6>(w + 128, kWeightStride);
      Kind::template multiply_tiles<2, 4, 6>();
      load_tile<7>(w + 192, kWeightStride);
      Kind::template multiply_tiles<3, 4, 7>();
    }
    store_tile<0>(sums, kSumsStride);
    store_tile<1>(sums + 16, kSumsStride);
    store_tile<2>(sums + 32, kSumsStride);
    store_tile<3>(sums + 48, kSumsStride);
  }

  // Two blocks of rows, `lower_x` and `lower_sums` being those of the second; 32 columns.
  static void two_blocks(const X* x, const X* lower_x, int64_t x_bytes, const uint8_t* w, int64_t units,
                         int64_t unit_bytes, const Fetch& fetch, bool first, float* sums, float* lower_sums) {
    start_tile<0>(first, sums);
    start_tile<1>(first, sums + 16);
    start_tile<2>(first, lower_sums);
    start_tile<3>(first, lower_sums + 16);
    for (int64_t u = 0; u < units; ++u, x += Kind::kDepth, lower_x += Kind::kDepth, w += unit_bytes) {
      fetch_lines(fetch, u);
      load_tile<4>(x, x_bytes);
      load_tile<6>(w, kWeightStride);
      Kind::template multiply_tiles<0, 4, 6>();
      load_tile<7>(w + 64, kWeightStride);
      Kind::template multiply_tiles<1, 4, 7>();
      load_tile<5>(lower_x, x_bytes);
      Kind::template multiply_tiles<2, 5, 6>();
      Kind::template multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(sums, kSumsStride);
    store_tile<1>(sums + 16, kSumsStride);
    store_tile<2>(lower_sums, kSumsStride);
    store_tile<3>(lower_sums + 16, kSumsStride);
  }

  template <int T>
  LLMK_INLINE void start_tile(bool first, const float* sums) {
    if (first) {
      clear_tile<T>();
    } else {
      load_tile<T>(sums, kSumsStride);
    }
  }

  // A piece of a panel with the rows of a task, in pairs of blocks of nearly the same height.
  template <class Finish>
  static void pass(const LinearJob& job, const Piece& piece, int64_t row, int64_t rows, float* sums,
                   const Finish& finish) {
    const int64_t turns = ceil_div(rows, 2 * kAmxRows), bytes = unit_bytes(job.shape), units = piece.end - piece.begin;
    const int64_t fetching = piece.bytes == 0 ? 0 : turns >= 4 ? 4 : turns >= 2 ? 2 : 1;
    int64_t configured = -1;
    for (int64_t t = 0; t < turns; ++t) {
      const int64_t begin = rows * t / turns, count = rows * (t + 1) / turns - begin;
      const bool paired = count > kAmxRows;
      const int64_t upper = paired ? (count + 1) / 2 : count;
      if (count != configured) configure_tiles(upper, count - upper);
      configured = count;
      float* at = sums + begin * kPanelColumns;
      const X* x = static_cast<const X*>(job.x) + (row + begin) * job.x_stride + piece.begin * Kind::kDepth;
      const int64_t x_bytes = job.x_stride * static_cast<int64_t>(sizeof(X)), lines = bytes / 64;
      if (!paired) {
        const Fetch own{piece.weights + kFetchAhead, fetching > 0 ? lines : 0};
        one_block(x, x_bytes, piece.weights, units, bytes, own, piece.first, at);
      } else {
        // Half of the lines with either half of the columns.
        const int64_t share = t < fetching ? lines / fetching / 2 : 0;
        const uint8_t* next = piece.weights + piece.bytes + t * 2 * share * 64 * units;
        const X* lower_x = x + upper * job.x_stride;
        float* lower = at + upper * kPanelColumns;
        two_blocks(x, lower_x, x_bytes, piece.weights, units, bytes, {next, share}, piece.first, at, lower);
        next += share * 64 * units;
        two_blocks(x, lower_x, x_bytes, piece.weights + 128, units, bytes, {next, share}, piece.first, at + 32, lower + 32);
      }
      finish(row + begin, count, at);
    }
    release_tiles();
  }
};

}  // namespace LLMK_ARCH
}  // namespace llmk
