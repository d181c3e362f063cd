// Multiplies integer weights by a single row of bfloat16 in vector registers. The results have the same bits as those
// of the AMX tiles in linear_weight_only_amx.h. For one row, unpacking weights to memory would take longer than
// multiplying them in registers.
//
// To get the same bits, the kernel adds in the order of a tile product. It divides the depth into ranges of 32. In a
// range, it adds up the products of the even depths in order from zero, and separately the products of the odd depths.
// Then it adds these two sums to the sum of the output element. Subnormal numbers count as zero.
#pragma once
#include <utility>

#include "../common/floating_point.h"
#include "linear_weight_only_amx.h"

namespace llmk::LLMK_ARCH {

// Returns the weights of depth `i` of a step for 16 columns.
template <int i>
LLMK_INLINE Vec numbers_at(ByteWeights, Ints step, Ints shift) {
  return to_floats(add(low_bits<8>(shift_right<8 * i>(step)), shift));
}
template <int i>
LLMK_INLINE Ints nibbles_at(Ints step) {
  constexpr int kBit = i % 4 * 8 + i / 4 * 4;
  return kBit == 0 ? step : shift_right<kBit>(step);
}
template <int i>
LLMK_INLINE Vec numbers_at(NibbleWeights<true>, Ints step, Ints shift) {
  return to_floats(add(low_bits<4>(nibbles_at<i>(step)), shift));
}
template <int i>
LLMK_INLINE Vec numbers_at(NibbleWeights<false>, Ints step, Ints) {
  const __m512 less_eight = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(nibbles_at<i>(step).v, less_eight)};
}

template <class Weights>
class SingleRow {
 public:
  // Multiplies the only row of `job` by all weights. The caller must have checked that TiledWeightOnly::fits() returns
  // true.
  static void run(const LinearJob& job) {
    const int64_t depth = job.header.depth;
    const bfloat_t* from = static_cast<const bfloat_t*>(job.x);
    float* x = static_cast<float*>(thread_scratch(kScratchLinearRows, depth * 4));
    for (int64_t k = 0; k < depth; k += kLanes) store(x + k, load(from + k));
    for_panels(job, 1, [&](int64_t panel, int64_t row, int64_t row_end) {
      fetch_adapters(job, panel, row, row_end);
      task(job, panel, x);
    });
  }

 private:
  static constexpr int kVectors = 4;
  static constexpr int64_t kUnitDepth = 2 * kAmxSteps, kUnitSteps = kUnitDepth / Weights::kDepth;
  static_assert(kTileSteps % kUnitSteps == 0, "the steps of a unit follow each other");

  using Sums = Vec[kVectors];

  static void task(const LinearJob& job, int64_t panel, const float* x) {
    const WeightShape& shape = job.shape;
    const uint8_t* weights = job.panels + panel * shape.panel_bytes;
    float* sums = static_cast<float*>(thread_scratch(kScratchLinearTile, shape.groups * kPanelColumns * 4));
    {
      const FlushedFloatingPoint scope;
      sum_groups(shape, weights, x, sums);
    }
    if (scales_groups(job)) fold_groups(shape, weights, sums);
    finish_tile(job, panel, 0, 1, sums);
  }

  static int64_t steps_of(const WeightShape& shape, int64_t group) {
    return smaller(shape.group_steps, shape.steps - group * shape.group_steps);
  }
  static const float* scales_of(const WeightShape& shape, const uint8_t* group, int64_t steps) {
    return reinterpret_cast<const float*>(group + steps * shape.step_bytes);
  }

  // Writes the sums of each group to `sums` [groups][64 columns].
  LLMK_OUTLINE void sum_groups(const WeightShape& shape, const uint8_t* group, const float* x, float* sums) {
    for (int64_t g = 0; g < shape.groups; ++g, sums += kPanelColumns) {
      const int64_t steps = steps_of(shape, g);
      sum_group(group, steps, scales_of(shape, group, steps), x, sums);
      x += steps * Weights::kDepth;
      group += steps * shape.step_bytes + shape.scale_bytes;
    }
  }

  // Multiplies the row by one quantisation group of a panel, in the order of a tile product (see the top of this file).
  LLMK_INLINE void sum_group(const uint8_t* group, int64_t steps, const float* scales, const float* x, float* sums) {
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(scales + kPanelColumns);
    Ints shifts[kVectors];
    Sums total = {zero(), zero(), zero(), zero()};
    LLMK_UNROLL
    for (int v = 0; v < kVectors; ++v) shifts[v] = Weights::shift(zeros + v * kLanes);
    for (int64_t first = 0; first < steps; first += kUnitSteps, x += kUnitDepth) {
      const uint8_t* at[kVectors];
      LLMK_UNROLL
      for (int v = 0; v < kVectors; ++v) at[v] = group + step_offset(kTileSteps, steps, first, v, 64);
      Sums even = {zero(), zero(), zero(), zero()}, odd = {zero(), zero(), zero(), zero()};
      for (int64_t s = 0; s < kUnitSteps; ++s) {
        add_step(at, shifts, x + s * Weights::kDepth, even, odd, std::make_index_sequence<Weights::kDepth / 2>());
        LLMK_UNROLL
        for (int v = 0; v < kVectors; ++v) at[v] += 64;
      }
      LLMK_UNROLL
      for (int v = 0; v < kVectors; ++v) total[v] = add(total[v], add(even[v], odd[v]));
    }
    LLMK_UNROLL
    for (int v = 0; v < kVectors; ++v) store(sums + v * kLanes, total[v]);
  }

  template <size_t... pair>
  LLMK_INLINE void add_step(const uint8_t* const (&at)[kVectors], const Ints (&shifts)[kVectors], const float* x,
                            Sums& even, Sums& odd, std::index_sequence<pair...>) {
    Ints step[kVectors];
    LLMK_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      step[v] = load_ints(at[v]);
      fetch_ahead(at[v]);
    }
    ((add_depth<2 * pair>(step, shifts, x, even), add_depth<2 * pair + 1>(step, shifts, x, odd)), ...);
  }

  template <int i>
  LLMK_INLINE void add_depth(const Ints (&step)[kVectors], const Ints (&shifts)[kVectors], const float* x,
                             Sums& sums) {
    const Vec activation = broadcast(x[i]);
    LLMK_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[v] = fma(activation, numbers_at<i>(Weights(), step[v], shifts[v]), sums[v]);
  }

  // Adds up the scaled sums of all groups, in the order of the groups: total = fma(sum, scale, total). The totals
  // overwrite the sums of the first group.
  static void fold_groups(const WeightShape& shape, const uint8_t* group, float* sums) {
    Sums total = {zero(), zero(), zero(), zero()};
    for (int64_t g = 0; g < shape.groups; ++g) {
      const int64_t steps = steps_of(shape, g);
      const float* scales = scales_of(shape, group, steps);
      LLMK_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        total[v] = fused(load(sums + g * kPanelColumns + v * kLanes), load(scales + v * kLanes), total[v]);
      }
      group += steps * shape.step_bytes + shape.scale_bytes;
    }
    LLMK_UNROLL
    for (int v = 0; v < kVectors; ++v) store(sums + v * kLanes, total[v]);
  }
};

}  // namespace llmk::LLMK_ARCH
