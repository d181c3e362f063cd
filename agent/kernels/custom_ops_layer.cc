// The custom operators that run all decoder layers of a model in one call. Each layer runs the operators
// (Add)NormLinear, RotaryAttention, PackedLinear and GatedMlp, which pass their results through scratch memory. Gemma
// has two more norms in a layer: for the results of attention and of the MLP, before they are added to the residual
// stream.
//
// MindSpore needs 30 to 50 us for each operator of its graph. It must wake a thread, and it must reload its own data,
// because the weights have displaced this data from the processor's caches. Meanwhile the threads of the kernels fall
// asleep. With one operator for all layers, these costs occur only once per step.
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "exchange/collectives.h"

namespace llmk {
namespace {

enum Argument {
  kHidden, kResidual, kForm, kEpsilon, kPositions, kCos, kSin, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts,
  kLayers
};

// The position of each argument of a layer, counted from the layer's first argument. The arguments of the first layer
// begin at argument kLayers of the operator.
//
// Two groups of arguments are optional. The operator has them if the argument `form` sets a flag (FormField). With
// kHeadNorms, the gammas for the norms of query heads and key heads follow. With kResultNorms, the gammas for the norms
// of the results of attention and MLP come last.
enum LayerArgument {
  kInputGamma, kPostGamma, kQkv, kOutput, kGateUp, kDown, kKeyCache, kValueCache, kPlainLayer,
  kQueryGamma = kPlainLayer, kKeyGamma
};

// The elements of the argument `form`: the number of layers, the window of attention (0: none), and two flags. The flag
// kHeadNorms is set if query and key heads have a norm. The flag kResultNorms is set if the results of attention and
// MLP have a norm.
enum FormField { kNumLayers, kWindow, kHeadNorms, kResultNorms, kFormFields };

// Returns the number of arguments of each layer.
int layer_arguments(const int32_t* form) {
  return kPlainLayer + (form[kHeadNorms] != 0 ? 2 : 0) + (form[kResultNorms] != 0 ? 2 : 0);
}

// An intermediate matrix of a layer. One inner operator writes the matrix, and a later operator reads it.
struct Between {
  const char* dtype;
  int64_t shape[2];
  void* data = nullptr;

  int64_t bytes() const { return shape[0] * shape[1] * size_of(parse_dtype(dtype)); }
};

// Calls an inner operator such as PackedLinear. Its arguments are arguments of the outer operator, or intermediate
// matrices (Between).
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

// Runs one layer. The first layer reads the inputs of the operator. Every layer writes its result to the outputs of the
// operator. A later layer reads the previous result from these outputs and overwrites it with its own.
class Layer {
 public:
  Layer(const Tensors& t, int64_t layer, int64_t rows, bool first, bool sharded)
      : t_(t), form_(t.as<int32_t>(kForm)),
        arguments_(kLayers + static_cast<int>(layer) * layer_arguments(form_)),
        result_gammas_(arguments_ + layer_arguments(form_) - 2),
        out_(t.count - 2), out_residual_(t.count - 1), from_hidden_(layer == 0 ? kHidden : out_),
        from_residual_(layer == 0 ? kResidual : out_residual_), is_stream_(first && layer == 0), sharded_(sharded),
        rows_(rows), width_(t.dim(kHidden, 1)) {}

  int run() {
    int error = place();
    if (error == 0) error = project_in();
    if (error == 0) error = attend();
    if (error == 0) error = project_out();
    return error != 0 ? error : feed_forward();
  }

 private:
  // Assigns scratch memory to the intermediate matrices.
  int place() {
    const PackedWeightHeader* qkv_weight = packed_weight(t_, arguments_ + kQkv);
    const PackedWeightHeader* output_weight = packed_weight(t_, arguments_ + kOutput);
    if (qkv_weight == nullptr || output_weight == nullptr) return kBadArgument;
    const char* dtype = t_.dtypes[kHidden];
    qkv_ = {dtype, {rows_, qkv_weight->columns}};
    attended_ = {dtype, {rows_, output_weight->depth}};
    hidden_ = {dtype, {rows_, width_}};
    residual_ = {dtype, {rows_, width_}};
    own_ = {"float32", {sharded_ ? rows_ : 0, width_}};
    window_ = {"int32", {1, 1}, form_ + kWindow};
    const auto all = {&own_, &qkv_, &attended_, &hidden_, &residual_};
    int64_t bytes = 0;
    for (const Between* matrix : all) bytes += matrix->bytes();
    char* memory = static_cast<char*>(thread_scratch(kScratchLayer, bytes));
    for (Between* matrix : all) {
      matrix->data = memory;
      memory += matrix->bytes();
    }
    return 0;
  }

