// Multiplies integer weights by bfloat16 activations (linear_weight_only.h) on AMX tiles. The depth must consist of
// whole tiles. The result of a row does not depend on other rows.
//
// The work is divided into steps. (In linear.h, a step is something else: a few depths.) A step multiplies 16 rows by
// one half (32 columns) of an unpacked block of weights. Its sums are in tiles 0 and 1 for the first half, and in tiles
// 2 and 3 for the second half.
//
// Between the tile products of a step, vector registers do three other things:
//   - They store the sums of the previous step.
//   - They scale the sums of the step before that one, and add them to the totals.
//   - During the first 16 rows, they unpack the next block of weights, tile by tile.
#pragma once
#include "amx_tiles.h"
#include "linear_weight_only.h"

namespace llmk::LLMK_ARCH {

template <class Weights>
class TiledWeightOnly {
 public:
  static bool fits(const LinearJob& job) {
    return job.header.depth % kUnitDepth == 0 && job.header.group % kUnitDepth == 0;
  }

  static void task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
    alignas(64) bfloat_t unpacked[2][kUnpackDepth * kPanelColumns];
    TiledWeightOnly task(job, row, row_end - row);
    const WeightBlocks<Weights> blocks(job.shape, job.panels + panel * job.shape.panel_bytes);
    const int64_t count = blocks.count();
    WeightBlock block = blocks[0];
    for (int64_t i = 0; i < tiles_of(block); ++i) unpack_tile(block, i, unpacked[0]);
    for (int64_t i = 0; i < count; ++i) {
      const WeightBlock next = i + 1 < count ? blocks[i + 1] : WeightBlock{};
      task.multiply(block, unpacked[i % 2], next, unpacked[(i + 1) % 2]);
      block = next;
    }
    task.store_last<1>();
    task.fold();
    task.fold();
    release_tiles();
    task.finish(panel, row);
  }

 private:
  static constexpr int64_t kUnitDepth = 2 * kAmxSteps, kUnitSteps = kUnitDepth / Weights::kDepth;
  static constexpr int64_t kTileSize = kUnitDepth * kLanes, kSumsSize = kAmxRows * kPanelColumns;
  static_assert(kUnpackDepth == 2 * kUnitDepth, "tiles 4 and 5 are the rows of a block of weights");

  TiledWeightOnly(const LinearJob& job, int64_t row, int64_t rows)
      : job_(job), rows_(rows), row_blocks_(ceil_div(rows, kAmxRows)), folds_(scales_groups(job)),
        keeps_(!folds_ || job.shape.group_steps > WeightBlocks<Weights>::kSteps) {
    const int64_t sums = (keeps_ ? row_blocks_ : 1) * kSumsSize;
    sums_ = static_cast<float*>(thread_scratch(kScratchLinearTile, (sums + rows * kPanelColumns) * 4));
    totals_ = sums_ + sums;
    x_ = static_cast<const bfloat_t*>(job.x) + row * job.x_stride;
    // The blocks of rows may differ in length by one row, but the tiles are configured for the longest block. A shorter
    // block therefore also computes the first row of the next block. The last block is never shorter.
    configure_tiles(rows - first_row(row_blocks_ - 1), 0);
  }

  int64_t first_row(int64_t b) const { return rows_ * b / row_blocks_; }
  float* sums_of(int64_t b) const { return sums_ + (keeps_ ? b : 0) * kSumsSize; }

  static int64_t tiles_of(const WeightBlock& block) { return block.count / kUnitSteps * 4; }

  // Unpacks tile i of a block of weights to `to`. Tiles are in the order of the products: [2 halves][units][2 vectors].
  LLMK_INLINE void unpack_tile(const WeightBlock& block, int64_t i, bfloat_t* to) {
    const int64_t of_half = tiles_of(block) / 2, half = i >= of_half ? 1 : 0, within = i - half * of_half;
    const int v = static_cast<int>(2 * half + within % 2);
    unpack_steps<Weights>(block.vector(within / 2 * kUnitSteps, v), kUnitSteps, Weights::shift(block.zeros(v)),
                          to + i * kTileSize);
  }

