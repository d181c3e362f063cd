// The custom operators EmbedTokens, NormLinear, AddNormLinear, PackedLinear, GatedMlp and LmHead of the fused graph.
//
// The graph is static: every tensor has the size of the largest step. `counts` [4] = {tokens, sequences, width of the
// block table, step number} gives the size of the current step. Rows beyond this size are neither read nor written.
// Weights are packed (ops/linear.h).
//
// The residual addition and the norm run row by row, in the same operator as the linear layer that follows. So if a row
// must be quantised, it is still in the processor's cache. The results of the norm, the addition and SwiGLU are rounded
// to the type of the activations, as the native primitives round them.
#include <cstdint>
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/row_tasks.h"
#include "common/tensors.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "ops/gather.h"

namespace llmk {
namespace {

// Number of rows that an MLP computes at a time, so that the intermediate results of these rows stay in the cache.
constexpr int64_t kMlpRows = 256;
// If each thread has at least this number of rows, each thread computes its own rows (for_row_pieces()). With fewer
// rows, all threads work on the same rows.
constexpr int64_t kThreadRows = 128;

int64_t row_bytes(DType dtype, int64_t width) { return size_of(dtype) * width; }

// Divides the rows into pieces and calls function(first row, number of rows) for each piece. Returns 0, or the error of
// a call.
//
// With few rows, the calls run one after another. A call gets up to `most` rows, and all threads share its work. With
// many rows, each thread makes calls for its own rows. Then a thread finds its earlier results in its own cache, but
// every thread reads all weights.
template <class Function>
int for_row_pieces(int64_t rows, int64_t most, const Function& function) {
  const int64_t threads = num_threads();
  if (threads == 1 || rows < kThreadRows * threads) {
    int error = 0;
    for (int64_t first = 0; error == 0 && first < rows; first += most) {
      error = function(first, smaller(most, rows - first));
    }
    return error;
  }
  const int64_t pieces = ceil_div(rows, kMlpRows * threads) * threads;
  int failed = 0;
  parallel_stretches(pieces, [&](int64_t i) {
    const int64_t first = rows * i / pieces;
    const int error = function(first, rows * (i + 1) / pieces - first);
    if (error != 0) __atomic_store_n(&failed, error, __ATOMIC_RELAXED);
  });
  return failed;
}

// The input rows of a linear layer: the results of a norm. If the layer's weight takes int8 activations, `quantized`
// has the rows as int8. If the weight takes floats, or if rows have adapters, `values` has the rows as floats.
// Otherwise `values` is null.
struct NormedRows {
  const void* values = nullptr;
  QuantizedRows quantized{};
  bool is_quantized = false;
};

}  // namespace

void norm_row(const NormInput& in, int64_t from, void* out) {
  const int64_t offset = from * row_bytes(in.dtype, in.width);
  RmsNormArgs args{};
  args.x = in.x + offset;
  args.residual = in.residual == nullptr ? nullptr : in.residual + offset;
  args.sum = in.sum == nullptr ? nullptr : in.sum + offset;
  args.gamma = in.gamma;
  args.y = out;
  args.rows = 1;
  args.width = in.width;
  args.epsilon = in.epsilon;
  args.dtype = in.dtype;
  args.gamma_dtype = in.gamma_dtype;
  kernels().rms_norm(args);
}

namespace {

// Computes the norms of `rows` rows. Row i of the result is the norm of row source(i) of the input. If `weight` takes
// int8 activations, the rows are quantised, and with `keeps_floats` they are also returned as floats. If `weight` takes
// floats, the rows are returned only as floats.
template <class Source>
NormedRows norm_rows(const NormInput& in, const void* weight, int64_t rows, bool keeps_floats, const Source& source) {
  NormedRows out;
  const int64_t bytes = row_bytes(in.dtype, in.width);
  out.is_quantized = wants_quantized_rows(weight);
  char* values = nullptr;
  if (out.is_quantized) {
    out.quantized =
        quantized_rows(weight, rows, thread_scratch(kScratchQuantized, quantized_rows_bytes(weight, rows)));
  }
  const bool has_floats = keeps_floats || !out.is_quantized;
  if (has_floats) {
    values = static_cast<char*>(thread_scratch(kScratchNormed, rows * bytes));
    out.values = values;
  }
  for_row_ranges(rows, in.width, [&](int64_t begin, int64_t end) {
    void* row = has_floats ? nullptr : thread_scratch(kScratchNormed, bytes);
    for (int64_t i = begin; i < end; ++i) {
      if (has_floats) row = values + i * bytes;
      norm_row(in, source(i), row);
      if (out.is_quantized) kernels().quantize_row(in.dtype, row, out.quantized, i, weight);
    }
  });
  return out;
}

constexpr int32_t kMostParts = 64;

// Adds `parts` arrays of `count` floats element by element, with all threads, and writes the sum to `out`.
void sum_products(const float* const* products, int32_t parts, DType out_dtype, void* out, int64_t count) {
  constexpr int64_t kSpan = 16384;
  parallel_for(ceil_div(count, kSpan), [&](int64_t i) {
    const void* from[kMostParts];
    for (int32_t part = 0; part < parts; ++part) from[part] = products[part] + i * kSpan;
    char* to = static_cast<char*>(out) + row_bytes(out_dtype, i * kSpan);
    kernels().sum_parts(DType::kFloat32, from, parts, out_dtype, to, smaller(kSpan, count - i * kSpan));
  });
}

// Multiplies by a weight that is stored in parts, one for each range of inputs (ops/linear.h). Computes the product
// with each part and adds the products. Processes kMlpRows rows at a time. The rows of the output must be adjacent in
// memory.
int run_parts(const Tensors& t, const LinearArgs& whole) {
  const PackedWeightHeader& header = header_of(whole.weight);
  if (header.parts > kMostParts) return refuse_text(t.op, "a weight in %d parts; at most %d", header.parts, kMostParts);
  const DType out_dtype = whole.epilogue == Epilogue::kStoreFloat ? DType::kFloat32 : whole.dtype;
  const int64_t most = smaller(whole.rows, kMlpRows) * header.columns;
  float* sums = static_cast<float*>(thread_scratch(kScratchParts, header.parts * most * 4));
  const float* products[kMostParts];
  for (int64_t first = 0; first < whole.rows; first += kMlpRows) {
    LinearArgs args = whole;
    args.rows = smaller(kMlpRows, whole.rows - first);
    args.weight = first_part(whole.weight);
    args.x = static_cast<const char*>(whole.x) + row_bytes(whole.dtype, first * whole.x_stride);
    args.epilogue = Epilogue::kStoreFloat;
    for (int32_t i = 0; i < header.parts; ++i) {
      args.out = sums + i * most;
      products[i] = sums + i * most;
      const int error = check_linear(t.op, args);
      if (error != 0) return error;
      kernels().linear(args);
      args.x = static_cast<const char*>(args.x) + row_bytes(whole.dtype, header_of(args.weight).depth);
      args.weight = next_part(args.weight);
    }
    void* out = static_cast<char*>(whole.out) + row_bytes(out_dtype, first * header.columns);
    sum_products(products, header.parts, out_dtype, out, args.rows * header.columns);
  }
  return 0;
}

// Computes a linear layer. `adapters` has the adapter slot of each row; null: no row has an adapter.
int run_linear(const Tensors& t, LinearArgs args, const NormedRows& in, int weight, int64_t rows,
               const int32_t* adapters) {
  args.weight = t.data[weight];
  args.x = in.values;
  args.quantized = in.is_quantized ? &in.quantized : nullptr;
  args.dtype = t.dtype(0);
  args.rows = rows;
  args.x_stride = header_of(args.weight).depth;
  if (header_of(args.weight).parts != 0 && !in.is_quantized) return run_parts(t, args);
  const int error = check_linear(t.op, args);
  if (error != 0) return error;
  LoraRows lora;
  const bool is_adapted = adapters != nullptr && shrink_rows(args.weight, adapters, rows, args.dtype, in.values,
                                                             args.x_stride, &lora);
  args.lora = is_adapted ? &lora : nullptr;
  kernels().linear(args);
  return 0;
}

// Returns the adapter slots from row `first` on, or null if `adapters` is null.
const int32_t* from_row(const int32_t* adapters, int64_t first) {
  return adapters == nullptr ? nullptr : adapters + first;
}

// Checks the output matrix `i`. Its type must be `dtype` or float32. It is float32 if several agents add their outputs
// afterwards, so that only the sum is rounded.
int check_sums(const Tensors& t, int i, int64_t rows, int64_t width, DType dtype) {
  return check_matrix(t, i, rows, width, t.dtype(i) == DType::kFloat32 ? DType::kFloat32 : dtype);
}

Epilogue epilogue_of(const Tensors& t, int out) {
  return t.dtype(out) == DType::kFloat32 ? Epilogue::kStoreFloat : Epilogue::kStore;
}

LinearArgs output(void* out, int64_t stride, Epilogue epilogue) {
  LinearArgs args{};
  args.out = out;
  args.out_stride = stride;
  args.epilogue = epilogue;
  return args;
}

int embed_tokens(const Tensors& t) {
  enum { kIds, kTable, kCounts, kOut };
  if (t.count != 4) return refuse_text(t.op, "got %d arguments; it takes 3 and gives 1", t.count);
  const int64_t rows = rows_of(t, kCounts, 0, t.dim(kOut, 0));
  if (rows < 0) return kBadArgument;
  if (!t.has_dtype(kIds, "int32") || t.size(kIds) < rows || t.ndims[kTable] != 2 || t.ndims[kOut] != 2 ||
      t.dim(kTable, 1) != t.dim(kOut, 1) || t.dtype(kTable) != t.dtype(kOut) || check_float_type(t, kTable) != 0) {
    return refuse_text(t.op, "takes int32 ids, a table [vocabulary, width] and counts");
  }
  GatherArgs args{};
  args.table = t.data[kTable];
  args.indices = t.data[kIds];
  args.out = t.data[kOut];
  args.wide_indices = false;
  args.batch = args.outer = 1;
  args.count = rows;
  args.limit = t.dim(kTable, 0);
  args.row_bytes = row_bytes(t.dtype(kTable), t.dim(kTable, 1));
  return gather_rows(t.op, args);
}

}  // namespace

int norm_linear(const Tensors& t, bool has_residual) {
  // The inputs are hidden, residual, gamma, epsilon, weight and counts. The outputs are out and sum. `residual` and
  // `sum` exist only if has_residual is set.
  const int hidden = 0, residual = 1, gamma = has_residual ? 2 : 1;
  const int epsilon = gamma + 1, weight = gamma + 2, counts = gamma + 3, out = gamma + 4, sum = gamma + 5;
  if (t.count != (has_residual ? sum : out) + 1) return refuse_text(t.op, "got %d arguments", t.count);
  int error = check_float_type(t, hidden);
  if (error != 0) return error;
  const DType dtype = t.dtype(hidden);
  const int64_t width = t.dim(hidden, -1), columns = t.dim(out, -1);
  const int64_t rows = rows_of(t, counts, 0, t.dim(hidden, 0));
  if (rows < 0) return kBadArgument;
  error = check_gamma(t, gamma, epsilon, width, dtype);
  if (error == 0 && has_residual) error = check_matrix(t, residual, rows, width, dtype);
  if (error == 0 && has_residual) error = check_matrix(t, sum, rows, width, dtype);
  if (error == 0) error = check_matrix(t, out, rows, columns, dtype);
  if (error == 0) error = check_weight(t, weight, columns, width, false);
  if (error != 0 || rows == 0) return error;
  NormInput in{t.as<char>(hidden),
               has_residual ? t.as<char>(residual) : nullptr,
               has_residual ? t.as<char>(sum) : nullptr,
               t.data[gamma],
               *t.as<float>(epsilon),
               width,
               dtype,
               t.dtype(gamma)};
  const int32_t* adapters = row_adapters(t, counts);
  return for_row_pieces(rows, rows, [&](int64_t first, int64_t count) {
    const NormedRows normed = norm_rows(in, t.data[weight], count, adapters != nullptr,
                                        [first](int64_t i) { return first + i; });
    void* to = t.as<char>(out) + first * row_bytes(dtype, columns);
    return run_linear(t, output(to, columns, Epilogue::kStore), normed, weight, count, from_row(adapters, first));
  });
}

int packed_linear(const Tensors& t) {
  enum { kX, kWeight, kCounts, kOut };
  if (t.count != 4) return refuse_text(t.op, "got %d arguments; it takes 3 and gives 1", t.count);
  int error = check_float_type(t, kX);
  if (error != 0) return error;
  const DType dtype = t.dtype(kX);
  const int64_t width = t.dim(kX, -1), columns = t.dim(kOut, -1), rows = rows_of(t, kCounts, 0, t.dim(kX, 0));
  if (rows < 0) return kBadArgument;
  error = check_sums(t, kOut, rows, columns, dtype);
  if (error == 0) error = check_weight(t, kWeight, columns, width, false);
  if (error != 0 || rows == 0) return error;
  const int32_t* adapters = row_adapters(t, kCounts);
  return for_row_pieces(rows, rows, [&](int64_t first, int64_t count) {
    NormedRows x;
    x.values = t.as<char>(kX) + first * row_bytes(dtype, width);
    void* to = t.as<char>(kOut) + first * row_bytes(t.dtype(kOut), columns);
    return run_linear(t, output(to, columns, epilogue_of(t, kOut)), x, kWeight, count, from_row(adapters, first));
  });
}

int gated_mlp(const Tensors& t) {
  enum { kHidden, kResidual, kGamma, kEpsilon, kGateUp, kDown, kCounts, kOut, kSum };
  if (t.count != 9) return refuse_text(t.op, "got %d arguments; it takes 7 and gives 2", t.count);
  int error = check_float_type(t, kHidden);
  if (error != 0) return error;
  const DType dtype = t.dtype(kHidden);
  const int64_t width = t.dim(kHidden, -1), rows = rows_of(t, kCounts, 0, t.dim(kHidden, 0));
  if (rows < 0) return kBadArgument;
  error = check_gamma(t, kGamma, kEpsilon, width, dtype);
  for (const int i : {kResidual, kSum}) {
    if (error == 0) error = check_matrix(t, i, rows, width, dtype);
  }
  if (error == 0) error = check_sums(t, kOut, rows, width, dtype);
  if (error != 0) return error;
  const PackedWeightHeader* down = packed_weight(t, kDown);
  if (down == nullptr) return kBadArgument;
  const int64_t inner = down->depth;
  error = check_weight(t, kDown, width, inner, false);
  if (error == 0) error = check_weight(t, kGateUp, 2 * inner, width, true);
  if (error != 0) return error;
  const int64_t out_bytes = row_bytes(t.dtype(kOut), width);
  const NormInput in{t.as<char>(kHidden), t.as<char>(kResidual), t.as<char>(kSum), t.data[kGamma],
                     *t.as<float>(kEpsilon), width, dtype, t.dtype(kGamma)};
  const int32_t* adapters = row_adapters(t, kCounts);
  return for_row_pieces(rows, kMlpRows, [&](int64_t first, int64_t count) {
    NormedRows product;
    void* activated = thread_scratch(kScratchInner, count * row_bytes(dtype, inner));
    product.values = activated;
    const int32_t* own = from_row(adapters, first);
    const NormedRows normed = norm_rows(in, t.data[kGateUp], count, own != nullptr,
                                        [first](int64_t i) { return first + i; });
    const int failed = run_linear(t, output(activated, inner, Epilogue::kGated), normed, kGateUp, count, own);
    if (failed != 0) return failed;
    void* out = t.as<char>(kOut) + first * out_bytes;
    return run_linear(t, output(out, width, epilogue_of(t, kOut)), product, kDown, count, own);
  });
}

int lm_head_rows(const Tensors& t, const LmHeadArguments& at, float* best_values) {
  int error = check_float_type(t, at.hidden);
  if (error != 0) return error;
  const DType dtype = t.dtype(at.hidden);
  const int64_t width = t.dim(at.hidden, -1), stride = t.dim(at.logits, -1);
  const int64_t tokens = rows_of(t, at.counts, 0, t.dim(at.hidden, 0));
  const int64_t seqs = rows_of(t, at.counts, 1, t.dim(at.logits, 0));
  if (tokens < 0 || seqs < 0) return kBadArgument;
  const PackedWeightHeader* weight = packed_weight(t, at.weight);
  if (weight == nullptr || weight->columns > stride) {
    return refuse_text(t.op, "logits of %lld tokens do not take the weight", static_cast<long long>(stride));
  }
  error = check_gamma(t, at.gamma, at.epsilon, width, dtype);
  if (error == 0) error = check_matrix(t, at.residual, tokens, width, dtype);
  if (error == 0) error = check_weight(t, at.weight, weight->columns, width, false);
  if (error != 0) return error;
  if (!t.has_dtype(at.logits, "float32") || !t.has_dtype(at.last_tokens, "int32") || t.size(at.last_tokens) < seqs ||
      !t.has_dtype(at.best_ids, "int32") || t.size(at.best_ids) <= seqs || !t.has_dtype(at.done, "int32")) {
    return refuse_text(t.op, "takes int32 last_tokens, float32 logits and int32 best_ids, of %lld sequences",
                       static_cast<long long>(seqs));
  }
  const int32_t* last = t.as<int32_t>(at.last_tokens);
  int32_t* best = t.as<int32_t>(at.best_ids);
  for (int64_t i = 0; i < seqs; ++i) {
    if (last[i] >= tokens) return refuse_index(t.op, "last_tokens", i, last[i], tokens);
    best[i] = -1;
  }
  NormInput in{t.as<char>(at.hidden), t.as<char>(at.residual), nullptr, t.data[at.gamma], *t.as<float>(at.epsilon),
               width, dtype, t.dtype(at.gamma)};
  in.sum = static_cast<char*>(thread_scratch(kScratchInner, tokens * row_bytes(dtype, width)));
  // Finds groups of consecutive sequences that sample, and calls the linear layer once for each group.
  for (int64_t begin = 0, end; begin < seqs; begin = end) {
    end = begin + 1;
    if (last[begin] < 0) continue;
    while (end < seqs && last[end] >= 0) ++end;
    const NormedRows normed = norm_rows(in, t.data[at.weight], end - begin, false,
                                        [last, begin](int64_t i) { return int64_t{last[begin + i]}; });
    LinearArgs args = output(t.as<float>(at.logits) + begin * stride, stride, Epilogue::kStoreFloat);
    args.best_ids = best + begin;
    args.best_values = best_values + begin;
    error = run_linear(t, args, normed, at.weight, end - begin, nullptr);
    if (error != 0) return error;
  }
  return 0;
}

void mark_done(const Tensors& t, const LmHeadArguments& at) {
  const int32_t number = t.as<int32_t>(at.counts)[3];
  t.as<int32_t>(at.best_ids)[t.size(at.best_ids) - 1] = number;
  t.as<int32_t>(at.done)[0] = number;
}

namespace {

int lm_head(const Tensors& t) {
  enum { kHidden, kResidual, kGamma, kEpsilon, kWeight, kLastTokens, kLogits, kBestIds, kCounts, kDone };
  if (t.count != 10) return refuse_text(t.op, "got %d arguments; it takes 9 and gives 1", t.count);
  const int64_t seqs = rows_of(t, kCounts, 1, t.dim(kLogits, 0));
  if (seqs < 0) return kBadArgument;
  int error = check_weight(t, kWeight, t.dim(kLogits, -1), t.dim(kHidden, -1), false);
  if (error != 0) return error;
  float* values = static_cast<float*>(thread_scratch(kScratchBest, larger(1, seqs) * 4));
  const LmHeadArguments at{kHidden,     kResidual, kGamma,   kEpsilon, kWeight,
                           kLastTokens, kLogits,   kBestIds, kCounts,  kDone};
  error = lm_head_rows(t, at, values);
  if (error == 0) mark_done(t, at);
  return error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(EmbedTokens, 1, embed_tokens(t))
LLMK_CUSTOM_OP(NormLinear, 1, norm_linear(t, false))
LLMK_CUSTOM_OP(AddNormLinear, 2, norm_linear(t, true))
LLMK_CUSTOM_OP(PackedLinear, 1, packed_linear(t))
LLMK_CUSTOM_OP(GatedMlp, 2, gated_mlp(t))
LLMK_CUSTOM_OP(LmHead, 1, lm_head(t))
