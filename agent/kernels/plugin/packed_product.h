// Code that the primitives for matrix products share: it finds the packed form of a weight, and quantises rows.
// kernels().linear computes the product itself (ops/linear.h).
#pragma once
#include <vector>

#include "../common/thread_pool.h"
#include "../ops/primitive_weight.h"

namespace llmk {

// The packed form of a weight, for one call. keep_primitive() has stored this form, or this object makes it.
class Blob {
 public:
  // Finds the form that keep_primitive() has stored. If there is none, packs the weight into memory of this object.
  // Returns 0, or writes one line to standard error and returns an error code.
  int find(const char* op, const PrimitiveWeight& weight);
  const void* data() const { return data_; }

 private:
  const void* data_ = nullptr;
  std::vector<char> own_;
};

// Returns arguments for a product of `rows` rows. The rows of x and of `out` are adjacent in memory. The caller must
// set x or `quantized`.
LinearArgs linear_args(const void* blob, DType dtype, int64_t rows, void* out);

// Provides memory for quantised rows in the layout of the linear kernel: each row fills whole cache lines and has a
// sum. If a row of `values` [rows, depth] fills whole cache lines, the rows are stored in `values`. Otherwise they are
// stored in scratch memory of this thread, which is valid until the next call.
QuantizedRows allocate_rows(int8_t* values, float* scales, int64_t rows, int64_t depth);

// Converts rows that another primitive has quantised to the layout of allocate_rows().
QuantizedRows given_rows(const int8_t* x, const float* scales, int64_t rows, int64_t depth);

static inline int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Calls function(row) for each of `rows` rows of `depth` elements. Uses several threads if there is enough work.
template <class Function>
void for_rows(int64_t rows, int64_t depth, const Function& function) {
  const int64_t rows_per_task = larger(1, (1 << 15) / larger(depth, 1));
  parallel_for(ceil_div(rows, rows_per_task), [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < smaller(rows, (task + 1) * rows_per_task); ++row) function(row);
  });
}

}  // namespace llmk
