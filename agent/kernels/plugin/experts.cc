// Runs the primitives of a mixture of experts: MoeGatingTopKSoftmax, MoeInitRoutingV2, MoeTokenUnpermute and TopkExt.
// TopkExt chooses the experts in MindFormers' layers. In the sampling graphs, TopkExt finds candidates. The matrix
// products are in grouped_matmul.cc.
//
// The semantics are those of the CANN documentation: aclnnMoeGatingTopKSoftmax, aclnnMoeInitRoutingV2,
// aclnnMoeTokenUnpermute and aclnnTopk.
#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../common/types.h"
#include "../ops/experts.h"
#include "../ops/ranked_logits.h"
#include "call.h"

namespace llmk {

// MoeGatingTopKSoftmax: x [rows, experts], finished (None), k -> y [rows, k] of x's type, expert_idx and row_idx int32
// [rows, k]. The output y has the k largest values of each row's softmax, and expert_idx has their experts. Element
// [row, i] of the output row_idx is row + rows * i.
int plugin_moe_gating_top_k_softmax(const Call& call) {
  enum { kX, kFinished, kK, kY, kExpertIdx, kRowIdx };
  const int64_t rows = call.dim(kX, 0), experts = call.dim(kX, 1), k = call.integer(kK);
  if (call.ndims[kX] != 2 || call.is_tensor(kFinished) || !call.has_dtype(kX, "float32") || k < 1 || k > experts) {
    return refuse_text(call.op, "takes float32 [rows, experts], no finished, and k from 1 to %lld; x is %s, k %lld",
                       static_cast<long long>(experts), call.dtypes[kX], static_cast<long long>(k));
  }
  route_tokens({call.as<float>(kX), call.as<int32_t>(kExpertIdx), call.as<float>(kY), rows, experts, k, false});
  for (int64_t i = 0; i < rows * k; ++i) call.as<int32_t>(kRowIdx)[i] = static_cast<int32_t>(i % k * rows + i / k);
  return 0;
}

namespace {

// Rows of at least this length use best_tokens() to find their best values.
constexpr int64_t kLongRow = 1024;
constexpr int64_t kTopKElementsPerTask = 8192;

// Finds the k largest values of a long row with best_tokens() of ranked_logits.h. Returns false if the row has fewer
// than k finite values.
bool long_top_k_row(const float* values, int64_t count, int64_t k, float* best, int64_t* indices) {
  thread_local ScratchVector<Candidate> found;
  best_tokens(values, count, kernels().logits.largest(values, count), k, &found);
  if (static_cast<int64_t>(found.size()) < k) return false;
  for (int64_t i = 0; i < k; ++i) {
    best[i] = found[static_cast<size_t>(i)].logit;
    indices[i] = found[static_cast<size_t>(i)].id;
  }
  return true;
}

// Finds the k largest of `count` values, or the k smallest if not `largest`, and sorts them. Equal values are sorted by
// index. A NaN comes after all numbers.
template <class T>
void top_k_row(const T* values, int64_t count, int64_t k, bool largest, std::vector<int64_t>* order, T* best,
               int64_t* indices) {
  if constexpr (std::is_same_v<T, float>) {
    if (largest && count >= kLongRow && long_top_k_row(values, count, k, best, indices)) return;
  }
  order->resize(static_cast<size_t>(count));
  std::iota(order->begin(), order->end(), 0);
  const auto before = [&](int64_t a, int64_t b) {
    const float x = to_float(values[a]), y = to_float(values[b]);
    if (x != x || y != y) return (y != y && x == x) || ((x == x) == (y == y) && a < b);
    return x != y ? (x > y) == largest : a < b;
  };
  std::partial_sort(order->begin(), order->begin() + k, order->end(), before);
  for (int64_t i = 0; i < k; ++i) {
    indices[i] = (*order)[static_cast<size_t>(i)];
    best[i] = values[indices[i]];
  }
}

template <class T>
void top_k(const Call& call, int64_t rows, int64_t count, int64_t k, bool largest) {
  const int64_t task_rows = larger(1, kTopKElementsPerTask / count);
  parallel_for(ceil_div(rows, task_rows), [&](int64_t task) {
    std::vector<int64_t> order;
    for (int64_t row = task * task_rows; row < smaller(rows, (task + 1) * task_rows); ++row) {
      top_k_row(call.as<T>(0) + row * count, count, k, largest, &order, call.as<T>(5) + row * k,
                call.as<int64_t>(6) + row * k);
    }
  });
}

}  // namespace

// TopkExt: input [..., count], k, dim (the last), largest, sorted -> values [..., k] of input's type, indices int64
// [..., k]. The values are the k largest of each row, or the k smallest. The values are always sorted.
int plugin_top_k(const Call& call) {
  enum { kInput, kK, kDim, kLargest, kSorted, kValues, kIndices, kCount };
  const int dims = call.ndims[kInput];
  const int64_t dim = call.integer(kDim), k = call.integer(kK), count = dims < 1 ? 0 : call.dim(kInput, -1);
  if (call.count != kCount || dims < 1 || (dim != -1 && dim != dims - 1) || k < 0 || k > count ||
      call.dtype(kInput) == DType::kUnsupported || !call.has_dtype(kIndices, "int64")) {
    return refuse_text(call.op,
                       "takes floats, their last axis of %lld and k from 0 to that; k is %lld, dim %lld, type %s",
                       static_cast<long long>(count), static_cast<long long>(k), static_cast<long long>(dim),
                       call.dtypes[kInput]);
  }
  if (k == 0) return 0;
  const int64_t rows = call.size(kInput) / count;
  const bool largest = call.boolean(kLargest);
  with_element_type(call.dtype(kInput), [&](auto type) { top_k<decltype(type)>(call, rows, count, k, largest); });
  return 0;
}

// MoeInitRoutingV2: copies the rows of x (one row for each token), sorted by expert. Each row has k copies, one for
// each expert that it chose. Copies for the same expert keep the order of their rows.
//
// Inputs: x [rows, width], expert_idx int32 [rows, k] (the chosen experts of each row), active_num, expert_capacity,
//   expert_num, drop_pad_mode, count_or_cumsum, before_capacity.
//
// Outputs:
//  - expanded_x [rows * k, width]: the copies.
//  - expanded_row_idx int32 [rows * k]: element row * k + i is the position in expanded_x of copy i of the row.
//  - expert_tokens_count_or_cumsum int32 [expert_num]: the number of copies for each expert, or the cumulative sum.
//  - An output that is not written, because only modes that drop rows use it.
int plugin_moe_init_routing(const Call& call) {
  enum { kX, kExpertIdx, kActiveNum, kCapacity, kExpertNum, kDropPadMode, kCountOrCumsum, kBeforeCapacity, kExpandedX,
         kExpandedRowIdx, kTokens };
  const int64_t rows = call.dim(kX, 0), choices = call.size(kExpertIdx), experts = call.integer(kExpertNum);
  const int64_t active = call.integer(kActiveNum), flag = call.integer(kCountOrCumsum);
  const int64_t bytes = call.dim(kX, 1) * dtype_bytes(call.dtypes[kX]);
  if (rows == 0) return 0;
  if (call.integer(kDropPadMode) != 0 || (active != 0 && active < choices) || flag < 1 || flag > 2 || experts < 1 ||
      bytes == 0 || choices % rows != 0 || !call.has_dtype(kExpertIdx, "int32")) {
    return refuse_text(call.op,
                       "drop_pad_mode %lld, active_num %lld, expert_num %lld, flag %lld; only 0, 0, at least 1, "
                       "and 1 or 2, with int32 expert_idx",
                       static_cast<long long>(call.integer(kDropPadMode)), static_cast<long long>(active),
                       static_cast<long long>(experts), static_cast<long long>(flag));
  }
  const int32_t* ids = call.as<int32_t>(kExpertIdx);
  for (int64_t i = 0; i < choices; ++i) {
    if (ids[i] < 0 || ids[i] >= experts) return refuse_index(call.op, "expert_idx", i, ids[i], experts);
  }
  std::vector<int64_t> starts(static_cast<size_t>(experts) + 1), place(static_cast<size_t>(choices));
  group_by_expert(ids, choices, experts, starts.data(), place.data());
  const int64_t k = choices / rows;
  for (int64_t i = 0; i < choices; ++i) {
    const int64_t to = place[static_cast<size_t>(i)];
    call.as<int32_t>(kExpandedRowIdx)[i] = static_cast<int32_t>(to);
    std::memcpy(call.as<char>(kExpandedX) + to * bytes, call.as<char>(kX) + i / k * bytes, static_cast<size_t>(bytes));
  }
  for (size_t expert = 0; expert < static_cast<size_t>(experts); ++expert) {
    const int64_t before = flag == 2 ? starts[expert] : 0;
    call.as<int32_t>(kTokens)[expert] = static_cast<int32_t>(starts[expert + 1] - before);
  }
  return 0;
}

namespace {

template <class T>
void unpermute_row(const T* tokens, const int32_t* places, const T* probs, int64_t k, int64_t width, T* out) {
  for (int64_t d = 0; d < width; ++d) {
    float total = 0;
    for (int64_t i = 0; i < k; ++i) total += to_float(probs[i]) * to_float(tokens[places[i] * width + d]);
    from_float(total, out + d);
  }
}

template <class T>
void unpermute(const Call& call, int64_t rows, int64_t k, int64_t width) {
  parallel_for(rows, [&](int64_t row) {
    unpermute_row(call.as<T>(0), call.as<int32_t>(1) + row * k, call.as<T>(2) + row * k, k, width,
                  call.as<T>(call.count - 1) + row * width);
  });
}

}  // namespace

// MoeTokenUnpermute: permuted_tokens [rows * k, width], sorted_indices int32 [rows * k], probs [rows, k] of the type of
// the tokens -> out [rows, width].
//
// out[row] is the sum over i from 0 to k - 1 of probs[row][i] * permuted_tokens[sorted_indices[row * k + i]]. The terms
// are added in this order, in float32. Padding is not supported.
int plugin_moe_token_unpermute(const Call& call) {
  enum { kTokens, kIndices, kProbs, kPaddedMode, kRestoreShape };
  int error = call.is_tensor(kProbs) ? check_equal_dtype(call, kTokens, kProbs) : kBadArgument;
  if (error != 0 || call.boolean(kPaddedMode) || !call.has_dtype(kIndices, "int32") || call.ndims[kTokens] != 2 ||
      call.ndims[kProbs] != 2 || call.size(kIndices) != call.size(kProbs) ||
      call.dim(kTokens, 0) != call.size(kProbs)) {
    return refuse_text(call.op, "takes permuted_tokens [rows * k, width], int32 sorted_indices [rows * k] and probs "
                       "[rows, k] of the tokens' type, not padded");
  }
  for (int64_t i = 0; i < call.size(kIndices); ++i) {
    const int64_t index = call.as<int32_t>(kIndices)[i];
    if (index < 0 || index >= call.dim(kTokens, 0)) {
      return refuse_index(call.op, "sorted_indices", i, index, call.dim(kTokens, 0));
    }
  }
  const int64_t rows = call.dim(kProbs, 0), k = call.dim(kProbs, 1), width = call.dim(kTokens, 1);
  with_element_type(call.dtype(kTokens), [&](auto type) { unpermute<decltype(type)>(call, rows, k, width); });
  return error;
}

}  // namespace llmk
