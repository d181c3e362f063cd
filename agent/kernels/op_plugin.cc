// Entries of MindSpore's CPU op plugin (MS_OP_PLUGIN_PATH): the native inference primitives on the CPU.
//
// MindSpore calls <Primitive>(nparam, params, ndims, shapes, dtypes, stream, extra): the inputs in the order of the
// primitive, then the outputs; `extra` gives the inputs that are not tensors. A kernel given here takes precedence
// over MindSpore's own of the same name, so MatMul and Gather take every dtype and shape the primitive allows.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/dtype_bytes.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/tensors.h"
#include "kernel/cpu/op_plugin/custom_kernel_input_info.h"
#include "ops/checks.h"
#include "ops/gather.h"
#include "ops/matmul_any.h"
#include "ops/reshape_and_cache.h"

using mindspore::kernel::op_plugin::KernelInputInfo;

namespace llmk {
namespace {

const char* kOps[] = {"RmsNorm", "AddRmsNorm", "Swiglu", "ApplyRotaryPosEmb", "ReshapeAndCache",
                      "FlashAttentionScore", "PagedAttention", "MatMul", "Gather"};

// A call of the plugin: the tensors, and the inputs that are scalars or None.
struct Call : Tensors {
  KernelInputInfo* info;

  bool is_tensor(int i) const { return !info->IsScalarInput(static_cast<size_t>(i)) && data[i] != nullptr; }
  int64_t integer(int i) const { return info->GetIntInput(static_cast<size_t>(i)); }
  double real(int i) const { return info->GetFloatInput(static_cast<size_t>(i)); }
  bool boolean(int i) const { return info->GetBoolInput(static_cast<size_t>(i)); }
};

int check_float(const Call& call, int argument) {
  if (call.dtype(argument) != DType::kUnsupported) return 0;
  return refuse_text(call.op, "argument %d is %s; it must be float32, float16 or bfloat16", argument,
                     call.dtypes[argument]);
}

int check_equal_dtype(const Call& call, int a, int b) {
  if (std::strcmp(call.dtypes[a], call.dtypes[b]) == 0) return check_float(call, a);
  return refuse_text(call.op, "argument %d is %s and argument %d is %s; they must be the same", a, call.dtypes[a], b,
                     call.dtypes[b]);
}

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

std::vector<int32_t> integers(const Call& call, int argument) {
  if (call.is_tensor(argument)) {
    const int64_t n = call.size(argument);
    if (call.has_dtype(argument, "int64")) return {call.as<int64_t>(argument), call.as<int64_t>(argument) + n};
    return {call.as<int32_t>(argument), call.as<int32_t>(argument) + n};
  }
  const std::vector<int64_t> values = call.info->GetIntVecInput(static_cast<size_t>(argument));
  return {values.begin(), values.end()};
}

// Which row of cos and sin each token takes. `cos_format` 0 and 2 are halves, 1 and 3 interleaved pairs. A table with
// one row per token is taken row by row, whatever the format. Otherwise formats 0 and 1 read position_ids as
// positions, one per token or (query [batch, length, width]) one per place in the sequence; formats 2 and 3 read them
// as the lengths of the sequences, each of which starts at position 0 (MindFormers' prefill).
int rotary_positions(const Call& call, int64_t tokens, int64_t rows, int64_t format, std::vector<int32_t>* positions) {
  if (rows == tokens) return 0;
  const std::vector<int32_t> given = integers(call, 4);
  const int64_t count = static_cast<int64_t>(given.size());
  const int64_t length = call.ndims[0] >= 3 ? call.dim(0, 1) : tokens;
  if (format < 2 && (count == tokens || (count > 0 && count == length))) {
    for (int64_t t = 0; t < tokens; ++t) positions->push_back(given[static_cast<size_t>(t % count)]);
  } else if (format >= 2 && call.ndims[0] >= 3 && length > 1) {
    for (int64_t t = 0; t < tokens; ++t) positions->push_back(static_cast<int32_t>(t % length));
  } else if (format >= 2) {
    for (const int32_t len : given) {
      for (int32_t i = 0; i < len && static_cast<int64_t>(positions->size()) <= tokens; ++i) positions->push_back(i);
    }
  }
  if (static_cast<int64_t>(positions->size()) != tokens) {
    return refuse_text(call.op, "%lld tokens, cos of %lld rows and %lld position_ids do not fit cos_format %lld",
                       static_cast<long long>(tokens), static_cast<long long>(rows), static_cast<long long>(count),
                       static_cast<long long>(format));
  }
  return check_positions(call.op, positions->data(), tokens, rows);
}

int apply_rotary(const Call& call) {
  const int64_t dim = call.dim(2, -1), format = call.integer(5);
  int error = check_equal_dtype(call, 0, 1);
  if (error == 0) error = check_equal_dtype(call, 2, 3);
  if (error != 0) return error;
  // Heads may be an axis of their own: [tokens, width], [batch, length, width] or [batch, length, heads, dim].
  const int token_axes = call.ndims[0] == 4 ? 2 : call.ndims[0] - 1;
  const int64_t tokens = call.size(0, 0, token_axes);
  const int64_t query_width = call.size(0, token_axes), key_width = call.size(1, token_axes);
  if (dim < 2 || dim % 2 != 0 || query_width % dim != 0 || key_width % dim != 0 ||
      call.size(1) != tokens * key_width || format < 0 || format > 3) {
    return refuse_text(call.op, "query width %lld, key width %lld, cos width %lld, cos_format %lld do not fit",
                       static_cast<long long>(query_width), static_cast<long long>(key_width),
                       static_cast<long long>(dim), static_cast<long long>(format));
  }
  if (tokens == 0) return 0;
  std::vector<int32_t> positions;
  error = rotary_positions(call, tokens, call.size(2) / dim, format, &positions);
  if (error != 0) return error;
  for (int i = 0; i < 2; ++i) {
    const int64_t width = i == 0 ? query_width : key_width;
    RotaryArgs args{};
    args.x = call.data[i];
    args.out = call.data[call.count - 2 + i];
    args.cos = call.data[2];
    args.sin = call.data[3];
    args.positions = positions.empty() ? nullptr : positions.data();
    args.tokens = tokens;
    args.heads = width / dim;
    args.dim = dim;
    args.x_stride = args.out_stride = width;
    args.dtype = call.dtype(0);
    args.table_dtype = call.dtype(2);
    args.interleaved = format % 2 == 1;
    kernels().rotary(args);
  }
  return 0;
}

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
  scatter_rows(call.data[0], call.data[2], call.as<int32_t>(4), tokens, row_bytes);
  if (call.is_tensor(1) && call.is_tensor(3)) {
    scatter_rows(call.data[1], call.data[3], call.as<int32_t>(4), tokens, row_bytes);
  }
  return 0;
}

int check_heads(const Call& call, const AttentionArgs& args, int64_t query_width, int64_t key_width) {
  if (args.heads > 0 && args.kv_heads > 0 && args.heads % args.kv_heads == 0 && args.dim > 0 &&
      args.dim * args.heads == query_width && args.dim * args.kv_heads == key_width) {
    return 0;
  }
  return refuse_text(call.op, "query width %lld of %lld heads, key width %lld of %lld heads do not fit",
                     static_cast<long long>(query_width), static_cast<long long>(args.heads),
                     static_cast<long long>(key_width), static_cast<long long>(args.kv_heads));
}

// Layout TH: query [tokens, heads * dim], key and value [tokens, kv_heads * dim]; actual_seq_qlen and actual_seq_kvlen
// are the lengths of the sequences (not running sums), zero allowed. Causal only.
int flash_attention(const Call& call) {
  enum { kAttnMask = 6, kQueryLens = 8, kKeyLens = 9, kHeadNum = 10, kKeepProb, kScale, kPreTokens, kNextTokens,
         kInnerPrecise, kLayout, kSparseMode };
  constexpr int64_t kLayoutTH = 5;  // MindSpore 2.9: FASInputLayoutMode
  for (const int unsupported : {3, 4, 5, 7}) {
    if (call.is_tensor(unsupported)) return refuse_text(call.op, "argument %d is not supported", unsupported);
  }
  const int64_t sparse = call.integer(kSparseMode), layout = call.integer(kLayout);
  const bool causal = call.is_tensor(kAttnMask) || call.integer(kNextTokens) == 0 || sparse == 2 || sparse == 3;
  if (!causal || layout != kLayoutTH || call.real(kKeepProb) != 1.0) {
    return refuse_text(call.op, "only causal attention (a mask, next_tokens=0 or sparse_mode 2 or 3) in layout TH "
                       "without dropout; layout is %lld", static_cast<long long>(layout));
  }
  int error = check_equal_dtype(call, 0, 1);
  if (error == 0) error = check_equal_dtype(call, 0, 2);
  if (error != 0) return error;
  AttentionArgs args{};
  const int64_t width = call.dim(0, -1), key_width = call.dim(1, -1), tokens = call.size(0) / width;
  args.heads = call.integer(kHeadNum);
  args.dim = args.heads > 0 ? width / args.heads : 0;
  args.kv_heads = args.dim > 0 ? key_width / args.dim : 0;
  error = check_heads(call, args, width, key_width);
  if (error != 0) return error;
  const std::vector<int32_t> query_lens = integers(call, kQueryLens), key_lens = integers(call, kKeyLens);
  if (query_lens.size() != key_lens.size() || call.size(1) != call.size(2)) {
    return refuse_text(call.op, "%zu query lengths and %zu key lengths, key and value of %lld and %lld elements",
                       query_lens.size(), key_lens.size(), static_cast<long long>(call.size(1)),
                       static_cast<long long>(call.size(2)));
  }
  args.query = call.data[0];
  args.out = call.data[call.count - 1];
  args.keys = call.data[1];
  args.values = call.data[2];
  args.query_lens = query_lens.data();
  args.context_lens = key_lens.data();
  args.num_seqs = static_cast<int64_t>(query_lens.size());
  args.scale = static_cast<float>(call.real(kScale));
  args.dtype = call.dtype(0);
  std::vector<int64_t> starts(2 * query_lens.size() + 1);
  error = check_attention(call.op, &args, tokens, 0, call.size(1) / key_width, starts.data());
  if (error == 0) kernels().attention(args);
  return error;
}

int paged_attention(const Call& call) {
  enum { kQuery, kKeyCache, kValueCache, kBlockTables, kContextLens, kAntiquantScale, kAntiquantOffset, kAttnMask,
         kQueryLens, kAlibi, kHeadNum, kScale, kKvHeadNum, kQuantMode, kMaskMode, kMlaDim };
  for (const int unsupported : {kAntiquantScale, kAntiquantOffset, kAlibi}) {
    if (call.is_tensor(unsupported)) return refuse_text(call.op, "argument %d is not supported", unsupported);
  }
  for (const int needed : {kKeyCache, kValueCache, kBlockTables, kContextLens}) {
    if (!call.is_tensor(needed)) return refuse_text(call.op, "argument %d is missing", needed);
  }
  int error = check_equal_dtype(call, kQuery, kKeyCache);
  if (error == 0) error = check_equal_dtype(call, kQuery, kValueCache);
  if (error != 0) return error;
  if (call.ndims[kKeyCache] != 4 || call.size(kKeyCache) != call.size(kValueCache) || call.ndims[kBlockTables] != 2 ||
      !call.has_dtype(kBlockTables, "int32") || call.integer(kMlaDim) != 0) {
    return refuse_text(call.op, "caches must be [blocks, block_size, kv_heads, head_dim], block_tables int32 [sequences, "
                       "width], mla_v_dim 0");
  }
  AttentionArgs args{};
  args.heads = call.integer(kHeadNum);
  args.kv_heads = call.integer(kKvHeadNum);
  args.dim = call.size(kKeyCache, 2) / larger(1, args.kv_heads);
  args.block_size = call.dim(kKeyCache, 1);
  const int64_t width = args.heads * args.dim, tokens = width > 0 ? call.size(kQuery) / width : 0;
  error = check_heads(call, args, call.size(kQuery) == tokens * width ? width : -1, call.size(kKeyCache, 2));
  if (error != 0) return error;
  const std::vector<int32_t> context_lens = integers(call, kContextLens);
  std::vector<int32_t> query_lens(context_lens.size(), 1);
  if (call.is_tensor(kQueryLens)) query_lens = integers(call, kQueryLens);
  args.num_seqs = static_cast<int64_t>(context_lens.size());
  if (query_lens.size() != context_lens.size() || call.dim(kBlockTables, 0) != args.num_seqs) {
    return refuse_text(call.op, "%zu q_seq_lens, %zu context_lens, %lld rows of block_tables; they must be equal",
                       query_lens.size(), context_lens.size(), static_cast<long long>(call.dim(kBlockTables, 0)));
  }
  args.query = call.data[kQuery];
  args.out = call.data[call.count - 1];
  args.keys = call.data[kKeyCache];
  args.values = call.data[kValueCache];
  args.block_tables = call.as<int32_t>(kBlockTables);
  args.table_width = call.dim(kBlockTables, 1);
  args.query_lens = query_lens.data();
  args.context_lens = context_lens.data();
  args.scale = static_cast<float>(call.real(kScale));
  args.dtype = call.dtype(kQuery);
  std::vector<int64_t> starts(2 * context_lens.size() + 1);
  error = check_attention(call.op, &args, tokens, call.dim(kKeyCache, 0), 0, starts.data());
  if (error == 0) kernels().attention(args);
  return error;
}

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
    return refuse_text(call.op, "a table of %s and %lld dimensions, indices of %s, axis %lld, batch_dims %lld", call.dtypes[0],
                       static_cast<long long>(dims), call.dtypes[1], static_cast<long long>(axis),
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

int matmul(const Call& call) {
  if (call.ndims[0] != 2 || call.ndims[1] != 2) {
    return refuse_text(call.op, "inputs of %d and %d dimensions; both must have 2", call.ndims[0], call.ndims[1]);
  }
  if (std::strcmp(call.dtypes[0], call.dtypes[1]) != 0) {
    return refuse_text(call.op, "inputs of %s and %s; they must be the same", call.dtypes[0], call.dtypes[1]);
  }
  const bool transpose_a = call.boolean(2), transpose_b = call.boolean(3);
  AnyMatMulArgs args{};
  args.a = call.data[0];
  args.b = call.data[1];
  args.out = call.data[call.count - 1];
  args.rows = call.dim(0, transpose_a ? 1 : 0);
  args.depth = call.dim(0, transpose_a ? 0 : 1);
  args.columns = call.dim(1, transpose_b ? 0 : 1);
  args.transpose_a = transpose_a;
  args.transpose_b = transpose_b;
  args.dtype = call.dtypes[0];
  args.out_dtype = call.dtypes[call.count - 1];
  if (call.dim(1, transpose_b ? 1 : 0) != args.depth) {
    return refuse_text(call.op, "inner dimensions %lld and %lld differ", static_cast<long long>(args.depth),
                       static_cast<long long>(call.dim(1, transpose_b ? 1 : 0)));
  }
  return any_matmul(call.op, args);
}

Call make_call(const char* op, int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void* extra) {
  return {{op, count, data, ndims, shapes, dtypes}, static_cast<KernelInputInfo*>(extra)};
}

}  // namespace
}  // namespace llmk

