// The primitive FusedAddTopKDiv, the router of DeepSeek V3, and Softmax, which the router of DeepSeek V2 uses. The
// semantics of FusedAddTopKDiv are those of the operation FusedAddTopkDiv of the Ascend Transformer Boost library
// (docs/ascend.md).
#include <vector>

#include "../common/thread_pool.h"
#include "../ops/grouped_routing.h"
#include "call.h"

namespace llmk {

// FusedAddTopKDiv(x [rows, experts], add_num float32 [experts], group_num, group_topk, n, k, activate_type, is_norm,
// scale, mapping_num, mapping_table, enable_expert_mapping) -> weights float32 [rows, k], indices int32 [rows, k].
//
// The ranking of an expert is sigmoid(x) + add_num. The ranking of a group is the sum of its n largest expert rankings.
// In the group_topk groups with the largest rankings, the k experts with the largest rankings are chosen. The weight of
// a chosen expert is sigmoid(x). If is_norm, the weights are divided by their sum. Then they are multiplied by scale.
// On a tie, the first group or expert is chosen.
int plugin_fused_add_top_k_div(const Call& call) {
  enum { kX, kAdded, kGroups, kChosenGroups, kN, kK, kActivation, kIsNorm, kScale, kMappingNum, kMappingTable, kMaps,
         kWeights, kIds, kCount };
  const int64_t experts = call.ndims[kX] == 2 ? call.dim(kX, 1) : 0, groups = call.integer(kGroups);
  const int64_t chosen = call.integer(kChosenGroups), n = call.integer(kN), k = call.integer(kK);
  const bool fits = call.count == kCount && experts > 0 && call.has_dtype(kX, "float32") &&
                    call.has_dtype(kAdded, "float32") && call.size(kAdded) == experts && groups > 0 &&
                    experts % groups == 0 && chosen > 0 && chosen <= groups && (n == 1 || n == 2) &&
                    n <= experts / groups && k > 0 && k <= chosen * (experts / groups);
  if (!fits || call.integer(kActivation) != 0 || call.is_tensor(kMappingNum) || call.is_tensor(kMappingTable) ||
      call.boolean(kMaps)) {
    return refuse_text(call.op, "takes float32 x [rows, experts] and add_num [experts], equal groups, n 1 or 2, the "
                       "sigmoid (activate_type 0) and no mapping; %lld experts, %lld groups, n %lld, k %lld",
                       static_cast<long long>(experts), static_cast<long long>(groups), static_cast<long long>(n),
                       static_cast<long long>(k));
  }
  GroupedRoutingArgs args{};
  args.logits = call.as<float>(kX);
  args.correction = call.as<float>(kAdded);
  args.ids = call.as<int32_t>(kIds);
  args.weights = call.as<float>(kWeights);
  args.rows = call.dim(kX, 0);
  args.experts = experts;
  args.chosen = k;
  args.groups = groups;
  args.chosen_groups = chosen;
  args.factor = static_cast<float>(call.real(kScale));
  args.sigmoid = true;
  args.corrected = n == 2;
  args.normalised = call.boolean(kIsNorm);
  route_to_groups(args);
  return 0;
}

namespace {

constexpr int64_t kElementsPerTask = 8192;

// Computes the softmax of rows with `count` elements each, which are `stride` elements apart. Computes in float32, and
// rounds once.
template <class T>
void softmax(const T* in, int64_t rows, int64_t count, int64_t stride, T* out) {
  const int64_t task_rows = larger(1, kElementsPerTask / count);
  parallel_for(ceil_div(rows, task_rows), [&](int64_t task) {
    std::vector<float> row(static_cast<size_t>(count));
    for (int64_t i = task * task_rows; i < smaller(rows, (task + 1) * task_rows); ++i) {
      const int64_t start = i / stride * stride * count + i % stride;
      for (int64_t k = 0; k < count; ++k) row[static_cast<size_t>(k)] = to_float(in[start + k * stride]);
      softmax_row(row.data(), count, row.data());
      for (int64_t k = 0; k < count; ++k) from_float(row[static_cast<size_t>(k)], out + start + k * stride);
    }
  });
}

}  // namespace

// Runs Softmax(input, axis) over one axis of floats. The results of a row depend only on that row.
int plugin_softmax(const Call& call) {
  enum { kInput, kAxis, kOut, kCount };
  const std::vector<int32_t> axes = integers(call, kAxis);
  const int dims = call.ndims[kInput], axis = axes.size() == 1 ? axes[0] + (axes[0] < 0 ? dims : 0) : -1;
  if (call.count != kCount || axis < 0 || axis >= dims || call.dtype(kInput) == DType::kUnsupported) {
    return refuse_text(call.op, "takes floats and one of their axes; type %s, %d axes, %zu axes to sum over",
                       call.dtypes[kInput], dims, axes.size());
  }
  const int64_t count = call.shapes[kInput][axis], stride = call.size(kInput, axis + 1);
  if (call.size(kInput) == 0) return 0;
  with_element_type(call.dtype(kInput), [&](auto type) {
    using T = decltype(type);
    softmax(call.as<T>(kInput), call.size(kInput) / count, count, stride, call.as<T>(kOut));
  });
  return 0;
}

}  // namespace llmk
