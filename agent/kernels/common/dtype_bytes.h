// The size of an element of a MindSpore type, for kernels that only copy memory.
#pragma once
#include <cstdint>
#include <cstring>

namespace llmk {

// Returns the size in bytes of one element of the type `name`, or 0 for an unknown name.
static inline int64_t dtype_bytes(const char* name) {
  struct Size {
    const char* name;
    int64_t bytes;
  };
  static const Size kSizes[] = {{"bool", 1},    {"int8", 1},     {"uint8", 1},    {"float16", 2},   {"bfloat16", 2},
                                {"int16", 2},   {"uint16", 2},   {"float32", 4},  {"int32", 4},     {"uint32", 4},
                                {"float64", 8}, {"int64", 8},    {"uint64", 8},   {"complex64", 8}, {"complex128", 16}};
  for (const Size& size : kSizes) {
    if (name != nullptr && std::strcmp(size.name, name) == 0) return size.bytes;
  }
  return 0;
}

}  // namespace llmk
