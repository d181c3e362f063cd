// Checks of the arguments that several custom operators share.
#include <cstdint>

#include "common/check.h"
#include "custom_ops.h"

namespace llmk {

int64_t rows_of(const Tensors& t, int counts, int which, int64_t limit) {
  if (!t.has_dtype(counts, "int32") || t.size(counts) < 4) {
    refuse_text(t.op, "counts must be int32 [4]");
    return -1;
  }
  const int64_t rows = t.as<int32_t>(counts)[which];
  if (rows >= 0 && rows <= limit) return rows;
  refuse_index(t.op, "counts", which, rows, limit + 1);
  return -1;
}

const int32_t* row_adapters(const Tensors& t, int counts) {
  if (t.size(counts) <= kRowAdapters || t.as<int32_t>(counts)[kNumAdapted] == 0) return nullptr;
  return t.as<int32_t>(counts) + kRowAdapters;
}

const PackedWeightHeader* packed_weight(const Tensors& t, int i) {
  const int64_t bytes = t.has_dtype(i, "uint8") ? t.size(i) : 0;
  return check_packed_weight(t.op, t.data[i], bytes) == 0 ? &header_of(t.data[i]) : nullptr;
}

int check_float_type(const Tensors& t, int i) {
  if (t.dtype(i) != DType::kUnsupported) return 0;
  return refuse_text(t.op, "argument %d is %s; it must be float32, float16 or bfloat16", i, t.dtypes[i]);
}

int check_matrix(const Tensors& t, int i, int64_t rows, int64_t width, DType dtype) {
  if (t.ndims[i] == 2 && t.dim(i, 0) >= rows && t.dim(i, 1) == width && t.dtype(i) == dtype) return 0;
  return refuse_text(t.op, "argument %d is %s with %d dimensions, the last of %lld; it must be a matrix of at least "
                     "%lld rows of %lld, of the type of argument 0", i, t.dtypes[i], t.ndims[i],
                     static_cast<long long>(t.ndims[i] > 0 ? t.dim(i, -1) : 0), static_cast<long long>(rows),
                     static_cast<long long>(width));
}

int check_gamma(const Tensors& t, int gamma, int epsilon, int64_t width, DType dtype) {
  if ((t.dtype(gamma) != dtype && !t.has_dtype(gamma, "float32")) || t.size(gamma) != width) {
    return refuse_text(t.op, "gamma has %lld elements of %s; it must have %lld of the activations' type or of float32",
                       static_cast<long long>(t.size(gamma)), t.dtypes[gamma], static_cast<long long>(width));
  }
  if (!t.has_dtype(epsilon, "float32") || t.size(epsilon) != 1) return refuse_text(t.op, "epsilon must be one float32");
  return 0;
}

int check_weight(const Tensors& t, int i, int64_t columns, int64_t depth, bool gated) {
  const PackedWeightHeader* header = packed_weight(t, i);
  if (header == nullptr) return kBadArgument;
  if (header->columns == columns && header->depth == depth && (header->gated != 0) == gated) return 0;
  return refuse_text(t.op, "argument %d is a%s weight of %lld columns and depth %lld; it must be%s of %lld and %lld",
                     i, header->gated != 0 ? " gated" : "", static_cast<long long>(header->columns),
                     static_cast<long long>(header->depth), gated ? " gated," : "", static_cast<long long>(columns),
                     static_cast<long long>(depth));
}

}  // namespace llmk
