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

// Calls function(begin, end) for ranges of rows that cover [0, rows), with all threads. `width` is the number of
// elements of a row. All threads get about equally many rows. A range has at most 16384 elements, or one row. Two
// threads share the rows only if there are two times 6144 elements.
template <class Function>
static void for_row_ranges(int64_t rows, int64_t width, const Function& function) {
  constexpr int64_t kLeast = 6 << 10, kMost = 1 << 14;
  const int64_t bounded = larger(width, 1), threads = num_threads();
  const int64_t needed = ceil_div(rows, larger(1, kMost / bounded)), even = ceil_div(needed, threads) * threads;
  const int64_t tasks = larger(needed, smaller(even, smaller(rows, rows * bounded / kLeast)));
  parallel_for(tasks, [&](int64_t task) { function(rows * task / tasks, rows * (task + 1) / tasks); });
}

}  // namespace llmk
