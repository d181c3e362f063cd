// Begins and ends the call of a linear layer, and converts its activations to the type that the products read.
#pragma once
#include <cmath>

#include "../common/row_tasks.h"
#include "linear_driver.h"

namespace llmk::LLMK_ARCH {

// Calls run(job) for the job of a linear layer. Then writes the results of the arg-max, if they are requested.
template <class Run>
static inline void run_linear(const LinearArgs& args, const Run& run) {
  const PackedWeightHeader& header = header_of(args.weight);
  LinearJob job{args,    header, weight_shape(header), static_cast<const uint8_t*>(args.weight) + sizeof(header),
                bias_of(args.weight), static_inputs_of(args.weight).sum_offsets, nullptr, 0, QuantizedRows{}, nullptr,
                nullptr, SplitRows{}};
  if (args.best_ids != nullptr) {
    job.best = static_cast<uint64_t*>(thread_scratch(kScratchLinearBest, args.rows * 8));
    for (int64_t row = 0; row < args.rows; ++row) job.best[row] = best_key(-INFINITY, 0);
  }
  run(&job);
  for (int64_t row = 0; args.best_ids != nullptr && row < args.rows; ++row) {
    args.best_ids[row] = best_index(job.best[row]);
    if (args.best_values != nullptr) args.best_values[row] = best_value(job.best[row]);
  }
}

// Calls function(row) for every row, on several threads if there is enough work.
template <class Function>
static inline void for_rows(int64_t rows, int64_t depth, const Function& function) {
  for_row_ranges(rows, depth, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

// Converts the rows of x to type To. Pads each row with zeros, up to `stride` elements.
template <class To, class T>
static inline void convert_rows(LinearJob* job, int64_t stride) {
  const LinearArgs& args = job->args;
  const int64_t depth = job->header.depth;
  To* to = static_cast<To*>(thread_scratch(kScratchLinearRows, args.rows * stride * static_cast<int64_t>(sizeof(To))));
  for_rows(args.rows, depth, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    To* out = to + row * stride;
    for (int64_t k = 0; k < stride; k += kLanes) {
      store_part(out + k, k < depth ? load_n(x + k, depth - k) : zero(), stride - k);
    }
  });
  job->x = to;
  job->x_stride = stride;
}

// Sets the activations of the job to float32 rows. If the rows have another type, or if the depth is not a whole number
// of steps, copies the rows. The copied rows are padded with zeros.
static void rows_as_floats(LinearJob* job) {
  const int64_t stride = ceil_div(job->header.depth, kLanes) * kLanes;
  job->x = job->args.x;
  job->x_stride = job->args.x_stride;
  if (job->args.dtype == DType::kFloat16) convert_rows<float, half_t>(job, stride);
  if (job->args.dtype == DType::kBFloat16) convert_rows<float, bfloat_t>(job, stride);
  const bool uneven = job->header.depth % job->shape.step_depth != 0;
  if (job->args.dtype == DType::kFloat32 && uneven) convert_rows<float, float>(job, stride);
}

}  // namespace llmk::LLMK_ARCH
