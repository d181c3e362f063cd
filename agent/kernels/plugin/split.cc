// Runs SplitWithSize(input, split_size, dim): copies pieces of the given sizes along axis `dim`, for any type.
#include "../common/dtype_bytes.h"
#include "../common/thread_pool.h"
#include "../common/types.h"
#include "call.h"

namespace llmk {

int plugin_split(const Call& call) {
  enum { kInput, kSizes, kDim, kFirstPiece };
  int64_t axis = call.integer(kDim);
  if (axis < 0) axis += call.ndims[kInput];
  const int64_t bytes = dtype_bytes(call.dtypes[kInput]);
  if (bytes == 0 || axis < 0 || axis >= call.ndims[kInput]) {
    return refuse_text(call.op, "takes a type of whole bytes and an axis of the input; they are %s and %lld of %d",
                       call.dtypes[kInput], static_cast<long long>(call.integer(kDim)), call.ndims[kInput]);
  }
  const int split_axis = static_cast<int>(axis);
  const int64_t outer = call.size(kInput, 0, split_axis), inner = call.size(kInput, split_axis + 1) * bytes;
  int64_t total = 0;
  for (int i = kFirstPiece; i < call.count; ++i) total += call.dim(i, split_axis);
  if (total != call.dim(kInput, split_axis)) {
    return refuse_text(call.op, "the pieces have %lld of the %lld along axis %d", static_cast<long long>(total),
                       static_cast<long long>(call.dim(kInput, split_axis)), split_axis);
  }
  const auto copy_row = [&](int64_t row) {
    const char* from = call.as<char>(kInput) + row * total * inner;
    for (int i = kFirstPiece; i < call.count; ++i) {
      const int64_t piece = call.dim(i, split_axis) * inner;
      std::memcpy(call.as<char>(i) + row * piece, from, static_cast<size_t>(piece));
      from += piece;
    }
  };
  const int64_t rows_per_task = larger(1, (1 << 18) / larger(total * inner, 1));
  parallel_for(ceil_div(outer, rows_per_task), [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < smaller(outer, (task + 1) * rows_per_task); ++row) copy_row(row);
  });
  return 0;
}

}  // namespace llmk
