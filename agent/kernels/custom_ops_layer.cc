// Entries of a whole decoder layer as one custom op: (Add)NormLinear, RotaryAttention, PackedLinear and GatedMlp one
// after the other, what goes between them in scratch memory of the step's size.
//
// MindSpore's work for an operator, some microseconds that grow with its arguments, finds cold caches in every step, as
// the weights have passed through them; so a layer pays it once.
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "exchange/collectives.h"

namespace llmk {
namespace {

enum Argument {
  kHidden, kResidual, kInputGamma, kPostGamma, kEpsilon, kQkv, kOutput, kGateUp, kDown, kPositions, kCos, kSin,
  kKeyCache, kValueCache, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts, kWindow, kQueryGamma, kKeyGamma
};

// A matrix between two operators.
struct Between {
  const char* dtype;
  int64_t shape[2];
  void* data = nullptr;

  int64_t bytes() const { return shape[0] * shape[1] * size_of(parse_dtype(dtype)); }
};

// The arguments of an inner operator: some of the layer's, some between.
class Call {
 public:
  Call(const char* op, const Tensors& layer) : op_(op), layer_(layer) {}

  Call& give(int argument) {
    return add(layer_.data[argument], layer_.ndims[argument], layer_.shapes[argument], layer_.dtypes[argument]);
  }
  Call& give(Between* matrix) { return add(matrix->data, 2, matrix->shape, matrix->dtype); }

  Tensors tensors() { return {op_, count_, data_, ndims_, shapes_, dtypes_}; }

 private:
  static constexpr int kMost = 16;

  Call& add(void* data, int ndims, int64_t* shape, const char* dtype) {
    data_[count_] = data;
    ndims_[count_] = ndims;
    shapes_[count_] = shape;
    dtypes_[count_++] = dtype;
    return *this;
  }

  const char* op_;
  const Tensors& layer_;
  int count_ = 0;
  void* data_[kMost];
  int ndims_[kMost];
  int64_t* shapes_[kMost];
  const char* dtypes_[kMost];
};

// Behind counts may come, where a model needs them, attention's window, or window and gammas of queries and keys.
// `first`: the layer's input is the residual stream itself, and the argument residual is not read. `sharded`: the
// agents of a stage have some heads and columns each, and what comes out of attention and MLP is summed over them. The
// sums are in here for the same reason as everything else: two operators of their own would cost more than they do.
int decoder_layer(const Tensors& t, bool first, bool sharded) {
  const bool has_window = t.count > kWindow + 2, has_norms = t.count > kKeyGamma + 2;
  if (t.count != kWindow + 2 && t.count != kQueryGamma + 2 && t.count != kKeyGamma + 3) {
    return refuse_text(t.op, "got %d arguments; it takes 19, 20 or 22 and gives 2", t.count);
  }
  if (t.dtype(kHidden) == DType::kUnsupported || t.ndims[kHidden] != 2) {
    return refuse_text(t.op, "hidden is %s with %d dimensions; it must be a matrix of float32, float16 or bfloat16",
                       t.dtypes[kHidden], t.ndims[kHidden]);
  }
  const int64_t rows = rows_of(t, kCounts, 0, t.dim(kHidden, 0)), width = t.dim(kHidden, 1);
  if (rows < 0) return kBadArgument;
  if (rows == 0) return 0;
  const PackedWeightHeader* qkv_weight = packed_weight(t, kQkv);
  const PackedWeightHeader* output_weight = packed_weight(t, kOutput);
  if (qkv_weight == nullptr || output_weight == nullptr) return kBadArgument;
  const char* dtype = t.dtypes[kHidden];
  Between qkv{dtype, {rows, qkv_weight->columns}}, attended{dtype, {rows, output_weight->depth}};
  Between hidden{dtype, {rows, width}}, residual{dtype, {rows, width}};
  Between own{"float32", {sharded ? rows : 0, width}};  // of a sum over the agents, not rounded before it is one
  const auto all = {&own, &qkv, &attended, &hidden, &residual};
  int64_t bytes = 0;
  for (const Between* matrix : all) bytes += matrix->bytes();
  char* memory = static_cast<char*>(thread_scratch(kScratchLayer, bytes));
  for (Between* matrix : all) {
    matrix->data = memory;
    memory += matrix->bytes();
  }
  Call norm(first ? "NormLinear" : "AddNormLinear", t);
  norm.give(kHidden);
  if (!first) norm.give(kResidual);
  norm.give(kInputGamma).give(kEpsilon).give(kQkv).give(kCounts).give(&qkv);
  if (first) {
    residual.data = t.data[kHidden];
  } else {
    norm.give(&residual);
  }
  int error = norm_linear(norm.tensors(), !first);
  if (error != 0) return error;
  Call attention("RotaryAttention", t);
  attention.give(&qkv);
  for (int i = kPositions; i <= kCounts; ++i) attention.give(i);
  if (has_window) attention.give(kWindow);
  if (has_norms) attention.give(kQueryGamma).give(kKeyGamma).give(kEpsilon);
  error = rotary_attention(attention.give(&attended).tensors(), false);
  if (error != 0) return error;
  Call output("PackedLinear", t);
  output.give(&attended).give(kOutput).give(kCounts).give(sharded ? &own : &hidden);
  error = packed_linear(output.tensors());
  const auto sum = [&](void* out) {
    return all_reduce(t.op, DType::kFloat32, own.data, t.dtype(kHidden), out, rows * width);
  };
  if (error == 0 && sharded) error = sum(hidden.data);
  if (error != 0) return error;
  Call mlp("GatedMlp", t);
  mlp.give(&hidden).give(&residual).give(kPostGamma).give(kEpsilon).give(kGateUp).give(kDown).give(kCounts);
  const int out = t.count - 2;
  sharded ? mlp.give(&own) : mlp.give(out);
  error = gated_mlp(mlp.give(t.count - 1).tensors());
  return error == 0 && sharded ? sum(t.data[out]) : error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(FirstDecoderLayer, decoder_layer(t, true, false))
LLMK_CUSTOM_OP(DecoderLayer, decoder_layer(t, false, false))
LLMK_CUSTOM_OP(FirstShardedDecoderLayer, decoder_layer(t, true, true))
LLMK_CUSTOM_OP(ShardedDecoderLayer, decoder_layer(t, false, true))
