// Runs GroupedMatmulV4: the matrix products of a mixture of experts. The semantics are those of the CANN documentation
// of aclnnGroupedMatmulV4 for Atlas A2 (docs/ascend.md).
//
// x [rows, depth], ordered by group; weight [groups, depth, columns], one tensor; group_list int64 [groups]
//  ->   [rows, columns]: the rows of a group times the weight of the group
//
// Supported types:
//
//   x and weight of one type other than int8, without scales:
//       x @ weight
//   x and weight int8, scale [groups, columns], per_token_scale float32 [rows]:
//       (x @ weight) * scale * per_token_scale
//   x of a float type, weight int8 or int4, antiquant_scale and antiquant_offset of x's type:
//       x @ ((weight + antiquant_offset) * antiquant_scale)
//       Both are [groups, columns]. For int4, they may also be [groups, n, columns] for n equal parts of the depth.
//
// Products of floats, or of floats and integer weights, may have a bias [groups, columns]. The type of the bias is
// float32 for results of bfloat16, otherwise the type of the result. The bias is added in float32, before the sum is
// rounded once.
//
// The input split_item must be 3 (one output) and group_type 0 (rows). The input group_list has the ends of the groups
// if group_list_type is 0, and the sizes of the groups if it is 1.
//
// The kernel of ops/linear.h multiplies each group by the packed form of its weight, as in linear.cc. So the order of
// the additions depends only on the weight. A float weight that was not packed before (keep_primitive() in
// ops/primitive_weight.h) goes to ops/matmul_any.h, which transposes it in each call. But a float weight with a bias is
// packed in each call.
#include <cstring>

#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../ops/matmul_any.h"
#include "call.h"
#include "packed_product.h"

namespace llmk {
namespace {

enum Argument {
  kX, kWeight, kBias, kScale, kOffset, kAntiquantScale, kAntiquantOffset, kPerTokenScale, kGroupList, kActivationInput,
  kActivationScale, kActivationOffset, kSplitItem, kGroupType, kGroupListType, kActType, kOutputDtype, kOut, kArguments
};

// The weights of all groups. They have the same size and follow each other in memory.
struct GroupedWeight {
  PrimitiveWeight first;
  int64_t groups, value_bytes, scale_bytes;  // number of groups; bytes of the values and of the scales of a group

