// The primitives ArgMaxWithValue and Exp. The sampling graphs (agent/device_sampling) use them with TopkExt
// (experts.cc) and the primitives of arithmetic.cc.
#include <algorithm>
#include <type_traits>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "call.h"

namespace llmk {
namespace {

constexpr int64_t kElementsPerTask = 1 << 14;

// Maps the bits of a 16-bit float to an integer that compares in the same order. NaN becomes the largest integer, and
// both zeros become equal. `infinity` is the bit pattern of infinity. Selects by masks: with conditional expressions,
// GCC 12 does not vectorise the loop of largest_of().
int16_t order_of(uint16_t bits, int16_t infinity) {
  const int16_t magnitude = static_cast<int16_t>(bits & 0x7FFF);
  const int16_t sign = static_cast<int16_t>(static_cast<int16_t>(bits) >> 15);  // -1 if negative, otherwise 0
  const int16_t order = static_cast<int16_t>((magnitude ^ sign) - sign);
  const int16_t nan = static_cast<int16_t>(-(magnitude > infinity));  // -1 for a NaN, otherwise 0
  return static_cast<int16_t>((order & ~nan) | (INT16_MAX & nan));
}

// Returns the index of the largest element of a row, the first index on a tie. Works in chunks. The loop over a chunk
// has no exit before its end, so that the compiler vectorises it. Afterwards only the first chunk with the largest
// element is searched.
template <class T>
int64_t largest_of(const T* row, int64_t size) {
  constexpr int16_t kInfinity = std::is_same_v<T, half_t> ? 0x7C00u : 0x7F80u;
  constexpr int64_t kChunk = 512;
  int16_t best = INT16_MIN;
  int64_t chunk = 0;
  for (int64_t start = 0; start < size; start += kChunk) {
    const int64_t end = smaller(start + kChunk, size);
    int16_t largest = INT16_MIN;
    for (int64_t i = start; i < end; ++i) {
      const int16_t order = order_of(row[i].bits, kInfinity);
      largest = std::max(order, largest);
    }
    if (largest > best) {
      best = largest;
      chunk = start;
    }
  }
  while (order_of(row[chunk].bits, kInfinity) != best) ++chunk;
  return chunk;
}

int64_t largest_of(const float* row, int64_t size) {
  bool has_nan = false;
  for (int64_t i = 0; i < size; ++i) has_nan |= row[i] != row[i];
  if (has_nan) return std::find_if(row, row + size, [](float value) { return value != value; }) - row;
  return larger(kernels().logits.first_equal(row, size, kernels().logits.largest(row, size)), 0);
}

template <class T>
void arg_max(const Call& call, int64_t rows, int64_t size, int index, int value) {
  const int64_t task_rows = larger(1, kElementsPerTask / size);
  parallel_for(ceil_div(rows, task_rows), [&](int64_t task) {
    for (int64_t row = task * task_rows; row < smaller(rows, (task + 1) * task_rows); ++row) {
      const T* values = call.as<T>(0) + row * size;
      const int64_t best = largest_of(values, size);
      if (call.has_dtype(index, "int64")) {
        call.as<int64_t>(index)[row] = best;
      } else {
        call.as<int32_t>(index)[row] = static_cast<int32_t>(best);
      }
      call.as<T>(value)[row] = values[best];
    }
  });
}

}  // namespace

// Runs ArgMaxWithValue(input [..., size], axis, keep_dims) -> index and value of the largest element along the last
// axis. On a tie, this is the first of the equal elements, as MindSpore's documentation promises. A NaN is larger than
// every number, as for the operators of an Ascend (aclnnMaxDim). So a row with a NaN has the value NaN.
int plugin_arg_max_with_value(const Call& call) {
  enum { kInput, kAxis, kKeepDims, kIndex, kValue, kCount };
  const int dims = call.ndims[kInput];
  const int64_t axis = call.integer(kAxis), size = dims < 1 ? 0 : call.dim(kInput, -1);
  if (call.count != kCount || size < 1 || (axis != -1 && axis != dims - 1) ||
      call.dtype(kInput) == DType::kUnsupported || std::strcmp(call.dtypes[kInput], call.dtypes[kValue]) != 0 ||
      !(call.has_dtype(kIndex, "int64") || call.has_dtype(kIndex, "int32"))) {
    return refuse_text(call.op, "takes floats and their last axis, not empty; type %s, axis %lld of %d, %lld elements",
                       call.dtypes[kInput], static_cast<long long>(axis), dims, static_cast<long long>(size));
  }
  const int64_t rows = call.size(kInput) / size;
  if (call.dtype(kInput) == DType::kFloat32) arg_max<float>(call, rows, size, kIndex, kValue);
  if (call.dtype(kInput) == DType::kFloat16) arg_max<half_t>(call, rows, size, kIndex, kValue);
  if (call.dtype(kInput) == DType::kBFloat16) arg_max<bfloat_t>(call, rows, size, kIndex, kValue);
  return 0;
}

// Runs Exp(x) in float32, with the exponential function of the sampler (ops/logits.h), and rounds once.
int plugin_exp(const Call& call) {
  const int error = check_equal_dtype(call, 0, call.count - 1);
  if (error != 0) return error;
  const int64_t count = call.size(0);
  if (count == 0) return 0;
  const int out = call.count - 1;
  const DType dtype = call.dtype(0);
  parallel_for(ceil_div(count, kElementsPerTask), [&](int64_t task) {
    const int64_t begin = task * kElementsPerTask, size = smaller(count - begin, kElementsPerTask);
    if (dtype == DType::kFloat32) {
      kernels().logits.weights(call.as<float>(0) + begin, size, 0.0f, call.as<float>(out) + begin);
      return;
    }
    constexpr int64_t kPiece = 256;
    float piece[kPiece];
    for (int64_t start = begin; start < begin + size; start += kPiece) {
      const int64_t n = smaller(begin + size - start, kPiece);
      for (int64_t i = 0; i < n; ++i) {
        piece[i] = dtype == DType::kFloat16 ? to_float(call.as<half_t>(0)[start + i])
                                            : to_float(call.as<bfloat_t>(0)[start + i]);
      }
      kernels().logits.weights(piece, n, 0.0f, piece);
      for (int64_t i = 0; i < n; ++i) {
        if (dtype == DType::kFloat16) {
          from_float(piece[i], call.as<half_t>(out) + start + i);
        } else {
          from_float(piece[i], call.as<bfloat_t>(out) + start + i);
        }
      }
    }
  });
  return 0;
}

}  // namespace llmk