  int project_in() {
    Call norm(is_stream_ ? "NormLinear" : "AddNormLinear", t_);
    norm.give(from_hidden_);
    if (!is_stream_) norm.give(from_residual_);
    norm.give(arguments_ + kInputGamma).give(kEpsilon).give(arguments_ + kQkv).give(kCounts).give(&qkv_);
    if (is_stream_) {
      residual_.data = t_.data[kHidden];
    } else {
      norm.give(&residual_);
    }
    return norm_linear(norm.tensors(), !is_stream_);
  }

  int attend() {
    Call attention("RotaryAttention", t_);
    attention.give(&qkv_).give(kPositions).give(kCos).give(kSin);
    attention.give(arguments_ + kKeyCache).give(arguments_ + kValueCache);
    for (int i = kSlots; i <= kCounts; ++i) attention.give(i);
    attention.give(&window_);
    if (form_[kHeadNorms] != 0) {
      attention.give(arguments_ + kQueryGamma).give(arguments_ + kKeyGamma).give(kEpsilon);
    }
    return rotary_attention(attention.give(&attended_).tensors());
  }

  int project_out() {
    Call output("PackedLinear", t_);
    output.give(&attended_).give(arguments_ + kOutput).give(kCounts).give(sharded_ ? &own_ : &hidden_);
    int error = packed_linear(output.tensors());
    if (error == 0 && sharded_) error = sum(hidden_.data);
    return error == 0 ? norm_result(hidden_.data, result_gammas_) : error;
  }

  int feed_forward() {
    Call mlp("GatedMlp", t_);
    mlp.give(&hidden_).give(&residual_).give(arguments_ + kPostGamma).give(kEpsilon);
    mlp.give(arguments_ + kGateUp).give(arguments_ + kDown).give(kCounts);
    sharded_ ? mlp.give(&own_) : mlp.give(out_);
    int error = gated_mlp(mlp.give(out_residual_).tensors());
    if (error == 0 && sharded_) error = sum(t_.data[out_]);
    return error == 0 ? norm_result(t_.data[out_], result_gammas_ + 1) : error;
  }

  // Applies RMSNorm to the rows of `result`, the result of attention or MLP, in place. Does nothing if the model does
  // not norm these results (form[kResultNorms] is 0). `gamma` is the index of the argument with the norm's weight.
  int norm_result(void* result, int gamma) {
    if (form_[kResultNorms] == 0) return 0;
    const int error = check_gamma(t_, gamma, kEpsilon, width_, t_.dtype(kHidden));
    if (error != 0) return error;
    RmsNormArgs args{};
    args.x = args.y = result;
    args.gamma = t_.data[gamma];
    args.rows = rows_;
    args.width = width_;
    args.epsilon = *t_.as<float>(kEpsilon);
    args.dtype = t_.dtype(kHidden);
    args.gamma_dtype = t_.dtype(gamma);
    kernels().rms_norm(args);
    return 0;
  }

  // Adds the matrices `own_` of all agents of the stage. Writes the sum to `to`, in the type of the activations.
  int sum(void* to) {
    return all_reduce(t_.op, DType::kFloat32, own_.data, t_.dtype(kHidden), to, rows_ * width_);
  }

  const Tensors& t_;
  int32_t* const form_;
  const int arguments_, result_gammas_, out_, out_residual_, from_hidden_, from_residual_;
  const bool is_stream_, sharded_;
  const int64_t rows_, width_;
  Between qkv_{}, attended_{}, hidden_{}, residual_{}, window_{};
  Between own_{};  // float32 terms that this agent adds to a sum over agents; only the sum is rounded
};

// Runs all layers. If `first`, these are the first layers of the model: the argument `hidden` is then the residual
// stream itself, and `residual` is not read.
//
// If `sharded`, each agent of a stage has some of the heads and columns. Then the results of attention and MLP are
// added over the agents. This operator also runs these additions, because separate operators for them would take longer
// than the additions themselves.
int decoder_layers(const Tensors& t, bool first, bool sharded) {
  if (t.count < kLayers + 2) return refuse_text(t.op, "got %d arguments", t.count);
  if (!t.has_dtype(kForm, "int32") || t.size(kForm) != kFormFields) {
    return refuse_text(t.op, "form must be int32 {layers, window, norms of query and key heads, norms of results}");
  }
  const int32_t* form = t.as<int32_t>(kForm);
  const int64_t arguments = kLayers + form[kNumLayers] * int64_t{layer_arguments(form)};
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
    error = Layer(t, layer, rows, first, sharded).run();
  }
  return error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(FirstDecoderLayers, 2, decoder_layers(t, true, false))
LLMK_CUSTOM_OP(DecoderLayers, 2, decoder_layers(t, false, false))
LLMK_CUSTOM_OP(FirstShardedDecoderLayers, 2, decoder_layers(t, true, true))
LLMK_CUSTOM_OP(ShardedDecoderLayers, 2, decoder_layers(t, false, true))
