// Code that the primitives for matrix products share: it finds the packed form of a weight, and quantises rows.
// kernels().linear computes the product itself (ops/linear.h).
#pragma once
#include <vector>

#include "../common/row_tasks.h"
#include "../ops/primitive_weight.h"
#include "call.h"

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

// How a fusion (quantised_fusion.h) runs a product. Without a fusion, both members are null.
struct ProductForm {
  const QuantizedRows* quantized;  // the rows x of QuantBatchMatmul; null: the argument of the primitive has them
  void* gated;  // receives Swiglu of the product, and the product's own output is not written; null: no Swiglu
};

// Run a product in this form. With `gated`, its weight must be one for which has_gated_blob() is true.
int plugin_matmul(const Call& call, const ProductForm& form);
int plugin_quant_matmul(const Call& call, const ProductForm& form);
int plugin_weight_quant_matmul(const Call& call, const ProductForm& form);

// Provides memory for quantised rows in the layout of the linear kernel: each row fills whole cache lines and has a
// sum. If a row of `values` [rows, depth] fills whole cache lines, the rows are stored in `values`. Otherwise they are
// stored in scratch memory of this thread, which is valid until the next call.
QuantizedRows allocate_rows(int8_t* values, float* scales, int64_t rows, int64_t depth);

// Converts rows that another primitive has quantised to the layout of allocate_rows().
QuantizedRows given_rows(const int8_t* x, const float* scales, int64_t rows, int64_t depth);

static inline int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Calls function(row) for each of `rows` rows of `depth` elements. Uses several threads if there is enough work
// (row_tasks.h).
template <class Function>
void parallel_for_rows(int64_t rows, int64_t depth, const Function& function) {
  const int64_t per_task = rows_per_task(rows, depth);
  parallel_for(ceil_div(rows, per_task), [&](int64_t task) {
    for (int64_t row = task * per_task; row < smaller(rows, (task + 1) * per_task); ++row) function(row);
  });
}

}  // namespace llmk
