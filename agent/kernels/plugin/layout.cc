// The primitives Transpose and Concat. They copy elements of any type and do not compute.
#include <vector>

#include "../common/dtype_bytes.h"
#include "../common/thread_pool.h"
#include "../common/types.h"
#include "call.h"

namespace llmk {
namespace {

constexpr int64_t kTaskBytes = 1 << 18;  // approximate number of bytes that a task copies

// Describes how Transpose moves elements. `sizes` and `strides` leave out trailing axes that keep their place. Their
// elements are contiguous and are copied together, as one run.
struct Moves {
  std::vector<int64_t> sizes;    // size of each axis of the result
  std::vector<int64_t> strides;  // distance in the input between neighbours along each axis of the result, in bytes
  int64_t run;                   // bytes that are copied at a time

  int64_t count() const {
    int64_t runs = 1;
    for (const int64_t size : sizes) runs *= size;
    return runs;
  }

  // Returns the byte offset in the input from which run `number` of the result is copied.
  int64_t place(int64_t number) const {
    int64_t offset = 0;
    for (size_t axis = sizes.size(); axis-- > 0;) {
      offset += number % sizes[axis] * strides[axis];
      number /= sizes[axis];
    }
    return offset;
  }
};

Moves moves_of(const Call& call, const std::vector<int32_t>& order, int64_t element) {
  int kept = static_cast<int>(order.size());
  while (kept > 0 && order[static_cast<size_t>(kept) - 1] == kept - 1) --kept;
  Moves moves{{}, {}, call.size(0, kept) * element};
  for (int axis = 0; axis < kept; ++axis) {
    const int from = order[static_cast<size_t>(axis)];
    moves.sizes.push_back(call.shapes[0][from]);
    moves.strides.push_back(call.size(0, from + 1) * element);
  }
  return moves;
}

// Reads the order of the axes. Returns false if it does not contain each axis once.
bool read_order(const Call& call, std::vector<int32_t>* order) {
  *order = integers(call, 1);
  std::vector<bool> found(static_cast<size_t>(call.ndims[0]), false);
  if (order->size() != found.size()) return false;
  for (int32_t& axis : *order) {
    if (axis < 0) axis += call.ndims[0];
    if (axis < 0 || axis >= call.ndims[0] || found[static_cast<size_t>(axis)]) return false;
    found[static_cast<size_t>(axis)] = true;
  }
  return true;
}

}  // namespace

// Runs Transpose(input, order): axis i of the result is axis order[i] of the input.
int plugin_transpose(const Call& call) {
  const int64_t element = dtype_bytes(call.dtypes[0]);
  std::vector<int32_t> order;
  if (element == 0 || !read_order(call, &order)) {
    return refuse_text(call.op, "takes a type of whole bytes, it is %s, and each of %d axes once", call.dtypes[0],
                       call.ndims[0]);
  }
  const Moves moves = moves_of(call, order, element);
  const int64_t runs = moves.count(), per_task = larger(1, kTaskBytes / larger(moves.run, 1));
  char* out = call.as<char>(call.count - 1);
  parallel_for(ceil_div(runs, per_task), [&](int64_t task) {
    for (int64_t run = task * per_task; run < smaller(runs, (task + 1) * per_task); ++run) {
      std::memcpy(out + run * moves.run, call.as<char>(0) + moves.place(run), static_cast<size_t>(moves.run));
    }
  });
  return 0;
}

// Runs Concat(tensors, axis): joins tensors along an axis. All other axes must be equal.
int plugin_concat(const Call& call) {
  const int pieces = call.count - 2, out = call.count - 1, dims = call.ndims[out];
  const int64_t element = dtype_bytes(call.dtypes[out]);
  int64_t axis = pieces < 1 ? -1 : call.integer(pieces);
  if (axis < 0) axis += dims;
  int64_t total = 0;
  bool fits = element != 0 && pieces > 0 && axis >= 0 && axis < dims;
  for (int i = 0; fits && i < pieces; ++i) {
    fits = call.ndims[i] == dims && std::strcmp(call.dtypes[i], call.dtypes[out]) == 0;
    for (int each = 0; fits && each < dims; ++each) fits = each == axis || call.dim(i, each) == call.dim(out, each);
    if (fits) total += call.dim(i, static_cast<int>(axis));
  }
  if (!fits || total != call.dim(out, static_cast<int>(axis))) {
    return refuse_text(call.op, "takes tensors of one type that differ along axis %lld only",
                       static_cast<long long>(axis));
  }
  const int joined = static_cast<int>(axis);
  const int64_t outer = call.size(out, 0, joined), row_bytes = call.size(out, joined) * element;
  const int64_t per_task = larger(1, kTaskBytes / larger(row_bytes, 1));
  parallel_for(ceil_div(outer, per_task), [&](int64_t task) {
    for (int64_t row = task * per_task; row < smaller(outer, (task + 1) * per_task); ++row) {
      char* to = call.as<char>(out) + row * row_bytes;
      for (int i = 0; i < pieces; ++i) {
        const int64_t bytes = call.size(i, joined) * element;
        std::memcpy(to, call.as<char>(i) + row * bytes, static_cast<size_t>(bytes));
        to += bytes;
      }
    }
  });
  return 0;
}

}  // namespace llmk
