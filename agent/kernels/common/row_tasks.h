// The size of the tasks of loops over rows.
#pragma once
#include "thread_pool.h"
#include "types.h"

namespace llmk {

// Returns the number of rows that a task of a parallel loop gets, for `rows` rows of `width` elements. Each thread gets
// two tasks, so that no thread waits long for the others. But a task has at least 4096 elements, because it takes time
// to start a task. It has at most 32768 elements.
static inline int64_t rows_per_task(int64_t rows, int64_t width) {
  constexpr int64_t kLeast = 1 << 12, kMost = 1 << 15;
  const int64_t even = ceil_div(rows, 2 * static_cast<int64_t>(num_threads())), bounded = larger(width, 1);
  return larger(1, smaller(kMost / bounded, larger(kLeast / bounded, even)));
}

}  // namespace llmk