  // Multiplies all rows by an unpacked block of weights. Between the products of the first 16 rows, unpacks the block
  // `next`.
  void multiply(const WeightBlock& block, const bfloat_t* weights, const WeightBlock& next, bfloat_t* next_weights) {
    const int64_t tiles = tiles_of(next);
    const bfloat_t* x = x_ + block.first * Weights::kDepth;
    int64_t i = 0;
    const auto unpack = [&] {
      if (i < tiles) unpack_tile(next, i++, next_weights);
    };
    const auto nothing = [] {};
    multiply_rows(block, 0, x, weights, unpack);
    while (i < tiles) unpack();
    for (int64_t b = 1; b < row_blocks_; ++b) multiply_rows(block, b, x, weights, nothing);
  }

  template <class Meanwhile>
  void multiply_rows(const WeightBlock& block, int64_t b, const bfloat_t* x, const bfloat_t* weights,
                     const Meanwhile& meanwhile) {
    const int64_t units = block.count / kUnitSteps, stride = job_.x_stride * 2;
    x += first_row(b) * job_.x_stride;
    load_tile<4>(x, stride);
    if (units == 2) load_tile<5>(x + kUnitDepth, stride);
    multiply_half<0>(block, b, weights, units, meanwhile);
    multiply_half<1>(block, b, weights + units * 2 * kTileSize, units, meanwhile);
  }

  // Runs one step: multiplies block `b` of 16 rows by half H (0 or 1) of the unpacked weights `w`.
  template <int H, class Meanwhile>
  void multiply_half(const WeightBlock& block, int64_t b, const bfloat_t* w, int64_t units,
                                 const Meanwhile& meanwhile) {
    float* sums = sums_of(b) + H * 2 * kLanes;
    start_tile<2 * H>(block.starts_group(), sums);
    start_tile<2 * H + 1>(block.starts_group(), sums + kLanes);
    multiply_unit<H, 4>(w, meanwhile);
    if (units == 2) multiply_unit<H, 5>(w + 2 * kTileSize, meanwhile);
    store_last<1 - H>();
    fold();
    const int64_t row = first_row(b);
    last_ = {sums, block.scales() + H * 2 * kLanes, totals_ + row * kPanelColumns + H * 2 * kLanes,
             folds_ && block.ends_group() ? first_row(b + 1) - row : 0, block.number == 0};
  }

  template <int H, int A, class Meanwhile>
  LLMK_INLINE void multiply_unit(const bfloat_t* w, const Meanwhile& meanwhile) {
    load_tile<6>(w, 64);
    multiply_bfloats<2 * H, A, 6>();
    meanwhile();
    load_tile<7>(w + kTileSize, 64);
    multiply_bfloats<2 * H + 1, A, 7>();
    meanwhile();
  }

  template <int T>
  LLMK_INLINE void start_tile(bool first, const float* sums) {
    if (first) {
      clear_tile<T>();
    } else {
      load_tile<T>(sums, kPanelColumns * 4);
    }
  }

  // Stores the sums of the previous step from the tiles to memory. That step computed half H of the panel: 0 or 1.
  template <int H>
  void store_last() {
    if (last_.sums == nullptr) return;
    store_tile<2 * H>(last_.sums, kPanelColumns * 4);
    store_tile<2 * H + 1>(last_.sums + kLanes, kPanelColumns * 4);
  }

  // Adds the sums of the step before the previous step to the totals: total = fma(sum, scale, total). The caller must
  // call store_last() first. The next call of fold() adds the sums of the previous step.
  void fold() {
    if (stored_.rows > 0) fold_group<2>(stored_.sums, stored_.scales, stored_.rows, stored_.first, stored_.totals);
    stored_ = last_;
    last_.rows = 0;
  }

  void finish(int64_t panel, int64_t row) const {
    for (int64_t b = 0; b < row_blocks_; ++b) {
      const int64_t begin = first_row(b), count = first_row(b + 1) - begin;
      finish_tile(job_, panel, row + begin, count, folds_ ? totals_ + begin * kPanelColumns : sums_of(b));
    }
  }

  // A step whose sums are not yet stored, or not yet added to the totals.
  struct Step {
    float* sums;
    const float* scales;
    float* totals;
    int64_t rows;  // number of rows whose sums fold() must add to the totals; 0: none
    bool first;
  };

  const LinearJob& job_;
  const int64_t rows_, row_blocks_;
  // The flag folds_ is true if each group has its own scales. Then the scaled sums of each group are added to the
  // totals. The flag keeps_ is true if the sums of all rows must stay in memory, because the next block of weights adds
  // to them.
  const bool folds_, keeps_;
  const bfloat_t* x_;
  float *sums_, *totals_;
  Step last_ = {}, stored_ = {};
};

}  // namespace llmk::LLMK_ARCH
