#include "packed_product.h"

#include <cstring>

#include "../common/check.h"

namespace llmk {
namespace {

int32_t sum_of(const int8_t* values, int64_t count) {
  int32_t total = 0;
  for (int64_t k = 0; k < count; ++k) total += values[k];
  return total;
}

}  // namespace

int Blob::find(const char* op, const PrimitiveWeight& weight) {
  int error = 0;
  data_ = kept_blob(op, weight, &error);
  if (error != 0 || data_ != nullptr) return error;
  const int64_t bytes = primitive_blob_bytes(weight);
  if (bytes == 0) {
    return refuse_text(op,
                       "a weight of %lld columns, depth %lld and groups of %lld cannot be; groups are multiples of 8",
                       static_cast<long long>(weight.columns), static_cast<long long>(weight.depth),
                       static_cast<long long>(weight.group));
  }
  own_.resize(static_cast<size_t>(bytes) + 64);
  void* start = own_.data() + (64 - reinterpret_cast<uintptr_t>(own_.data()) % 64) % 64;
  data_ = start;
  return pack_primitive(op, weight, start);
}

LinearArgs linear_args(const void* blob, DType dtype, int64_t rows, void* out) {
  LinearArgs args{};
  args.weight = blob;
  args.dtype = dtype;
  args.rows = rows;
  args.x_stride = header_of(blob).depth;
  args.out_stride = header_of(blob).columns;
  args.out = out;
  return args;
}

QuantizedRows allocate_rows(int8_t* values, float* scales, int64_t rows, int64_t depth) {
  const int64_t stride = whole_lines(depth);
  const bool direct = stride == depth;
  char* memory = static_cast<char*>(
      thread_scratch(kScratchQuantized, whole_lines(rows * 4) + (direct ? 0 : rows * stride)));
  QuantizedRows result{};
  result.stride = stride;
  result.groups = 1;
  result.scales = scales;
  result.sums = reinterpret_cast<int32_t*>(memory);
  result.values = direct ? values : reinterpret_cast<int8_t*>(memory + whole_lines(rows * 4));
  return result;
}

QuantizedRows given_rows(const int8_t* x, const float* scales, int64_t rows, int64_t depth) {
  const QuantizedRows result = allocate_rows(const_cast<int8_t*>(x), const_cast<float*>(scales), rows, depth);
  const int64_t stride = result.stride;
  parallel_for_rows(rows, depth, [&](int64_t row) {
    result.sums[row] = sum_of(x + row * depth, depth);
    if (result.values == x) return;
    std::memcpy(result.values + row * stride, x + row * depth, static_cast<size_t>(depth));
    std::memset(result.values + row * stride + depth, 0, static_cast<size_t>(stride - depth));
  });
  return result;
}

}  // namespace llmk
