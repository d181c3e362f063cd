// What happens to the sums of a tile: scales, bias, then store, SwiGLU or arg-max.
#pragma once
#include "../common/types.h"
#include "linear.h"
#include "swiglu.h"

namespace llmk {
namespace LLMK_ARCH {

enum class Scaling : int { kNone, kRow, kColumn, kIntegerBoth };

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

static inline void find_best(const Vec (&values)[4], int64_t column, int64_t count, uint64_t* best) {
  Vec masked[4];
  LLMK_UNROLL
  for (int v = 0; v < 4; ++v) {
    // maximum(NaN, x) is x: a NaN never wins.
    masked[v] = maximum(keep_first(values[v], larger(count - v * kLanes, 0), -INFINITY), broadcast(-INFINITY));
  }
  const float most = largest(maximum(maximum(masked[0], masked[1]), maximum(masked[2], masked[3])));
  if (best_key(most, column) <= __atomic_load_n(best, __ATOMIC_RELAXED)) return;
  for (int v = 0; v < 4; ++v) {
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

template <class T>
static inline void finish_row(const LinearJob& job, int64_t row, int64_t panel, const Vec (&values)[4]) {
  const LinearArgs& args = job.args;
  if (args.out == nullptr) return;
  T* out = static_cast<T*>(args.out) + row * args.out_stride;
  const bool swiglu = args.epilogue == Epilogue::kSwiglu;
  for (int v = 0; v < 4; v += swiglu ? 2 : 1) {
    const int64_t column = vector_column(job.header, panel, v);
    const Vec value = swiglu ? swiglu_lanes(values[v], values[v + 1]) : values[v];
    store_part(out + column, value, vector_end(job.header, v) - column);
  }
}

static inline void scale_row(const LinearJob& job, int64_t row, const float* scales, const float* sums,
                             Vec (&values)[4]) {
  LLMK_UNROLL
  for (int v = 0; v < 4; ++v) {
    const float* at = sums + v * kLanes;
    if (job.scaling == Scaling::kNone) values[v] = load(at);
    if (job.scaling == Scaling::kRow) values[v] = mul(load(at), broadcast(job.rows.scales[row]));
    if (job.scaling == Scaling::kColumn) values[v] = mul(load(at), load(scales + v * kLanes));
    if (job.scaling == Scaling::kIntegerBoth) {
      const Vec scaled = mul(to_floats(load_ints(at)), broadcast(job.rows.scales[row]));
      values[v] = mul(scaled, load(scales + v * kLanes));
    }
  }
}

// sums: [count][64], of rows from `row`.
static void finish_tile(const LinearJob& job, int64_t panel, int64_t row, int64_t count, const float* sums) {
  const uint8_t* end = job.panels + panel * job.shape.panel_bytes + job.shape.steps * job.shape.step_bytes;
  const float* scales = reinterpret_cast<const float*>(end);  // read only without groups
  for (int64_t r = 0; r < count; ++r, ++row, sums += kPanelColumns) {
    Vec values[4];
    scale_row(job, row, scales, sums, values);
    if (job.bias != nullptr) {
      LLMK_UNROLL
      for (int v = 0; v < 4; ++v) values[v] = add(values[v], load(job.bias + panel * kPanelColumns + v * kLanes));
    }
    if (job.best != nullptr) {
      find_best(values, panel * kPanelColumns, job.header.columns - panel * kPanelColumns, job.best + row);
    }
    const bool wide = job.args.epilogue == Epilogue::kStoreFloat || job.args.dtype == DType::kFloat32;
    if (wide) {
      finish_row<float>(job, row, panel, values);
    } else if (job.args.dtype == DType::kFloat16) {
      finish_row<half_t>(job, row, panel, values);
    } else {
      finish_row<bfloat_t>(job, row, panel, values);
    }
  }
}

}  // namespace LLMK_ARCH
}  // namespace llmk
