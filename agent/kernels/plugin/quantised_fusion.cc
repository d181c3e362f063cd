#include "quantised_fusion.h"

#include <cstring>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "packed_product.h"

namespace llmk {
namespace {

bool quantises_rows_of(const Call& quant, int64_t rows, int64_t depth) {
  return !quant.is_tensor(kSmoothScales) && rows > 0 && depth > 0 && quant.dim(kQuantX, -1) == depth &&
         quant.size(kQuantX) == rows * depth && quant.dtype(kQuantX) != DType::kUnsupported;
}

// The rows that DynamicQuantExt quantises, as the classes below provide them. prepare() reads the launches of the
// fusion, and returns false if it does not support their sizes. The function row(i, memory) returns the address of row
// i. It may write the row to `memory`, which has space for one row.
struct RowSource {
  int64_t rows = 0, depth = 0;
  DType dtype = DType::kUnsupported;

  bool takes(const Call& quant) {
    dtype = quant.dtype(kQuantX);
    return quantises_rows_of(quant, rows, depth);
  }
};

// The rows are the input of DynamicQuantExt.
struct GivenRows : RowSource {
  static constexpr int kQuant = 0;  // index of DynamicQuantExt among the launches of the fusion
  const char* x = nullptr;

  bool prepare(const Call& quant, const Call&) {
    x = quant.as<char>(kQuantX);
    depth = quant.dim(kQuantX, -1);
    rows = depth == 0 ? 0 : quant.size(kQuantX) / depth;
    return takes(quant);
  }
  const void* row(int64_t i, void*) const { return x + i * depth * size_of(dtype); }
};

// The rows are results of RmsNorm or AddRmsNorm.
struct NormedRows : RowSource {
  static constexpr int kQuant = 1;
  RmsNormArgs all{};

  bool prepare(const Call& norm, const Call& quant) {
    const bool has_residual = std::strcmp(norm.op, "AddRmsNorm") == 0;
    const int gamma = has_residual ? 2 : 1, y = norm.count - (has_residual ? 3 : 2);
    depth = norm.size(gamma);
    rows = depth == 0 ? 0 : norm.size(0) / depth;
    if (!takes(quant) || norm.size(0) != rows * depth || norm.dtype(gamma) == DType::kUnsupported ||
        norm.dtype(0) != dtype ||
        (has_residual && (norm.dtype(1) != norm.dtype(0) || norm.size(1) != norm.size(0)))) {
      return false;
    }
    all.rows = 1;
    all.width = depth;
    all.x = norm.data[0];
    all.residual = has_residual ? norm.data[1] : nullptr;
    all.sum = has_residual ? norm.data[y + 2] : nullptr;
    all.rstd = norm.as<float>(y + 1);
    all.gamma = norm.data[gamma];
    all.epsilon = static_cast<float>(norm.real(gamma + 1));
    all.dtype = dtype;
    all.gamma_dtype = norm.dtype(gamma);
    return true;
  }
  const void* row(int64_t i, void* memory) const {
    const int64_t offset = i * depth * size_of(dtype);
    RmsNormArgs args = all;
    args.x = static_cast<const char*>(all.x) + offset;
    if (all.residual != nullptr) {
      args.residual = static_cast<const char*>(all.residual) + offset;
      args.sum = static_cast<char*>(all.sum) + offset;
    }
    args.rstd = all.rstd + i;
    args.y = memory;
    kernels().rms_norm(args);
    return memory;
  }
};

// The rows are results of Swiglu.
struct ActivatedRows : RowSource {
  static constexpr int kQuant = 1;
  const char* input = nullptr;

