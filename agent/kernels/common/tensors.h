// The arguments that MindSpore passes to an operator of this library: addresses, shapes and type names of tensors.
#pragma once
#include <cstdint>
#include <cstring>

#include "types.h"

namespace llmk {

static inline DType parse_dtype(const char* name) {
  if (name == nullptr) return DType::kUnsupported;
  if (std::strcmp(name, "float32") == 0) return DType::kFloat32;
  if (std::strcmp(name, "float16") == 0) return DType::kFloat16;
  if (std::strcmp(name, "bfloat16") == 0) return DType::kBFloat16;
  return DType::kUnsupported;
}

struct Tensors {
  const char* op;
  int count;
  void** data;
  int* ndims;
  int64_t** shapes;
  const char** dtypes;

  DType dtype(int i) const { return parse_dtype(dtypes[i]); }
  bool has_dtype(int i, const char* name) const { return dtypes[i] != nullptr && std::strcmp(dtypes[i], name) == 0; }
  int64_t dim(int i, int axis) const { return shapes[i][axis < 0 ? ndims[i] + axis : axis]; }

  // Returns the product of the sizes of axes `first` to `last` - 1 of tensor i. A negative `last` counts from the end.
  // By default, returns the number of elements of the tensor.
  int64_t size(int i, int first = 0, int last = 1 << 20) const {
    const int end = last < 0 ? ndims[i] + last : last < ndims[i] ? last : ndims[i];
    int64_t total = 1;
    for (int axis = first; axis < end; ++axis) total *= shapes[i][axis];
    return total;
  }

  template <class T>
  T* as(int i) const {
    return static_cast<T*>(data[i]);
  }
};

}  // namespace llmk
