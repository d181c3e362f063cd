// The loops of the sampler over one row of logits, with vector instructions. Sums have a fixed order: lane i % 16 adds
// logit i, then sum() of arch/vec.h adds the lanes.
#pragma once
#include "../common/types.h"

namespace llmk {

// The sampler's functions for one instruction set. Each function reads a row of `size` logits once.
struct LogitsPasses {
  // returns the largest logit; NaN counts as smaller than any number
  float (*largest)(const float* row, int64_t size);
  float (*sum_exp)(const float* row, int64_t size, float top);                   // returns the sum of e^(x - top)
  void (*divide)(const float* row, int64_t size, float divisor, float* out);
  // writes the tokens with low < x <= high to ids and returns their number
  int64_t (*collect)(const float* row, int64_t size, float low, float high, int32_t* ids);
  int64_t (*first_equal)(const float* row, int64_t size, float value);                      // -1: not found
  void (*weights)(const float* values, int64_t size, float top, float* out);     // writes e^(x - top)
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

static float logits_largest(const float* row, int64_t size) {
  constexpr float kLowest = -3.4028235e38f;
  Vec best = broadcast(kLowest);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) best = maximum(load(row + i), best);
  if (i < size) best = maximum(keep_first(load_n(row + i, size - i), size - i, kLowest), best);
  return largest(best);
}

static float logits_sum_exp(const float* row, int64_t size, float top) {
  const Vec shift = broadcast(top);
  Vec total = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) total = add(total, exponential(sub(load(row + i), shift)));
  if (i < size) {
    total = add(total, keep_first(exponential(sub(load_n(row + i, size - i), shift)), size - i, 0.0f));
  }
  return sum(total);
}

static void logits_divide(const float* row, int64_t size, float divisor, float* out) {
  const Vec by = broadcast(divisor);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, div(load(row + i), by));
  if (i < size) store_n(out + i, div(load_n(row + i, size - i), by), size - i);
}

static int64_t logits_collect(const float* row, int64_t size, float low, float high, int32_t* ids) {
  int64_t found = 0, i = 0;
  int32_t lanes[kLanes + 1];
  for (; i < size; i += kLanes) {
    const int64_t n = smaller(kLanes, size - i);
    const Vec values = n == kLanes ? load(row + i) : keep_first(load_n(row + i, n), n, low);
    const int count = find_between(values, low, high, lanes);
    for (int j = 0; j < count; ++j) ids[found++] = static_cast<int32_t>(i) + lanes[j];
  }
  return found;
}

static int64_t logits_first_equal(const float* row, int64_t size, float value) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const int lane = first_lane_equal(load(row + i), value);
    if (lane < kLanes) return i + lane;
  }
  for (; i < size; ++i) {
    if (row[i] == value) return i;
  }
  return -1;
}

static void logits_weights(const float* values, int64_t size, float top, float* out) {
  const Vec shift = broadcast(top);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, exponential(sub(load(values + i), shift)));
  if (i < size) store_n(out + i, exponential(sub(load_n(values + i, size - i), shift)), size - i);
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
