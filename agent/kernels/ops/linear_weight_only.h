// int8 weights against float activations: a block of the depth at a time is unpacked into the first-level cache as the
// type the activations are multiplied in (every int8 is exact in bfloat16), then it is a float format.
#pragma once
#include "../common/types.h"
#include "linear_epilogue.h"
#include "linear_tiles.h"

namespace llmk {
namespace LLMK_ARCH {

constexpr int64_t kUnpackSteps = kTileSteps;  // of 4 depths: 16 KB as float32, 8 KB as bfloat16

// 4 depths of 16 columns as floats.
LLMK_INLINE void unpack_four(const uint8_t* from, Vec (&out)[4]) {
  const Ints bytes = load_ints(from), zero_point = broadcast_int(-128);
  out[0] = to_floats(add(low_bytes(bytes), zero_point));
  out[1] = to_floats(add(low_bytes(shift_right<8>(bytes)), zero_point));
  out[2] = to_floats(add(low_bytes(shift_right<16>(bytes)), zero_point));
  out[3] = to_floats(add(shift_right<24>(bytes), zero_point));
}

// Tiles of `steps` steps of 4 depths, [2][steps][16][4] uint8 of either half, to steps of float32 or pairs of bfloat16
// as linear.h has them for a whole group.
static inline void unpack_block(const uint8_t* w, int64_t half_bytes, int64_t steps, float* to) {
  for (int v = 0; v < 4; ++v) {
    const uint8_t* from = w + v / 2 * half_bytes + v % 2 * steps * 64;
    for (int64_t step = 0; step < 4 * steps; step += 4, from += 64) {
      __builtin_prefetch(from + kFetchAhead, 0, 3);
      Vec four[4];
      unpack_four(from, four);
      for (int k = 0; k < 4; ++k) store(to + step_offset(4 * steps, step + k, v, kLanes), four[k]);
    }
  }
}
#ifdef LLMK_BF16_DOT
static inline void unpack_block(const uint8_t* w, int64_t half_bytes, int64_t steps, bfloat_t* to) {
  for (int v = 0; v < 4; ++v) {
    const uint8_t* from = w + v / 2 * half_bytes + v % 2 * steps * 64;
    for (int64_t step = 0; step < 2 * steps; step += 2, from += 64) {
      __builtin_prefetch(from + kFetchAhead, 0, 3);
      Vec four[4];
      unpack_four(from, four);
      bfloat_t* out = to + step_offset(2 * steps, step, v, 2 * kLanes);
      store_ints(out, pair_bfloats(four[0], four[1]));
      store_ints(out + 2 * kLanes, pair_bfloats(four[2], four[3]));
    }
  }
}
#endif

// total = fma(sum, scale, total) for the rows of a task.
static inline void fold_group(const float* sums, const float* scales, int64_t rows, bool first, float* totals) {
  for (int64_t i = 0; i < rows * kPanelColumns; i += kLanes) {
    const Vec total = first ? zero() : load(totals + i);
    store(totals + i, fused(load(sums + i), load(scales + i % kPanelColumns), total));
  }
}

// How an unpacked block is multiplied by rows: in registers.
template <class S>
struct RegisterBlock {
  using Step = S;
  static void multiply(const LinearJob& job, const uint8_t* block, int64_t begin, int64_t end, bool first, int64_t row,
                       int64_t rows, float* sums) {
    const auto nothing = [](int64_t, int64_t, const float*) {};
    const int64_t steps = (end - begin) / Step::kDepth;
    const Piece piece{block, steps * 2 * Step::kVectorBytes, begin / Step::kDepth, end / Step::kDepth, 0, first};
    piece_rows<PlainForm<Step>>(job, piece, row, rows, sums, nothing);
  }
};

template <class Block>
static void weight_only_task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
  using X = typename Block::Step::X;
  const WeightShape& shape = job.shape;
  const bool grouped = job.header.group != 0;  // else the columns' scales come last
  const int64_t rows = row_end - row, size = rows * kPanelColumns;
  alignas(64) X unpacked[kUnpackSteps * 4 * kPanelColumns];
  float* sums = static_cast<float*>(thread_scratch(kScratchLinearTile, 2 * size * 4));
  float* totals = sums + size;
  const uint8_t* w = job.panels + panel * shape.panel_bytes;
  for (int64_t g = 0; g < shape.groups; ++g) {
    const int64_t first = g * shape.group_steps, end = smaller(first + shape.group_steps, shape.steps);
    const int64_t half_bytes = (end - first) * shape.step_bytes / 2;
    for (int64_t step = first; step < end; step += kUnpackSteps) {
      const int64_t count = smaller(kUnpackSteps, end - step);
      unpack_block(w, half_bytes, count, unpacked);
      const uint8_t* block = reinterpret_cast<const uint8_t*>(unpacked);
      Block::multiply(job, block, 4 * step, 4 * (step + count), step == first, row, rows, sums);
      w += count * shape.step_bytes / 2;
    }
    w += half_bytes;
    if (grouped) fold_group(sums, reinterpret_cast<const float*>(w), rows, g == 0, totals);
    w += shape.scale_bytes;
  }
  finish_tile(job, panel, row, rows, grouped ? totals : sums);
}

template <class Block>
static void run_weight_only(const LinearJob& job) {
  for_panels(job, [&](int64_t panel, int64_t row, int64_t row_end) {
    weight_only_task<Block>(job, panel, row, row_end);
  });
}

}  // namespace LLMK_ARCH
}  // namespace llmk
