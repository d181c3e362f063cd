// What happens to the sums of a tile: scales, bias, then store, SwiGLU or arg-max.
#pragma once
#include "../common/types.h"
#include "linear.h"
#include "swiglu.h"

namespace llmk {
namespace LLMK_ARCH {

// kIntegerBoth: integers by the scales of row and column. kUnsignedBoth: the same, of weights that are still 128 too large.
enum class Scaling : int { kNone, kRow, kColumn, kIntegerBoth, kUnsignedBoth };

struct LinearJob {
  const LinearArgs& args;
  PackedWeightHeader header;
  WeightShape shape;
  const uint8_t* panels;
  const float* bias;  // null: none
  const void* x;     // as the step takes it
  int64_t x_stride;  // in its elements
  QuantizedRows rows;
  uint64_t* best;  // [rows], see best_key()
  Scaling scaling;
  // Half a panel: vectors 2 * half and 2 * half + 1, a gate and its up where there are such.
  void (*finish)(const LinearJob&, int64_t panel, int half, int64_t row, int64_t count, const float* sums);
};

// Orders by value, then by lowest index: a float's bits made to count upwards, and the index counting down.
static inline uint64_t best_key(float value, int64_t index) {
  const uint32_t bits = float_to_bits(value + 0.0f);  // -0 and 0 tie
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}
static inline int32_t best_index(uint64_t key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }
static inline float best_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return bits_to_float((ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered);
}

static inline void raise_best(uint64_t* best, uint64_t key) {
  uint64_t seen = __atomic_load_n(best, __ATOMIC_RELAXED);
  while (key > seen && !__atomic_compare_exchange_n(best, &seen, key, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

static inline void find_best(const Vec (&values)[2], int64_t column, int64_t count, uint64_t* best) {
  Vec masked[2];
  LLMK_UNROLL
  for (int v = 0; v < 2; ++v) {
    // maximum(NaN, x) is x: a NaN never wins.
    masked[v] = maximum(keep_first(values[v], larger(count - v * kLanes, 0), -INFINITY), broadcast(-INFINITY));
  }
  const float most = largest(maximum(masked[0], masked[1]));
  if (best_key(most, column) <= __atomic_load_n(best, __ATOMIC_RELAXED)) return;
  for (int v = 0; v < 2; ++v) {
    const int lane = first_lane_equal(masked[v], most);
    if (lane < kLanes) return raise_best(best, best_key(most, column + v * kLanes + lane));
  }
}

template <class T>
static inline void store_part(T* out, Vec value, int64_t count) {
  if (count >= kLanes) {
    store(out, value);
  } else if (count > 0) {
    store_n(out, value, count);
  }
}

template <Scaling kScaling>
LLMK_INLINE Vec scaled(const float* sum, Vec row_scale, Ints excess, const float* column_scales) {
  if constexpr (kScaling == Scaling::kRow) return mul(load(sum), row_scale);
  if constexpr (kScaling == Scaling::kColumn) return mul(load(sum), load(column_scales));
  if constexpr (kScaling == Scaling::kIntegerBoth) {
    return mul(mul(to_floats(load_ints(sum)), row_scale), load(column_scales));
  }
  if constexpr (kScaling == Scaling::kUnsignedBoth) {
    return mul(mul(to_floats(add(load_ints(sum), excess)), row_scale), load(column_scales));
  }
  return load(sum);
}

// One way to finish rows of half a panel, whose sums are 64 floats apart: all that is the same for a whole product is a
// template argument.
template <Scaling kScaling, bool kSwiglu, bool kBest, class T>
static void finish_rows(const LinearJob& job, int64_t panel, int half, int64_t row, int64_t count, const float* sums) {
  const LinearArgs& args = job.args;
  const int64_t first = 2 * half * kLanes;  // of the panel's columns
  const uint8_t* end = job.panels + panel * job.shape.panel_bytes + job.shape.steps * job.shape.step_bytes;
  const float* scales = reinterpret_cast<const float*>(end) + first;  // read only without groups
  constexpr int kStores = kSwiglu ? 1 : 2;
  const float* bias = job.bias == nullptr ? nullptr : job.bias + panel * kPanelColumns + first;
  int64_t column[2], width[2];
  for (int v = 0; v < kStores; ++v) {
    column[v] = vector_column(job.header, panel, 2 * half + v);
    width[v] = vector_end(job.header, 2 * half + v) - column[v];
  }
  const bool whole = width[kStores - 1] >= kLanes && width[0] >= kLanes;
  for (int64_t r = 0; r < count; ++r, ++row, sums += kPanelColumns) {
    constexpr bool kByRow = kScaling != Scaling::kNone && kScaling != Scaling::kColumn;
    const Vec row_scale = broadcast(kByRow ? job.rows.scales[row] : 1.0f);
    const Ints excess = broadcast_int(kScaling == Scaling::kUnsignedBoth ? -128 * job.rows.sums[row] : 0);
    Vec values[2];
    LLMK_UNROLL
    for (int v = 0; v < 2; ++v) values[v] = scaled<kScaling>(sums + v * kLanes, row_scale, excess, scales + v * kLanes);
    if (bias != nullptr) {
      LLMK_UNROLL
      for (int v = 0; v < 2; ++v) values[v] = add(values[v], load(bias + v * kLanes));
    }
    if constexpr (kBest) {
      const int64_t from = panel * kPanelColumns + first;
      find_best(values, from, job.header.columns - from, job.best + row);
      if (args.out == nullptr) continue;
    }
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    LLMK_UNROLL
    for (int v = 0; v < kStores; ++v) {
      const Vec value = kSwiglu ? swiglu_lanes(values[0], values[1]) : values[v];
      if (whole) {
        store(out + column[v], value);
      } else {
        store_part(out + column[v], value, width[v]);
      }
    }
  }
}

using FinishRows = decltype(LinearJob::finish);

template <Scaling kScaling, class T>
static inline FinishRows choose_epilogue(const LinearJob& job) {
  return job.args.epilogue == Epilogue::kSwiglu ? finish_rows<kScaling, true, false, T>
                                                : finish_rows<kScaling, false, false, T>;
}

template <Scaling kScaling>
static inline FinishRows choose_type(const LinearJob& job) {
  if (job.best != nullptr) return finish_rows<kScaling, false, true, float>;
  if (job.args.epilogue == Epilogue::kStoreFloat || job.args.dtype == DType::kFloat32) {
    return choose_epilogue<kScaling, float>(job);
  }
  return job.args.dtype == DType::kFloat16 ? choose_epilogue<kScaling, half_t>(job)
                                           : choose_epilogue<kScaling, bfloat_t>(job);
}

// Once a product.
static inline FinishRows choose_finish(const LinearJob& job) {
  if (job.scaling == Scaling::kRow) return choose_type<Scaling::kRow>(job);
  if (job.scaling == Scaling::kColumn) return choose_type<Scaling::kColumn>(job);
  if (job.scaling == Scaling::kIntegerBoth) return choose_type<Scaling::kIntegerBoth>(job);
#ifdef LLMK_AMX
  if (job.scaling == Scaling::kUnsignedBoth) return choose_type<Scaling::kUnsignedBoth>(job);
#endif
  return choose_type<Scaling::kNone>(job);
}

// sums: [count][64], of rows from `row`.
static inline void finish_tile(const LinearJob& job, int64_t panel, int64_t row, int64_t count, const float* sums) {
  for (int half = 0; half < 2; ++half) job.finish(job, panel, half, row, count, sums + 2 * half * kLanes);
}

}  // namespace LLMK_ARCH
}  // namespace llmk
