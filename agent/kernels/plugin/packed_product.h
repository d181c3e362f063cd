// What the primitives of matrix products have in common: the packed form of a weight, and rows that another primitive
// has quantised. The product itself is kernels().linear (ops/linear.h).
#pragma once
#include <vector>

#include "../common/thread_pool.h"
#include "../ops/primitive_weight.h"

namespace llmk {

// The packed form for one call: the kept one, or one made here.
class Blob {
 public:
  // 0, or an error code after one line on standard error.
  int find(const char* op, const PrimitiveWeight& weight);
  const void* data() const { return data_; }

 private:
  const void* data_ = nullptr;
  std::vector<char> own_;
};

// The product of `rows` rows, which lie one behind the other; what they are is for the caller to say.
LinearArgs linear_args(const void* blob, DType dtype, int64_t rows, void* out);

// Room for rows as the linear kernel takes them: whole cache lines, with the sum of each. The rows stay in `values`,
// [rows, depth], where they are whole cache lines there; else they lie in memory of the thread's own, until it asks for
// other rows.
QuantizedRows room_for_rows(int8_t* values, float* scales, int64_t rows, int64_t depth);

// Rows quantised by a primitive, in such room.
QuantizedRows given_rows(const int8_t* x, const float* scales, int64_t rows, int64_t depth);

static inline int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Calls function(row) for every row of `depth` elements, over threads where that pays.
template <class Function>
void for_rows(int64_t rows, int64_t depth, const Function& function) {
  const int64_t rows_per_task = larger(1, (1 << 15) / larger(depth, 1));
  parallel_for(ceil_div(rows, rows_per_task), [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < smaller(rows, (task + 1) * rows_per_task); ++row) function(row);
  });
}

}  // namespace llmk
