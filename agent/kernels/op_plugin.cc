// The entries of MindSpore's CPU op plugin (MS_OP_PLUGIN_PATH): the native inference primitives on the CPU.
//
// MindSpore calls <Primitive>(nparam, params, ndims, shapes, dtypes, stream, extra). The arguments are the inputs of
// the primitive, in order, and then its outputs. `extra` has the inputs that are not tensors. A kernel of the plugin
// replaces MindSpore's own kernel of this name in every graph. So MatMul, Gather and Reshape must accept every type and
// shape that MindSpore allows.
#include <atomic>

#include "common/check.h"
#include "common/dtype_bytes.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "ops/checks.h"
#include "ops/gather.h"
#include "ops/laid_out_caches.h"
#include "ops/reshape_and_cache.h"
#include "plugin/launches.h"

namespace llmk {
namespace {

// Runs RmsNorm(x, gamma, epsilon) -> y, rstd and AddRmsNorm(x1, x2, gamma, epsilon) -> y, rstd, x1 + x2.
//
// y = x * rstd * gamma and rstd = 1 / sqrt(mean(x^2) + epsilon), in float32 over the last axis. y is rounded once. In
// AddRmsNorm, x is the rounded sum x1 + x2, because the next layer also receives the rounded sum.
int rms_norm(const Call& call, bool with_residual) {
  const int gamma = with_residual ? 2 : 1, y = call.count - (with_residual ? 3 : 2);
  int error = with_residual ? check_equal_dtype(call, 0, 1) : check_float(call, 0);
  if (error == 0) error = check_float(call, gamma);
  if (error != 0) return error;
  RmsNormArgs args{};
  args.width = call.size(gamma);
  const int64_t total = call.size(0);
  if (args.width < 1 || total % args.width != 0 || (with_residual && call.size(1) != total)) {
    return refuse_text(call.op, "x has %lld elements, gamma %lld; x must be whole rows of gamma",
                       static_cast<long long>(total), static_cast<long long>(args.width));
  }
  args.rows = total / args.width;
  args.x = call.data[0];
  args.residual = with_residual ? call.data[1] : nullptr;
  args.gamma = call.data[gamma];
  args.y = call.data[y];
  args.rstd = call.as<float>(y + 1);
  args.sum = with_residual ? call.data[y + 2] : nullptr;
  args.epsilon = static_cast<float>(call.real(gamma + 1));
  args.dtype = call.dtype(0);
  args.gamma_dtype = call.dtype(gamma);
  if (args.rows > 0) kernels().rms_norm(args);
  return 0;
}

// Runs Swiglu(input, dim): silu(first half) * second half of axis `dim`, computed in float32 and rounded once.
int swiglu(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  int64_t axis = call.integer(1);
  if (axis < 0) axis += call.ndims[0];
  if (axis < 0 || axis >= call.ndims[0] || call.shapes[0][axis] % 2 != 0) {
    return refuse_text(call.op, "dim %lld of %d dimensions must exist and have an even size",
                       static_cast<long long>(call.integer(1)), call.ndims[0]);
  }
  SwigluArgs args{};
  args.input = call.data[0];
  args.out = call.data[call.count - 1];
  args.outer = call.size(0, 0, static_cast<int>(axis));
  args.inner = call.size(0, static_cast<int>(axis)) / 2;
  args.dtype = call.dtype(0);
  if (args.outer > 0 && args.inner > 0) kernels().swiglu(args);
  return 0;
}

// Runs ReshapeAndCache(key, value, key_cache, value_cache, slot_mapping). Copies row t of key and value to slot
// slot_mapping[t] of the caches [blocks, block_size, kv_heads, head_dim], in place. The slot number is block *
// block_size + offset. A negative slot is padding: its row is not copied. `value` may be missing. The output has the
// shape of `key`. No operator uses its content: MindSpore needs the output only to order the operators.
int reshape_and_cache(const Call& call) {
  if (!call.is_tensor(2) || !call.is_tensor(4) || !call.has_dtype(4, "int32")) {
    return refuse_text(call.op, "key_cache and an int32 slot_mapping are needed");
  }
  const int64_t slots = call.size(2, 0, 2), width = call.size(2, 2), tokens = call.size(4);
  for (const int i : {0, 1}) {
    if (i == 1 && !(call.is_tensor(1) && call.is_tensor(3))) break;
    if (std::strcmp(call.dtypes[i], call.dtypes[2 + i]) != 0 || call.size(2 + i) != slots * width ||
        call.size(i) != tokens * width) {
      return refuse_text(call.op, "argument %d has %lld elements of %s; %lld slots of a cache of %s need %lld", i,
                         static_cast<long long>(call.size(i)), call.dtypes[i], static_cast<long long>(tokens),
                         call.dtypes[2 + i], static_cast<long long>(tokens * width));
    }
  }
  const int error = check_slots(call.op, call.as<int32_t>(4), tokens, slots);
  if (error != 0) return error;
  const int64_t row_bytes = width * dtype_bytes(call.dtypes[2]);
  for (const int i : {0, 1}) {
    if (i == 1 && !(call.is_tensor(1) && call.is_tensor(3))) break;
    if (is_laid_out(call.data[2 + i])) {
      write_all_laid_out({call.as<char>(i), row_bytes, call.as<int32_t>(4), call.data[2 + i], call.dim(2 + i, 1),
                          call.dim(2 + i, 2), call.dim(2 + i, 3), i == 0}, tokens);
    } else {
      scatter_rows(call.data[i], call.data[2 + i], call.as<int32_t>(4), tokens, row_bytes);
    }
  }
  return 0;
}

// Runs Gather(table, indices, axis, batch_dims), for elements of 1 to 16 bytes. An index outside the axis is an error.
int gather(const Call& call) {
  GatherArgs args{};
  const int64_t bytes = dtype_bytes(call.dtypes[0]), dims = call.ndims[0];
  int64_t axis = call.is_tensor(2) ? (call.has_dtype(2, "int32") ? *call.as<int32_t>(2) : *call.as<int64_t>(2))
                                   : call.integer(2);
  int64_t batch_dims = call.count > 4 ? call.integer(3) : 0;
  if (axis < 0) axis += dims;
  if (batch_dims < 0) batch_dims += call.ndims[1];
  const bool wide = call.has_dtype(1, "int64");
  if (bytes == 0 || axis < 0 || axis >= dims || batch_dims < 0 || batch_dims > axis || batch_dims > call.ndims[1] ||
      !(wide || call.has_dtype(1, "int32"))) {
    return refuse_text(call.op, "a table of %s and %lld dimensions, indices of %s, axis %lld, batch_dims %lld",
                       call.dtypes[0], static_cast<long long>(dims), call.dtypes[1], static_cast<long long>(axis),
                       static_cast<long long>(batch_dims));
  }
  args.table = call.data[0];
  args.indices = call.data[1];
  args.out = call.data[call.count - 1];
  args.wide_indices = wide;
  args.batch = call.size(0, 0, static_cast<int>(batch_dims));
  args.outer = call.size(0, static_cast<int>(batch_dims), static_cast<int>(axis));
  args.limit = call.shapes[0][axis];
  args.row_bytes = call.size(0, static_cast<int>(axis) + 1) * bytes;
  args.count = call.size(1, static_cast<int>(batch_dims));
  return gather_rows(call.op, args);
}

// Runs IndexSelect(input, dim, index): collects the slices of axis `dim` at the indices in the vector `index`.
int index_select(const Call& call) {
  enum { kInput, kDim, kIndex, kOut, kCount };
  const int64_t bytes = dtype_bytes(call.dtypes[kInput]), dims = call.ndims[kInput];
  const int64_t axis = call.integer(kDim) + (call.integer(kDim) < 0 ? dims : 0);
  const bool wide = call.has_dtype(kIndex, "int64");
  if (call.count != kCount || bytes == 0 || axis < 0 || axis >= dims || call.ndims[kIndex] > 1 ||
      !(wide || call.has_dtype(kIndex, "int32"))) {
    return refuse_text(call.op, "an input of %s and %lld dimensions, dim %lld, indices of %s and %d dimensions",
                       call.dtypes[kInput], static_cast<long long>(dims), static_cast<long long>(call.integer(kDim)),
                       call.dtypes[kIndex], call.ndims[kIndex]);
  }
  GatherArgs args{};
  args.table = call.data[kInput];
  args.indices = call.data[kIndex];
  args.out = call.data[kOut];
  args.wide_indices = wide;
  args.batch = 1;
  args.outer = call.size(kInput, 0, static_cast<int>(axis));
  args.limit = call.shapes[kInput][axis];
  args.row_bytes = call.size(kInput, static_cast<int>(axis) + 1) * bytes;
  args.count = call.size(kIndex);
  return gather_rows(call.op, args);
}

// Runs Reshape: copies the elements unchanged. MindSpore computes the new shape.
int reshape(const Call& call) {
  const int out = call.count - 1;
  const int64_t bytes = call.size(0) * dtype_bytes(call.dtypes[0]);
  if (call.size(0) != call.size(out) || dtype_bytes(call.dtypes[0]) == 0) {
    return refuse_text(call.op, "%lld elements of %s do not make %lld", static_cast<long long>(call.size(0)),
                       call.dtypes[0], static_cast<long long>(call.size(out)));
  }
  if (call.data[0] != call.data[out]) std::memmove(call.data[out], call.data[0], static_cast<size_t>(bytes));
  return 0;
}

Call make_call(const char* op, int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void* extra) {
  return {{op, count, data, ndims, shapes, dtypes}, static_cast<KernelInputInfo*>(extra)};
}

}  // namespace

// After a kernel has returned an error, MindSpore never runs the graph again and does not free the graph's memory. To
// avoid this, a caller can set holds_failures. A failing kernel then reports success, and its name is stored in
// held_failure. Until the caller takes this name, all kernels do nothing and report success.
static std::atomic<bool> holds_failures{false};
static std::atomic<const char*> held_failure{nullptr};

int report_error(const char* op, int error) {
  if (error == 0 || !holds_failures.load(std::memory_order_relaxed)) return error;
  held_failure.store(op, std::memory_order_release);
  return 0;
}

bool has_failed() { return held_failure.load(std::memory_order_acquire) != nullptr; }

// Lists every primitive of the plugin, with the C++ expression that runs it.
#define LLMK_PRIMITIVES(X) \
  X(RmsNorm, rms_norm(arguments, false)) \
  X(AddRmsNorm, rms_norm(arguments, true)) \
  X(Swiglu, swiglu(arguments)) \
  X(SiLU, plugin_silu(arguments)) \
  X(GeluExt, plugin_gelu(arguments)) \
  X(Sigmoid, plugin_sigmoid(arguments)) \
  X(MoveTo, plugin_move_to(arguments)) \
  X(NanToNum, plugin_nan_to_num(arguments)) \
  X(MaskedFill, plugin_masked_fill(arguments)) \
  X(ApplyRotaryPosEmb, plugin_rotary(arguments)) \
  X(ReshapeAndCache, reshape_and_cache(arguments)) \
  X(FlashAttentionScore, plugin_flash_attention(arguments)) \
  X(PagedAttention, plugin_paged_attention(arguments)) \
  X(FusedInferAttentionScore, plugin_fused_infer_attention(arguments)) \
  X(MatMul, plugin_matmul(arguments)) \
  X(BatchMatMul, plugin_batch_matmul(arguments)) \
  X(Transpose, plugin_transpose(arguments)) \
  X(Concat, plugin_concat(arguments)) \
  X(Gather, gather(arguments)) \
  X(IndexSelect, index_select(arguments)) \
  X(Reshape, reshape(arguments)) \
  X(MoeGatingTopKSoftmax, plugin_moe_gating_top_k_softmax(arguments)) \
  X(MoeInitRoutingV2, plugin_moe_init_routing(arguments)) \
  X(GroupedMatmulV4, plugin_grouped_matmul(arguments)) \
  X(InnerMoeTokenUnpermute, plugin_moe_token_unpermute(arguments)) \
  X(TopkExt, plugin_top_k(arguments)) \
  X(FusedAddTopKDiv, plugin_fused_add_top_k_div(arguments)) \
  X(Softmax, plugin_softmax(arguments)) \
  X(AllReduce, plugin_all_reduce(arguments)) \
  X(AllGather, plugin_all_gather(arguments)) \
  X(DynamicQuantExt, plugin_dynamic_quant(arguments)) \
  X(QuantV2, plugin_static_quant(arguments)) \
  X(QuantBatchMatmul, plugin_quant_matmul(arguments)) \
  X(WeightQuantBatchMatmul, plugin_weight_quant_matmul(arguments)) \
  X(SplitWithSize, plugin_split(arguments)) \
  X(Add, plugin_add(arguments)) \
  X(Sub, plugin_sub(arguments)) \
  X(Mul, plugin_mul(arguments)) \
  X(RealDiv, plugin_real_div(arguments)) \
  X(Minimum, plugin_minimum(arguments)) \
  X(Maximum, plugin_maximum(arguments)) \
  X(Equal, plugin_equal(arguments)) \
  X(Greater, plugin_greater(arguments)) \
  X(LessEqual, plugin_less_equal(arguments)) \
  X(LogicalOr, plugin_logical_or(arguments)) \
  X(Cast, plugin_cast(arguments)) \
  X(ReduceSum, plugin_reduce_sum(arguments)) \
  X(ArgMaxWithValue, plugin_arg_max_with_value(arguments)) \
  X(Exp, plugin_exp(arguments))

#define LLMK_RUN(name, call) \
  static int run_##name(const Call& arguments) { return call; }
LLMK_PRIMITIVES(LLMK_RUN)

bool is_collective(Primitive primitive) { return primitive == run_AllReduce || primitive == run_AllGather; }

bool is_reshape(Primitive primitive) { return primitive == run_Reshape; }

bool writes_inputs(Primitive primitive) { return primitive == run_ReshapeAndCache; }

#define LLMK_NAME(name, call) #name,
static const char* const kOps[] = {LLMK_PRIMITIVES(LLMK_NAME)};

}  // namespace llmk

