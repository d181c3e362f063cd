// RmsNorm and AddRmsNorm (Zhang and Sennrich 2019).
//
//  x, residual [rows, width]   gamma [width]   ->   y [rows, width], rstd [rows] float, and for AddRmsNorm the sum
//  s = round(x + residual);  rstd = 1 / sqrt(mean(s^2) + epsilon);  y = round(s * rstd * gamma)
//
// For RmsNorm, s is x. Squares are added up in 16 lanes over the width. Then sum() of arch/vec.h adds the lanes.
#pragma once
#include <cmath>

#include "../common/row_tasks.h"

namespace llmk {

struct RmsNormArgs {
  const void* x;
  const void* residual;  // null: RmsNorm instead of AddRmsNorm
  const void* gamma;
  void* y;
  float* rstd;  // may be null
  void* sum;    // x + residual; null for RmsNorm
  int64_t rows, width;
  float epsilon;
  DType dtype, gamma_dtype;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

// Computes one row. With a residual, first writes the sum of x and the residual, rounded to T, and reads the sum back.
template <class T, class G>
static inline void rms_norm_row(const RmsNormArgs& args, int64_t row) {
  const int64_t width = args.width, full = width / kLanes * kLanes, tail = width - full;
  const T* const x = static_cast<const T*>(args.x) + row * width;
  const T* source = x;
  const G* gamma = static_cast<const G*>(args.gamma);
  Vec squares = zero();
  if (args.residual != nullptr) {
    const T* residual = static_cast<const T*>(args.residual) + row * width;
    T* sums = static_cast<T*>(args.sum) + row * width;
    for (int64_t i = 0; i < full; i += kLanes) store(sums + i, add(load(source + i), load(residual + i)));
    if (tail != 0) store_n(sums + full, add(load_n(source + full, tail), load_n(residual + full, tail)), tail);
    source = sums;
  }
  for (int64_t i = 0; i < full; i += kLanes) squares = fma(load(source + i), load(source + i), squares);
  if (tail != 0) squares = fma(load_n(source + full, tail), load_n(source + full, tail), squares);
  const float rstd = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + args.epsilon);
  if (args.rstd != nullptr) args.rstd[row] = rstd;
  T* y = static_cast<T*>(args.y) + row * width;
  const Vec scale = broadcast(rstd);
  for (int64_t i = 0; i < full; i += kLanes) {
    // Prefetches the next row. This thread probably computes it next, and it may still be in main memory.
    __builtin_prefetch(x + width + i);
    if (args.residual != nullptr) __builtin_prefetch(static_cast<const T*>(args.residual) + (row + 1) * width + i);
    store(y + i, mul(mul(load(source + i), scale), load(gamma + i)));
  }
  if (tail != 0) {
    store_n(y + full, mul(mul(load_n(source + full, tail), scale), load_n(gamma + full, tail)), tail);
  }
}

template <class T, class G>
static inline void rms_norm_rows(const RmsNormArgs& args) {
  const int64_t per_task = rows_per_task(args.rows, args.width);
  parallel_for(ceil_div(args.rows, per_task), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * per_task, args.rows);
    for (int64_t row = task * per_task; row < end; ++row) rms_norm_row<T, G>(args, row);
  });
}

static void rms_norm(const RmsNormArgs& args) {
  with_element_type(args.dtype, [&](auto x) {
    with_element_type(args.gamma_dtype, [&](auto gamma) { rms_norm_rows<decltype(x), decltype(gamma)>(args); });
  });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
