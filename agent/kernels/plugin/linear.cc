// Matrix products with weights: MatMul, DynamicQuantExt or QuantV2 with QuantBatchMatmul, and WeightQuantBatchMatmul.
// The semantics are those of the CANN documentation: aclnnDynamicQuant, aclnnAscendQuant, aclnnQuantMatmulV4,
// aclnnWeightQuantBatchMatmulV2 (docs/ascend.md).
//
// The kernel of ops/linear.h multiplies by the packed form of the weight. So the order of the additions depends only on
// the weight, and a row's result does not depend on other rows. A constant weight is packed once, by keep_primitive()
// (ops/primitive_weight.h). Any other weight is packed in each call.
#include <algorithm>

#include "../common/kernel_table.h"
#include "../ops/matmul_any.h"
#include "../ops/primitive_weight.h"
#include "call.h"
#include "packed_product.h"

namespace llmk {
namespace {

// Fills `weight` from two arguments: `values`, of type int8 or int4, and their `scales`. PrimitiveWeight explains
// `transposed`.
int quantised_weight(const Call& call, int values, int scales, bool transposed, PrimitiveWeight* weight) {
  const bool int4 = call.has_dtype(values, "int4");
  if (call.ndims[values] != 2 || !(int4 || call.has_dtype(values, "int8")) || !call.is_tensor(scales) ||
      call.dtype(scales) == DType::kUnsupported) {
    return refuse_text(call.op, "takes an int8 or int4 weight of 2 dimensions, with scales of floats; it is %s of %d",
                       call.dtypes[values], call.ndims[values]);
  }
  const int64_t outer = call.dim(values, 0), inner = call.dim(values, 1) * (int4 ? 2 : 1);
  weight->values = call.data[values];
  weight->scales = call.data[scales];
  weight->type = int4 ? ValueType::kInt4 : ValueType::kInt8;
  weight->scale_type = static_cast<int32_t>(call.dtype(scales));
  weight->transposed = transposed ? 1 : 0;
  weight->columns = transposed ? outer : inner;
  weight->depth = transposed ? inner : outer;
  return 0;
}

int check_depth(const Call& call, int x, const PrimitiveWeight& weight) {
  if (call.ndims[x] == 2 && call.dim(x, 1) == weight.depth) return 0;
  return refuse_text(call.op, "x has %d dimensions, the last of %lld; it must be [rows, %lld] as the weight is",
                     call.ndims[x], static_cast<long long>(call.dim(x, -1)), static_cast<long long>(weight.depth));
}

// Quantises the rows of argument `x` into `rows_of_y`. If the values of `rows_of_y` are in scratch memory, also copies
// them to `y`. `blob` is a packed weight or only its header. Its groups and static inputs determine how the rows are
// quantised.
void quantise_rows(const Call& call, int x, int8_t* y, const QuantizedRows& rows_of_y, int64_t rows, const void* blob) {
  const int64_t depth = header_of(blob).depth, row_bytes = depth * size_of(call.dtype(x));
  parallel_for_rows(rows, depth, [&](int64_t row) {
    kernels().quantize_row(call.dtype(x), call.as<char>(x) + row * row_bytes, rows_of_y, row, blob);
    if (rows_of_y.values != y) {
      std::memcpy(y + row * depth, rows_of_y.values + row * rows_of_y.stride, static_cast<size_t>(depth));
    }
  });
}

// Runs the product in this form. Its output is that of the primitive or, with form.gated, that of Swiglu.
int multiply_in_form(const Call& call, LinearArgs linear, const ProductForm& form) {
  if (form.gated != nullptr) {
    linear.out = form.gated;
    linear.out_stride /= 2;
    linear.epilogue = Epilogue::kGatedRounded;
  }
  const int error = check_linear(call.op, linear);
  if (error == 0) kernels().linear(linear);
  return error;
}

// Runs a MatMul whose weight has no packed form. Refuses form.gated, because only a packed weight can be gated.
int multiply_unpacked(const Call& call, const AnyMatMulArgs& args, const ProductForm& form) {
  if (form.gated == nullptr) return any_matmul(call.op, args);
  return refuse_text(call.op, "the weight at %p is not packed; Swiglu needs a packed weight", args.b);
}

}  // namespace

int plugin_matmul(const Call& call) { return plugin_matmul(call, {}); }
int plugin_quant_matmul(const Call& call) { return plugin_quant_matmul(call, {}); }
int plugin_weight_quant_matmul(const Call& call) { return plugin_weight_quant_matmul(call, {}); }

// Runs MatMul(a, b, transpose_a, transpose_b) for two matrices. Adds in float32, in an order that depends only on the
// depth, and rounds once.
int plugin_matmul(const Call& call, const ProductForm& form) {
  enum { kA, kB, kTransposeA, kTransposeB };
  if (call.ndims[kA] != 2 || call.ndims[kB] != 2) {
    return refuse_text(call.op, "inputs of %d and %d dimensions; both must have 2", call.ndims[kA], call.ndims[kB]);
  }
  if (std::strcmp(call.dtypes[kA], call.dtypes[kB]) != 0) {
    return refuse_text(call.op, "inputs of %s and %s; they must be the same", call.dtypes[kA], call.dtypes[kB]);
  }
  AnyMatMulArgs args{};
  args.a = call.data[kA];
  args.b = call.data[kB];
  args.out = call.data[call.count - 1];
  args.transpose_a = call.boolean(kTransposeA);
  args.transpose_b = call.boolean(kTransposeB);
  args.rows = call.dim(kA, args.transpose_a ? 1 : 0);
  args.depth = call.dim(kA, args.transpose_a ? 0 : 1);
  args.columns = call.dim(kB, args.transpose_b ? 0 : 1);
  args.dtype = call.dtypes[kA];
  args.out_dtype = call.dtypes[call.count - 1];
  if (call.dim(kB, args.transpose_b ? 1 : 0) != args.depth) {
    return refuse_text(call.op, "inner dimensions %lld and %lld differ", static_cast<long long>(args.depth),
                       static_cast<long long>(call.dim(kB, args.transpose_b ? 1 : 0)));
  }
  const DType dtype = call.dtype(kA);
  if (dtype == DType::kUnsupported || args.transpose_a || !args.transpose_b) return multiply_unpacked(call, args, form);
  PrimitiveWeight weight{};
  weight.values = args.b;
  weight.type = static_cast<ValueType>(dtype);
  weight.transposed = 1;
  weight.columns = args.columns;
  weight.depth = args.depth;
  int error = 0;
  const void* blob = kept_blob(call.op, weight, &error);
  if (error != 0) return error;
  if (blob == nullptr) return multiply_unpacked(call, args, form);
  LinearArgs linear = linear_args(blob, dtype, args.rows, args.out);
  linear.x = args.a;
  return multiply_in_form(call, linear, form);
}

// DynamicQuantExt(x [rows, depth], smooth_scales) -> y int8 of x's shape, scale float32 [rows].
//
// The scale of a row is max|x| / 127. y = round(x / scale) to nearest, ties to even, computed as x * (127 / max|x|). A
// row of zeros has scale 0.
int plugin_dynamic_quant(const Call& call) {
  enum { kX, kSmoothScales, kY, kScale };
  const int error = check_float(call, kX);
  if (error != 0) return error;
  if (call.is_tensor(kSmoothScales)) return refuse_text(call.op, "takes no smooth_scales");
  const int64_t depth = call.dim(kX, -1), rows = depth == 0 ? 0 : call.size(kX) / depth;
  if (rows == 0) return 0;
  PackedWeightHeader header{};
  header.format = WeightFormat::kInt8;
  header.depth = depth;
  int8_t* y = call.as<int8_t>(kY);
  quantise_rows(call, kX, y, allocate_rows(y, call.as<float>(kScale), rows, depth), rows, &header);
  return 0;
}

// QuantV2(x [rows, depth], scale [depth] or [1], offset, sqrt_mode, rounding_mode, dst_type) -> y int8 of x's shape.
//
// y = round(x * scale + offset) within -128 to 127, to nearest, ties to even. The product and the sum are rounded to
// float32. A row with a NaN or an infinity becomes zeros.
int plugin_static_quant(const Call& call) {
  enum { kX, kScale, kOffset, kSqrtMode, kRoundingMode, kType, kY };
  constexpr int64_t kRound = 0;
  int error = check_equal_dtype(call, kX, kScale);
  if (error == 0) error = check_equal_dtype(call, kScale, kOffset);
  if (error != 0) return error;
  const int64_t depth = call.dim(kX, -1), rows = depth == 0 ? 0 : call.size(kX) / depth, given = call.size(kScale);
  if (call.boolean(kSqrtMode) || call.integer(kRoundingMode) != kRound || !call.has_dtype(kY, "int8") ||
      (given != depth && given != 1) || call.size(kOffset) != given) {
    return refuse_text(call.op,
                       "%lld scales and %lld offsets; takes %lld or 1 of each, no sqrt_mode, rounding_mode ROUND, int8",
                       static_cast<long long>(given), static_cast<long long>(call.size(kOffset)),
                       static_cast<long long>(depth));
  }
  if (rows == 0) return 0;
  // Makes a blob without columns, because quantize_row() reads `scale` and `offset` from the static inputs of a blob.
  constexpr int64_t kHeaderFloats = sizeof(PackedWeightHeader) / sizeof(float);
  const int64_t stride = static_stride(depth);
  float* blob = static_cast<float*>(thread_scratch(kScratchStatic, (kHeaderFloats + 2 * stride + rows) * 4));
  PackedWeightHeader header{};
  header.format = WeightFormat::kInt8;
  header.depth = depth;
  header.static_inputs = 1;
  std::memcpy(blob, &header, sizeof(header));
  float* inputs = blob + kHeaderFloats;
  std::fill(inputs, inputs + 2 * stride, 0.0F);
  for (int64_t k = 0; k < depth; ++k) {
    inputs[k] = load_element(call.dtype(kScale), call.data[kScale], given == 1 ? 0 : k);
    inputs[stride + k] = load_element(call.dtype(kOffset), call.data[kOffset], given == 1 ? 0 : k);
  }
  int8_t* y = call.as<int8_t>(kY);
  quantise_rows(call, kX, y, allocate_rows(y, inputs + 2 * stride, rows, depth), rows, blob);
  return 0;
}

// QuantBatchMatmul(x1 int8 [rows, depth], x2 int8, scale [columns], offset, bias, pertoken_scale, transpose_x1,
// transpose_x2, dtype) -> a matrix [rows, columns] of type dtype.
//
// After DynamicQuantExt, the result is (x1 @ x2) * scale * pertoken_scale, with pertoken_scale [rows]. After QuantV2,
// it is (x1 @ x2 + bias) * scale, with an int32 bias [columns]. The sums of integers are exact. They are multiplied by
// the scales in float32 and rounded once.
int plugin_quant_matmul(const Call& call, const ProductForm& form) {
  enum { kX1, kX2, kScale, kOffset, kBias, kPerToken, kTransposeX1, kTransposeX2, kDtype, kOut };
  const bool is_static = call.is_tensor(kBias);
  if (!call.has_dtype(kX1, "int8") || !call.has_dtype(kX2, "int8") || call.is_tensor(kOffset) ||
      call.boolean(kTransposeX1) || is_static == call.is_tensor(kPerToken) ||
      !(is_static ? call.has_dtype(kBias, "int32") : call.has_dtype(kPerToken, "float32"))) {
    return refuse_text(call.op,
                       "takes int8 x1 [rows, depth] and x2, no offset, and either a float32 scale a row or an int32 "
                       "bias; x1 is %s, x2 %s",
                       call.dtypes[kX1], call.dtypes[kX2]);
  }
  PrimitiveWeight weight{};
  int error = quantised_weight(call, kX2, kScale, call.boolean(kTransposeX2), &weight);
  if (error == 0) error = check_depth(call, kX1, weight);
  if (error == 0) error = check_float(call, kOut);
  if (error != 0) return error;
  const int64_t rows = call.dim(kX1, 0);
  const int other = is_static ? kBias : kPerToken;
  if (call.size(kScale) != weight.columns || call.size(other) != (is_static ? weight.columns : rows)) {
    return refuse_text(call.op, "%lld scales and %lld %s; there are %lld columns and %lld rows",
                       static_cast<long long>(call.size(kScale)), static_cast<long long>(call.size(other)),
                       is_static ? "biases" : "scales of rows", static_cast<long long>(weight.columns),
                       static_cast<long long>(rows));
  }
  if (is_static) weight.sum_offsets = call.as<int32_t>(kBias);
  Blob blob;
  error = blob.find(call.op, weight);
  if (error != 0 || rows == 0) return error;
  float* scales = is_static ? static_cast<float*>(thread_scratch(kScratchStatic, rows * 4)) : call.as<float>(kPerToken);
  if (is_static) std::fill(scales, scales + rows, 1.0F);
  QuantizedRows given{};
  if (form.quantized == nullptr) given = given_rows(call.as<int8_t>(kX1), scales, rows, weight.depth);
  LinearArgs linear = linear_args(blob.data(), call.dtype(kOut), rows, call.data[kOut]);
  linear.quantized = form.quantized == nullptr ? &given : form.quantized;
  return multiply_in_form(call, linear, form);
}

// WeightQuantBatchMatmul: a matrix product of floats with an integer weight. It computes
// x @ ((weight + antiquant_offset) * antiquant_scale), in the type of x.
//
// Inputs: x [rows, depth], weight (int8 or int4), antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias,
//   transpose_x, transpose_weight, antiquant_group_size
//
// A quantisation group is antiquant_group_size consecutive elements along the depth, with one scale and one offset. The
// kernel adds the products of a group and multiplies the sum by the scale, in float32. It rounds the result once, at
// the end. Offsets must be whole numbers.
int plugin_weight_quant_matmul(const Call& call, const ProductForm& form) {
  enum { kX, kWeight, kScale, kOffset, kQuantScale, kQuantOffset, kBias, kTransposeX, kTransposeWeight, kGroup, kOut };
  int error = check_equal_dtype(call, kX, kOut);
  if (error != 0) return error;
  if (call.is_tensor(kQuantScale) || call.is_tensor(kQuantOffset) || call.is_tensor(kBias) ||
      call.boolean(kTransposeX)) {
    return refuse_text(call.op, "takes x [rows, depth], no quant_scale, no quant_offset and no bias");
  }
  PrimitiveWeight weight{};
  error = quantised_weight(call, kWeight, kScale, call.boolean(kTransposeWeight), &weight);
  if (error == 0) error = check_depth(call, kX, weight);
  if (error == 0) error = check_equal_dtype(call, kX, kScale);
  if (error == 0 && call.is_tensor(kOffset)) error = check_equal_dtype(call, kScale, kOffset);
  if (error != 0) return error;
  weight.float_products = 1;
  weight.group = call.integer(kGroup);
  weight.offsets = call.is_tensor(kOffset) ? call.data[kOffset] : nullptr;
  const int64_t groups = weight.group <= 0 ? 1 : ceil_div(weight.depth, weight.group);
  if (weight.group < 0 || call.size(kScale) != groups * weight.columns ||
      (weight.offsets != nullptr && call.size(kOffset) != call.size(kScale)) ||
      (groups > 1 && call.dim(kScale, weight.transposed != 0 ? 0 : 1) != weight.columns)) {
    return refuse_text(call.op,
                       "%lld scales for %lld columns of depth %lld in groups of %lld; there must be %lld, as many "
                       "offsets, and the columns along the weight's own axis",
                       static_cast<long long>(call.size(kScale)), static_cast<long long>(weight.columns),
                       static_cast<long long>(weight.depth), static_cast<long long>(weight.group),
                       static_cast<long long>(groups * weight.columns));
  }
  Blob blob;
  error = blob.find(call.op, weight);
  if (error != 0 || call.dim(kX, 0) == 0) return error;
  LinearArgs linear = linear_args(blob.data(), call.dtype(kX), call.dim(kX, 0), call.data[kOut]);
  linear.x = call.data[kX];
  return multiply_in_form(call, linear, form);
}

}  // namespace llmk