#define LLMK_PLUGIN(name, call)                                                                            \
  LLMK_ENTRY int name(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*, \
                      void* extra) {                                                                       \
    if (llmk::has_failed()) return 0;                                                                      \
    const llmk::StandardFloatingPoint scope;                                                               \
    const llmk::Call arguments = llmk::make_call(#name, nparam, params, ndims, shapes, dtypes, extra);     \
    return llmk::report_error(#name, llmk::launch(llmk::run_##name, arguments));                           \
  }

extern "C" {

LLMK_ENTRY int GetRegisteredOpCount() { return sizeof(llmk::kOps) / sizeof(llmk::kOps[0]); }
LLMK_ENTRY const char* const* GetAllRegisteredOps() { return llmk::kOps; }
LLMK_ENTRY int GetComputeDependOpCount() { return 0; }
LLMK_ENTRY const char* const* GetAllComputeDependOps() { return llmk::kOps; }
LLMK_ENTRY bool IsKernelRegistered(const char* name) {
  for (const char* op : llmk::kOps) {
    if (std::strcmp(op, name) == 0) return true;
  }
  return false;
}

LLMK_ENTRY void llmk_hold_failures(int hold) { llmk::holds_failures.store(hold != 0, std::memory_order_relaxed); }
LLMK_ENTRY const char* llmk_take_failure() { return llmk::held_failure.exchange(nullptr, std::memory_order_acq_rel); }

LLMK_ENTRY int llmk_has_failed() { return llmk::has_failed() ? 1 : 0; }

LLMK_PRIMITIVES(LLMK_PLUGIN)

}  // extern "C"