  PrimitiveWeight of(int64_t group) const {
    PrimitiveWeight weight = first;
    weight.values = static_cast<const char*>(first.values) + group * value_bytes;
    if (first.scales != nullptr) weight.scales = static_cast<const char*>(first.scales) + group * scale_bytes;
    if (first.offsets != nullptr) weight.offsets = static_cast<const char*>(first.offsets) + group * scale_bytes;
    return weight;
  }
};

bool is_integer(const Call& call, int argument) {
  return call.has_dtype(argument, "int8") || call.has_dtype(argument, "int4");
}

// Checks the bias, which may be missing.
int check_bias(const Call& call) {
  if (!call.is_tensor(kBias)) return 0;
  const char* wanted = call.has_dtype(kOut, "bfloat16") ? "float32" : call.dtypes[kOut];
  const int64_t groups = call.dim(kWeight, 0), columns = call.dim(kOut, -1);
  if (!call.has_dtype(kX, "int8") && call.has_dtype(kBias, wanted) && call.dtype(kOut) != DType::kUnsupported &&
      call.ndims[kBias] == 2 && call.dim(kBias, 0) == groups && call.dim(kBias, 1) == columns) {
    return 0;
  }
  return refuse_text(call.op, "a bias of %s and %lld elements; results of %s take %lld x %lld of %s, and int8 x none",
                     call.dtypes[kBias], static_cast<long long>(call.size(kBias)), call.dtypes[kOut],
                     static_cast<long long>(groups), static_cast<long long>(columns), wanted);
}

int check_call(const Call& call) {
  for (const int i : {kOffset, kActivationInput, kActivationScale, kActivationOffset}) {
    if (call.count == kArguments && call.is_tensor(i)) return refuse_text(call.op, "argument %d is not supported", i);
  }
  if (call.count != kArguments || call.ndims[kX] != 2 || call.ndims[kWeight] != 3 || !call.is_tensor(kGroupList) ||
      !call.has_dtype(kGroupList, "int64") || call.integer(kSplitItem) != 3 || call.integer(kGroupType) != 0 ||
      call.integer(kActType) != 0) {
    return refuse_text(call.op,
                       "takes one x [rows, depth], one weight [groups, depth, columns] and an int64 group_list, with "
                       "split_item 3, group_type 0, act_type 0");
  }
  return check_bias(call);
}

// Checks that the types of x, weight and scales are one of the combinations listed at the top of this file.
int check_form(const Call& call) {
  const bool whole = call.has_dtype(kX, "int8") && call.has_dtype(kWeight, "int8");
  const bool weight_only = call.dtype(kX) != DType::kUnsupported && is_integer(call, kWeight);
  const bool floats = std::strcmp(call.dtypes[kX], call.dtypes[kWeight]) == 0 && !whole;
  const bool quantised = call.is_tensor(kScale) && call.is_tensor(kPerTokenScale);
  const bool antiquantised = call.is_tensor(kAntiquantScale) && call.is_tensor(kAntiquantOffset);
  const bool any = call.is_tensor(kScale) || call.is_tensor(kPerTokenScale);
  const bool any_antiquant = call.is_tensor(kAntiquantScale) || call.is_tensor(kAntiquantOffset);
  if (whole && quantised && !any_antiquant && call.has_dtype(kPerTokenScale, "float32")) {
    const int error = check_float(call, kOut);
    return error != 0 ? error : check_float(call, kScale);
  }
  if (weight_only && antiquantised && !any) {
    int error = check_equal_dtype(call, kX, kAntiquantScale);
    if (error == 0) error = check_equal_dtype(call, kX, kAntiquantOffset);
    return error != 0 ? error : check_equal_dtype(call, kX, kOut);
  }
  if (floats && !any && !any_antiquant) return 0;
  return refuse_text(call.op,
                     "x of %s and a weight of %s: one type without scales; int8 with scale and a float32 "
                     "per_token_scale; or floats by int8 or int4 with antiquant_scale and antiquant_offset",
                     call.dtypes[kX], call.dtypes[kWeight]);
}

// Checks the shapes of the scales. Sets `group` to the number of inputs that share a scale, or to 0 if each column has
// a single scale.
int check_scales(const Call& call, int scales, int offsets, const GroupedWeight& all, int64_t* group) {
  const PrimitiveWeight& weight = all.first;
  const int64_t parts = call.ndims[scales] == 3 && weight.type == ValueType::kInt4 ? call.dim(scales, 1) : 1;
  const int64_t wanted = all.groups * parts * weight.columns;
  if (parts < 1 || weight.depth % parts != 0 || call.dim(scales, 0) != all.groups ||
      call.dim(scales, -1) != weight.columns || call.size(scales) != wanted ||
      (offsets != 0 && call.size(offsets) != wanted)) {
    return refuse_text(call.op,
                       "%lld scales in %d dimensions for %lld weights of depth %lld and %lld columns; they must be "
                       "[weights, columns], or with int4 [weights, parts, columns] for equal parts of the depth, and "
                       "offsets as many",
                       static_cast<long long>(call.size(scales)), call.ndims[scales],
                       static_cast<long long>(all.groups), static_cast<long long>(weight.depth),
                       static_cast<long long>(weight.columns));
  }
  *group = call.ndims[scales] == 3 ? weight.depth / parts : 0;
  return 0;
}

int describe(const Call& call, GroupedWeight* all) {
  const bool int4 = call.has_dtype(kWeight, "int4"), weight_only = call.is_tensor(kAntiquantScale);
  PrimitiveWeight& weight = all->first;
  all->groups = call.dim(kWeight, 0);
  weight.values = call.data[kWeight];
  weight.depth = call.dim(kWeight, 1);
  weight.columns = call.dim(kWeight, 2) * (int4 ? 2 : 1);
  if (call.size(kGroupList) != all->groups || call.dim(kX, 1) != weight.depth) {
    return refuse_text(call.op, "%lld groups for %lld weights, depths %lld and %lld",
                       static_cast<long long>(call.size(kGroupList)), static_cast<long long>(all->groups),
                       static_cast<long long>(call.dim(kX, 1)), static_cast<long long>(weight.depth));
  }
  if (!is_integer(call, kWeight)) {
    weight.type = static_cast<ValueType>(call.dtype(kWeight));
    all->value_bytes = weight.depth * weight.columns * dtype_bytes(call.dtypes[kWeight]);
    return 0;
  }
  const int scales = weight_only ? kAntiquantScale : kScale, offsets = weight_only ? kAntiquantOffset : 0;
  weight.type = int4 ? ValueType::kInt4 : ValueType::kInt8;
  weight.scales = call.data[scales];
  weight.offsets = weight_only ? call.data[offsets] : nullptr;
  weight.scale_type = static_cast<int32_t>(call.dtype(scales));
  weight.float_products = weight_only ? 1 : 0;
  all->value_bytes = weight.depth * weight.columns / (int4 ? 2 : 1);
  all->scale_bytes = call.size(scales) / larger(all->groups, 1) * size_of(call.dtype(scales));
  const int error = check_scales(call, scales, offsets, *all, &weight.group);
  if (error != 0 || weight_only || call.size(kPerTokenScale) == call.dim(kX, 0)) return error;
  return refuse_text(call.op, "%lld scales of tokens for %lld rows", static_cast<long long>(call.size(kPerTokenScale)),
                     static_cast<long long>(call.dim(kX, 0)));
}

// The memory that receives the products of some rows: the output, or floats to which a bias is added.
struct Target {
  void* out;
  bool floats;
};

// Adds the bias of a group to `rows` rows of sums, and writes the rounded results.
void add_bias(const Call& call, int64_t group, const float* sums, int64_t rows, int64_t first_row) {
  const int64_t columns = call.dim(kOut, -1);
  with_element_type(call.dtype(kBias), [&](auto bias_type) {
    using B = decltype(bias_type);
    const B* bias = call.as<B>(kBias) + group * columns;
    with_element_type(call.dtype(kOut), [&](auto type) {
      using T = decltype(type);
      T* out = call.as<T>(kOut) + first_row * columns;
      parallel_for_rows(rows, columns, [&](int64_t row) {
        for (int64_t c = row * columns; c < (row + 1) * columns; ++c) {
          from_float(sums[c] + to_float(bias[c - row * columns]), out + c);
        }
      });
    });
  });
}

// Multiplies rows [begin, end) by the weight of one group without packing it, for any type.
int plain_product(const Call& call, const PrimitiveWeight& weight, void* out, int64_t begin, int64_t end) {
  AnyMatMulArgs args{};
  args.a = call.as<char>(kX) + begin * weight.depth * dtype_bytes(call.dtypes[kX]);
  args.b = weight.values;
  args.out = out;
  args.rows = end - begin;
  args.columns = weight.columns;
  args.depth = weight.depth;
  args.dtype = call.dtypes[kX];
  args.out_dtype = call.dtypes[kOut];
  return any_matmul(call.op, args);
}

// Multiplies rows [begin, end) by a packed weight. If x is int8, `quantized` must have all rows of x.
void packed_product(const Call& call, const void* blob, const QuantizedRows* quantized, Target target, int64_t begin,
                    int64_t end) {
  const DType dtype = call.dtype(kOut);
  LinearArgs linear = linear_args(blob, dtype, end - begin, target.out);
  linear.epilogue = target.floats ? Epilogue::kStoreFloat : Epilogue::kStore;
  QuantizedRows rows{};
  if (quantized == nullptr) {
    linear.x = call.as<char>(kX) + begin * call.dim(kX, 1) * size_of(dtype);
  } else {
    rows = *quantized;
    rows.values += begin * rows.stride;
    rows.scales += begin;
    rows.sums += begin;
    linear.quantized = &rows;
  }
  kernels().linear(linear);
}

// Multiplies rows [begin, end) by the weight of group number `group`, and adds its bias if there is one. With a bias,
// computes kBiasedRows rows at a time: first float sums in scratch memory, then the rounded results.
int whole_product(const Call& call, const GroupedWeight& all, int64_t group, const QuantizedRows* quantized,
                  int64_t begin, int64_t end) {
  constexpr int64_t kBiasedRows = 256;
  const PrimitiveWeight weight = all.of(group);
  const bool has_bias = call.is_tensor(kBias);
  void* out = call.as<char>(kOut) + begin * weight.columns * dtype_bytes(call.dtypes[kOut]);
  int error = 0;
  if (weight.scales == nullptr && !has_bias) {
    const bool known = call.dtype(kX) != DType::kUnsupported && kept_blob(call.op, weight, &error) != nullptr;
    if (error != 0) return error;
    if (!known) return plain_product(call, weight, out, begin, end);
  }
  Blob blob;
  error = blob.find(call.op, weight);
  if (error != 0) return error;
  if (!has_bias) {
    packed_product(call, blob.data(), quantized, {out, false}, begin, end);
    return 0;
  }
  for (int64_t row = begin; row < end; row += kBiasedRows) {
    const int64_t rows = smaller(kBiasedRows, end - row);
    float* sums = static_cast<float*>(thread_scratch(kScratchInner, rows * weight.columns * 4));
    packed_product(call, blob.data(), quantized, {sums, true}, row, row + rows);
    add_bias(call, group, sums, rows, row);
  }
  return 0;
}

}  // namespace

// Runs GroupedMatmulV4. Output rows after the last group become zero.
int plugin_grouped_matmul(const Call& call) {
  GroupedWeight all{};
  int error = check_call(call);
  if (error == 0) error = check_form(call);
  if (error == 0) error = describe(call, &all);
  if (error != 0) return error;
  const int64_t rows = call.dim(kX, 0);
  QuantizedRows quantized{};
  const bool given = call.has_dtype(kX, "int8") && call.is_tensor(kScale) && rows > 0;
  if (given) quantized = given_rows(call.as<int8_t>(kX), call.as<float>(kPerTokenScale), rows, all.first.depth);
  int64_t begin = 0;
  for (int64_t group = 0; group < all.groups; ++group) {
    const int64_t told = call.as<int64_t>(kGroupList)[group],
                  end = call.integer(kGroupListType) == 1 ? begin + told : told;
    if (end < begin || end > rows) return refuse_index(call.op, "group_list", group, told, rows + 1);
    if (end == begin) continue;
    error = whole_product(call, all, group, given ? &quantized : nullptr, begin, end);
    if (error != 0) return error;
    begin = end;
  }
  const int64_t row_bytes = all.first.columns * dtype_bytes(call.dtypes[kOut]);
  std::memset(call.as<char>(kOut) + begin * row_bytes, 0, static_cast<size_t>((rows - begin) * row_bytes));
  return 0;
}

}  // namespace llmk
