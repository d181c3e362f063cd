// The first `hidden` lanes become `other`: keys before a sliding window, which a row meets in one tile or two.
#pragma once
#include "../common/types.h"

namespace llmk {
namespace LLMK_ARCH {

static inline __attribute__((noinline)) Vec hide_lanes(Vec v, int64_t hidden, float other) {
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < smaller(hidden, kLanes); ++i) lanes[i] = other;
  return load(lanes);
}

}  // namespace LLMK_ARCH
}  // namespace llmk
