// ScratchVector: a std::vector for the buffers that a thread keeps between calls of a kernel. scratch_bytes()
// (thread_pool.h) counts its memory.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "thread_pool.h"

namespace llmk {

template <class T>
struct ScratchAllocator {
  using value_type = T;

  ScratchAllocator() = default;
  template <class U>
  ScratchAllocator(const ScratchAllocator<U>&) {}

  T* allocate(size_t count) {
    T* start = std::allocator<T>().allocate(count);
    count_scratch(static_cast<int64_t>(count * sizeof(T)));
    return start;
  }
  void deallocate(T* start, size_t count) {
    count_scratch(-static_cast<int64_t>(count * sizeof(T)));
    std::allocator<T>().deallocate(start, count);
  }
  bool operator==(const ScratchAllocator&) const { return true; }
  bool operator!=(const ScratchAllocator&) const { return false; }
};

template <class T>
using ScratchVector = std::vector<T, ScratchAllocator<T>>;

}  // namespace llmk