#define LLMK_ENTRY __attribute__((visibility("default")))
#define LLMK_PLUGIN(name, call)                                                                          \
  LLMK_ENTRY int name(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*, \
                      void* extra) {                                                                     \
    const llmk::StandardFloatingPoint scope;                                                             \
    const llmk::Call arguments = llmk::make_call(#name, nparam, params, ndims, shapes, dtypes, extra);   \
    return llmk::call;                                                                                   \
  }

extern "C" {

LLMK_ENTRY int GetRegisteredOpCount() { return sizeof(llmk::kOps) / sizeof(llmk::kOps[0]); }
LLMK_ENTRY const char** GetAllRegisteredOps() { return llmk::kOps; }
LLMK_ENTRY int GetComputeDependOpCount() { return 0; }
LLMK_ENTRY const char** GetAllComputeDependOps() { return llmk::kOps; }
LLMK_ENTRY bool IsKernelRegistered(const char* name) {
  for (const char* op : llmk::kOps) {
    if (std::strcmp(op, name) == 0) return true;
  }
  return false;
}

LLMK_PLUGIN(RmsNorm, rms_norm(arguments, false))
LLMK_PLUGIN(AddRmsNorm, rms_norm(arguments, true))
LLMK_PLUGIN(Swiglu, swiglu(arguments))
LLMK_PLUGIN(ApplyRotaryPosEmb, apply_rotary(arguments))
LLMK_PLUGIN(ReshapeAndCache, reshape_and_cache(arguments))
LLMK_PLUGIN(FlashAttentionScore, flash_attention(arguments))
LLMK_PLUGIN(PagedAttention, paged_attention(arguments))
LLMK_PLUGIN(MatMul, matmul(arguments))
LLMK_PLUGIN(Gather, gather(arguments))

}  // extern "C"
