// Entries of decoder layers as one custom op: (Add)NormLinear, RotaryAttention, PackedLinear and GatedMlp one after the
// other and layer after layer, what goes between them in scratch memory of the step's size.
//
// MindSpore's work for an operator finds cold caches, as the weights have passed through them, and wakes a thread: some
// 30 to 50 us, in which the kernels' threads fall asleep. So a model's layers pay it once.
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "exchange/collectives.h"

namespace llmk {
namespace {

enum Argument {
  kHidden, kResidual, kForm, kEpsilon, kPositions, kCos, kSin, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts,
  kLayers
};

// Of each layer, one after the other from kLayers on; the gammas of query and key heads where `form` says so.
enum LayerArgument {
  kInputGamma, kPostGamma, kQkv, kOutput, kGateUp, kDown, kKeyCache, kValueCache, kPlainLayer,
  kQueryGamma = kPlainLayer, kKeyGamma, kNormedLayer
};

// The argument `form`: how many layers, attention's window (0: none), and whether query and key heads are normed.
enum FormField { kNumLayers, kWindow, kHeadNorms, kFormFields };

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

// Layer `layer` of the operator. Its input is what the one before left in the operator's outputs, which it replaces
// when nothing reads them any more; of the first it is the operator's own.
int run_layer(const Tensors& t, int64_t layer, int64_t rows, bool first, bool sharded) {
  int32_t* form = t.as<int32_t>(kForm);
  const int arguments = kLayers + static_cast<int>(layer) * (form[kHeadNorms] != 0 ? kNormedLayer : kPlainLayer);
  const int out = t.count - 2, out_residual = t.count - 1;
  const int from_hidden = layer == 0 ? kHidden : out, from_residual = layer == 0 ? kResidual : out_residual;
  const bool is_stream = first && layer == 0;
  const int64_t width = t.dim(kHidden, 1);
  const PackedWeightHeader* qkv_weight = packed_weight(t, arguments + kQkv);
  const PackedWeightHeader* output_weight = packed_weight(t, arguments + kOutput);
  if (qkv_weight == nullptr || output_weight == nullptr) return kBadArgument;
  const char* dtype = t.dtypes[kHidden];
  Between qkv{dtype, {rows, qkv_weight->columns}}, attended{dtype, {rows, output_weight->depth}};
  Between hidden{dtype, {rows, width}}, residual{dtype, {rows, width}};
  Between own{"float32", {sharded ? rows : 0, width}};  // of a sum over the agents, not rounded before it is one
  Between window{"int32", {1, 1}, form + kWindow};
  const auto all = {&own, &qkv, &attended, &hidden, &residual};
  int64_t bytes = 0;
  for (const Between* matrix : all) bytes += matrix->bytes();
  char* memory = static_cast<char*>(thread_scratch(kScratchLayer, bytes));
  for (Between* matrix : all) {
    matrix->data = memory;
    memory += matrix->bytes();
  }
  Call norm(is_stream ? "NormLinear" : "AddNormLinear", t);
  norm.give(from_hidden);
  if (!is_stream) norm.give(from_residual);
  norm.give(arguments + kInputGamma).give(kEpsilon).give(arguments + kQkv).give(kCounts).give(&qkv);
  if (is_stream) {
    residual.data = t.data[kHidden];
  } else {
    norm.give(&residual);
  }
  int error = norm_linear(norm.tensors(), !is_stream);
  if (error != 0) return error;
  Call attention("RotaryAttention", t);
  attention.give(&qkv).give(kPositions).give(kCos).give(kSin);
  attention.give(arguments + kKeyCache).give(arguments + kValueCache);
  for (int i = kSlots; i <= kCounts; ++i) attention.give(i);
  attention.give(&window);
  if (form[kHeadNorms] != 0) {
    attention.give(arguments + kQueryGamma).give(arguments + kKeyGamma).give(kEpsilon);
  }
  error = rotary_attention(attention.give(&attended).tensors(), false);
  if (error != 0) return error;
  Call output("PackedLinear", t);
  output.give(&attended).give(arguments + kOutput).give(kCounts).give(sharded ? &own : &hidden);
  error = packed_linear(output.tensors());
  const auto sum = [&](void* to) {
    return all_reduce(t.op, DType::kFloat32, own.data, t.dtype(kHidden), to, rows * width);
  };
  if (error == 0 && sharded) error = sum(hidden.data);
  if (error != 0) return error;
  Call mlp("GatedMlp", t);
  mlp.give(&hidden).give(&residual).give(arguments + kPostGamma).give(kEpsilon);
  mlp.give(arguments + kGateUp).give(arguments + kDown).give(kCounts);
  sharded ? mlp.give(&own) : mlp.give(out);
  error = gated_mlp(mlp.give(out_residual).tensors());
  return error == 0 && sharded ? sum(t.data[out]) : error;
}

// `first`: the input is the residual stream itself, and the argument residual is not read. `sharded`: the agents of a
// stage have some heads and columns each, and what comes out of attention and MLP is summed over them. The sums are in
// here for the same reason as everything else: two operators of their own would cost more than they do.
int decoder_layers(const Tensors& t, bool first, bool sharded) {
  if (t.count < kLayers + 2) return refuse_text(t.op, "got %d arguments", t.count);
  if (!t.has_dtype(kForm, "int32") || t.size(kForm) != kFormFields) {
    return refuse_text(t.op, "form must be int32 {layers, window, norms of query and key heads}");
  }
  const int32_t* form = t.as<int32_t>(kForm);
  const int64_t arguments = kLayers + form[kNumLayers] * int64_t{form[kHeadNorms] != 0 ? kNormedLayer : kPlainLayer};
  if (form[kNumLayers] < 1 || t.count != arguments + 2) {
    return refuse_text(t.op, "got %d arguments for %d layers; it takes %lld and gives 2", t.count, form[kNumLayers],
                       static_cast<long long>(arguments));
  }
  if (t.dtype(kHidden) == DType::kUnsupported || t.ndims[kHidden] != 2) {
    return refuse_text(t.op, "hidden is %s with %d dimensions; it must be a matrix of float32, float16 or bfloat16",
                       t.dtypes[kHidden], t.ndims[kHidden]);
  }
  const int64_t rows = rows_of(t, kCounts, 0, t.dim(kHidden, 0));
  if (rows < 0) return kBadArgument;
  int error = 0;
  for (int64_t layer = 0; layer < form[kNumLayers] && rows > 0 && error == 0; ++layer) {
    error = run_layer(t, layer, rows, first, sharded);
  }
  return error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(FirstDecoderLayers, decoder_layers(t, true, false))
LLMK_CUSTOM_OP(DecoderLayers, decoder_layers(t, false, false))
LLMK_CUSTOM_OP(FirstShardedDecoderLayers, decoder_layers(t, true, true))
LLMK_CUSTOM_OP(ShardedDecoderLayers, decoder_layers(t, false, true))
