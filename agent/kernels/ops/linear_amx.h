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
        two_blocks(x, lower_x, x_bytes, piece.weights + 128, units, bytes, {next, share}, piece.first, at + 32,
                   lower + 32);
      }
      finish(row + begin, count, at);
    }
    release_tiles();
  }
};

// A block of int8 weights that linear_weight_only.h has unpacked to bfloat16, whose steps take as many bytes as those of
// int8. One row or many: as with weights that are stored so.
struct TiledBlock {
  using Step = BFloatDotStep;
  static bool fits(const LinearJob& job) {
    return job.header.depth % BFloatTiles16::kDepth == 0 && job.header.group % BFloatTiles16::kDepth == 0;
  }
  static void multiply(const LinearJob& job, const uint8_t* block, int64_t begin, int64_t end, bool first, int64_t row,
                       int64_t rows, float* sums) {
    const auto nothing = [](int64_t, int64_t, const float*) {};
    const Piece piece{block, begin / BFloatTiles16::kDepth, end / BFloatTiles16::kDepth, 0, first};
    TiledForm<BFloatTiles16>::pass(job, piece, row, rows, sums, nothing);
  }
};

// Weights with a scale a group: the integer sums of a group come from tiles, then everything is as in GroupedForm.
template <class Step>
struct GroupedTiles {
  static bool fits(const LinearJob& job) {
    const int64_t group = job.header.group;
    return job.args.rows >= kLeastGroupedRows && group > 0 && group % (4 * kAmxSteps) == 0 &&
           job.header.depth % group == 0;
  }
  static int64_t piece_bytes(int64_t) { return 384 << 10; }
  static int64_t units(const WeightShape& shape) { return shape.groups; }
  static int64_t unit_bytes(const WeightShape& shape) {
    return shape.group_steps * shape.step_bytes + shape.scale_bytes;
  }

  template <class Finish>
  static void pass(const LinearJob& job, const Piece& piece, int64_t row, int64_t rows, float* sums,
                   const Finish& finish) {
    const WeightShape& shape = job.shape;
    const int64_t depth = shape.group_steps * Step::kDepth;
    uint8_t* bytes = static_cast<uint8_t*>(thread_scratch(kScratchTile, depth * kPanelColumns));
    const uint8_t* w = piece.weights;
    for (int64_t g = piece.begin; g < piece.end; ++g, w += unit_bytes(shape)) {
      const Group group{g, unpack(w, shape.group_steps, bytes), w + shape.group_steps * shape.step_bytes, depth,
                        piece.first && g == piece.begin};
      add_group(job, group, row, rows, sums);
    }
    release_tiles();
    finish(row, rows, sums);
  }

 private:
  static constexpr int64_t kLeastGroupedRows = 8;  // as kLeastTiledRows

  struct Group {
    int64_t index;
    const uint8_t* bytes;   // [depth / 4][64][4]
    const uint8_t* scales;  // [64] floats, then [64] zeros if asymmetric
    int64_t depth;
    bool first;
  };

  // The bytes themselves, or nibbles as bytes: depths 0 to 3 of a step, then 4 to 7.
  static const uint8_t* unpack(const uint8_t* from, int64_t steps, uint8_t* to) {
    if (Step::kDepth == 4) return from;
    const Ints nibble = broadcast_int(0x0F0F0F0F);
    for (int64_t s = 0; s < steps; ++s, from += 4 * kPanelColumns, to += 8 * kPanelColumns) {
      for (int v = 0; v < 4; ++v) {
        const Ints pairs = load_ints(from + v * 64);
        __builtin_prefetch(from + v * 64 + kFetchAhead, 0, 3);
        store_ints(to + v * 64, {_mm512_and_si512(pairs.v, nibble.v)});
        store_ints(to + 4 * kPanelColumns + v * 64, {_mm512_and_si512(shift_right<4>(pairs).v, nibble.v)});
      }
    }
    return to - steps * 8 * kPanelColumns;
  }

  static void add_group(const LinearJob& job, const Group& group, int64_t row, int64_t rows, float* sums) {
    const int64_t blocks = ceil_div(rows, kAmxRows);
    int64_t configured = -1;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
      if (count != configured) configure_tiles(count, 0);
      configured = count;
      alignas(64) int32_t products[kAmxRows][kPanelColumns];
      multiply(static_cast<const int8_t*>(job.x) + (row + begin) * job.x_stride + group.index * group.depth,
               job.x_stride, group, products);
      for (int64_t r = 0; r < count; ++r) {
        fold(job, group, row + begin + r, products[r], sums + (begin + r) * kPanelColumns);
      }
    }
  }

  static void multiply(const int8_t* x, int64_t x_stride, const Group& group, int32_t (&out)[kAmxRows][kPanelColumns]) {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    const uint8_t* w = group.bytes;
    for (int64_t k = 0; k < group.depth; k += 4 * kAmxSteps, w += kAmxSteps * 4 * kPanelColumns) {
      load_tile<4>(x + k, x_stride);
      load_tile<6>(w, 4 * kPanelColumns);
      multiply_bytes<0, 4, 6>();
      load_tile<7>(w + 64, 4 * kPanelColumns);
      multiply_bytes<1, 4, 7>();
      load_tile<6>(w + 128, 4 * kPanelColumns);
      multiply_bytes<2, 4, 6>();
      load_tile<7>(w + 192, 4 * kPanelColumns);
      multiply_bytes<3, 4, 7>();
    }
    store_tile<0>(out[0], sizeof(out[0]));
    store_tile<1>(out[0] + 16, sizeof(out[0]));
    store_tile<2>(out[0] + 32, sizeof(out[0]));
    store_tile<3>(out[0] + 48, sizeof(out[0]));
  }

  LLMK_INLINE void fold(const LinearJob& job, const Group& group, int64_t row, const int32_t* products, float* total) {
    const int32_t x_sum = job.rows.sums[row * job.shape.groups + group.index];
    const float* scales = reinterpret_cast<const float*>(group.scales);
    const uint8_t* zeros = group.scales + kPanelColumns * 4;
    LLMK_UNROLL
    for (int v = 0; v < kPanelColumns; v += kLanes) {
      const Ints excess = job.header.asymmetric != 0
                              ? multiply_ints(load_unsigned_bytes(zeros + v), broadcast_int(-x_sum))
                              : broadcast_int(-Step::kZero * x_sum);
      const Vec part = to_floats(add(load_ints(products + v), excess));
      store(total + v, fused(part, load(scales + v), group.first ? zero() : load(total + v)));
    }
  }

  LLMK_INLINE Ints multiply_ints(Ints a, Ints b) { return LLMK_ARCH::multiply(a, b); }
};

}  // namespace LLMK_ARCH
}  // namespace llmk
