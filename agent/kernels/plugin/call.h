// A call of a primitive of the op plugin: its tensors, and its inputs that are scalars or None.
#pragma once
#include <cstring>
#include <vector>

#include "../common/check.h"
#include "../common/tensors.h"
#include "kernel/cpu/op_plugin/custom_kernel_input_info.h"

namespace llmk {

using mindspore::kernel::op_plugin::KernelInputInfo;

struct Call : Tensors {
  KernelInputInfo* info;

  bool is_tensor(int i) const { return !info->IsScalarInput(static_cast<size_t>(i)) && data[i] != nullptr; }
  int64_t integer(int i) const { return info->GetIntInput(static_cast<size_t>(i)); }
  double real(int i) const { return info->GetFloatInput(static_cast<size_t>(i)); }
  bool boolean(int i) const { return info->GetBoolInput(static_cast<size_t>(i)); }
};

static inline int check_float(const Call& call, int argument) {
  if (call.dtype(argument) != DType::kUnsupported) return 0;
  return refuse_text(call.op, "argument %d is %s; it must be float32, float16 or bfloat16", argument,
                     call.dtypes[argument]);
}

static inline int check_equal_dtype(const Call& call, int a, int b) {
  if (std::strcmp(call.dtypes[a], call.dtypes[b]) == 0) return check_float(call, a);
  return refuse_text(call.op, "argument %d is %s and argument %d is %s; they must be the same", a, call.dtypes[a], b,
                     call.dtypes[b]);
}

// Reads a list of integers, which is a tensor or a constant.
static inline std::vector<int32_t> integers(const Call& call, int argument) {
  if (call.is_tensor(argument)) {
    const int64_t n = call.size(argument);
    if (call.has_dtype(argument, "int64")) return {call.as<int64_t>(argument), call.as<int64_t>(argument) + n};
    return {call.as<int32_t>(argument), call.as<int32_t>(argument) + n};
  }
  const std::vector<int64_t> values = call.info->GetIntVecInput(static_cast<size_t>(argument));
  return {values.begin(), values.end()};
}

// These functions run the primitives that are not in op_plugin.cc. Each returns 0 or an error code.
int plugin_add(const Call& call);
int plugin_sub(const Call& call);
int plugin_mul(const Call& call);
int plugin_real_div(const Call& call);
int plugin_minimum(const Call& call);
int plugin_maximum(const Call& call);
int plugin_equal(const Call& call);
int plugin_greater(const Call& call);
int plugin_less_equal(const Call& call);
int plugin_logical_or(const Call& call);
int plugin_cast(const Call& call);
int plugin_reduce_sum(const Call& call);
int plugin_arg_max_with_value(const Call& call);
int plugin_exp(const Call& call);
int plugin_silu(const Call& call);
int plugin_gelu(const Call& call);
int plugin_sigmoid(const Call& call);
int plugin_move_to(const Call& call);
int plugin_nan_to_num(const Call& call);
int plugin_masked_fill(const Call& call);
int plugin_rotary(const Call& call);
int plugin_flash_attention(const Call& call);
int plugin_paged_attention(const Call& call);
int plugin_fused_infer_attention(const Call& call);
int plugin_moe_gating_top_k_softmax(const Call& call);
int plugin_top_k(const Call& call);
int plugin_moe_init_routing(const Call& call);
int plugin_grouped_matmul(const Call& call);
int plugin_moe_token_unpermute(const Call& call);
int plugin_all_reduce(const Call& call);
int plugin_all_gather(const Call& call);
int plugin_matmul(const Call& call);
int plugin_batch_matmul(const Call& call);
int plugin_transpose(const Call& call);
int plugin_concat(const Call& call);
int plugin_fused_add_top_k_div(const Call& call);
int plugin_softmax(const Call& call);
int plugin_split(const Call& call);
int plugin_dynamic_quant(const Call& call);
int plugin_static_quant(const Call& call);
int plugin_quant_matmul(const Call& call);
int plugin_weight_quant_matmul(const Call& call);

}  // namespace llmk