  bool prepare(const Call& swiglu, const Call& quant) {
    const int out = swiglu.count - 1;
    depth = swiglu.dim(out, -1);
    rows = depth == 0 ? 0 : swiglu.size(out) / depth;
    input = swiglu.as<char>(0);
    // Does not fuse if there are fewer rows than threads, because an unfused Swiglu can divide a row among several
    // threads.
    return takes(quant) && rows >= num_threads() && splits_last_axis(swiglu) && swiglu.dtype(0) == dtype;
  }
  static bool splits_last_axis(const Call& swiglu) {
    const int64_t axis = swiglu.integer(1) < 0 ? swiglu.integer(1) + swiglu.ndims[0] : swiglu.integer(1);
    const int out = swiglu.count - 1;
    return axis == swiglu.ndims[0] - 1 && swiglu.dim(0, -1) == 2 * swiglu.dim(out, -1) &&
           swiglu.size(0) == 2 * swiglu.size(out);
  }
  const void* row(int64_t i, void* memory) const {
    SwigluArgs args{};
    args.input = input + i * 2 * depth * size_of(dtype);
    args.out = memory;
    args.outer = 1;
    args.inner = depth;
    args.dtype = dtype;
    kernels().swiglu(args);
    return memory;
  }
};

// Quantises all rows of `source` into `result`. If `y` is not null, it receives the values of the rows, too.
template <class Source>
void quantise(const Source& source, const QuantizedRows& result, int8_t* y) {
  PackedWeightHeader header{};
  header.format = WeightFormat::kInt8;
  header.depth = source.depth;
  parallel_for_rows(source.rows, source.depth, [&](int64_t i) {
    const void* row = source.row(i, thread_scratch(kScratchNormed, source.depth * size_of(source.dtype)));
    kernels().quantize_row(source.dtype, row, result, i, &header);
    if (y != nullptr && result.values != y) {
      std::memcpy(y + i * source.depth, result.values + i * result.stride, static_cast<size_t>(source.depth));
    }
  });
}

// Runs the last launches of a fusion: a product, and Swiglu if there are two launches. `rows` are the quantised rows of
// the product, or null.
int multiply(Launch* const* parts, int count, const QuantizedRows* rows) {
  const Call product = parts[0]->call();
  ProductForm form{rows, nullptr};
  if (count > 1) {
    const Call swiglu = parts[1]->call();
    if (!ActivatedRows::splits_last_axis(swiglu) || swiglu.dtype(0) != product.dtype(product.count - 1)) {
      const int error = multiply(parts, 1, rows);
      return error != 0 ? error : parts[1]->run();
    }
    form.gated = swiglu.data[swiglu.count - 1];
  }
  if (is(*parts[0], "MatMul")) return plugin_matmul(product, form);
  if (is(*parts[0], "WeightQuantBatchMatmul")) return plugin_weight_quant_matmul(product, form);
  return plugin_quant_matmul(product, form);
}

template <class Source>
int run(Launch* const* parts, const Fusion& fusion) {
  constexpr int kQuant = Source::kQuant;
  const Call quant = parts[kQuant]->call();
  Source source;
  if (!source.prepare(parts[0]->call(), quant)) return run_apart(parts, fusion.count);
  if (fusion.count == kQuant + 1) {
    int8_t* y = quant.as<int8_t>(kQuantY);
    quantise(source, allocate_rows(y, quant.as<float>(kQuantScale), source.rows, source.depth), y);
    return 0;
  }
  PackedWeightHeader header{};
  header.format = WeightFormat::kInt8;
  header.depth = source.depth;
  void* memory = thread_scratch(kScratchQuantized, quantized_rows_bytes(&header, source.rows));
  const QuantizedRows rows = quantized_rows(&header, source.rows, memory);
  quantise(source, rows, nullptr);
  return multiply(parts + kQuant + 1, fusion.count - kQuant - 1, &rows);
}

}  // namespace

int run_apart(Launch* const* parts, int count) {
  for (int i = 0; i < count; ++i) {
    const int error = parts[i]->run();
    if (error != 0) return error;
  }
  return 0;
}

int run_norm_quantise(Launch* const* parts, const Fusion& fusion) { return run<NormedRows>(parts, fusion); }
int run_swiglu_quantise(Launch* const* parts, const Fusion& fusion) { return run<ActivatedRows>(parts, fusion); }
int run_quantise(Launch* const* parts, const Fusion& fusion) { return run<GivenRows>(parts, fusion); }
int run_product(Launch* const* parts, const Fusion& fusion) { return multiply(parts, fusion.count, nullptr); }

}  // namespace llmk
