// Divides the panels and rows of a linear layer (linear.h) among threads.
#pragma once
#include "../common/thread_pool.h"
#include "linear.h"

namespace llmk::LLMK_ARCH {

// A panel, and the block of rows [begin, end) by which it is multiplied.
struct PanelRows {
  int64_t panel, begin, end;
};

// Divides consecutive products of panels and blocks of rows evenly among threads. A product that lies on the border
// between two threads is divided by rows. For example, if 9 products are divided between two threads, each thread
// computes four products, and half of the rows of the fifth.
class ThreadShares {
 public:
  // Rows are divided at multiples of the height of a tile, as tiles with fewer rows take almost as long as full ones.
  // `tile_rows` is the maximum height.
  ThreadShares(int64_t products, int64_t threads, int64_t tile_rows)
      : products_(products),
        threads_(threads),
        tile_rows_(tile_rows),
        tasks_of_thread_(products / threads + (products % threads != 0 ? 2 : 0)) {}

  // Returns the number of tasks. It is a multiple of the number of threads, so that parallel_stretches() gives each
  // thread the tasks of its share. Some tasks may be empty.
  int64_t tasks() const { return threads_ * tasks_of_thread_; }

  // Calls run(panel, row, row_end) for one task, unless the task is empty. rows_of(i) returns product number i.
  template <class RowsOf, class Run>
  void run_task(int64_t task, const RowsOf& rows_of, const Run& run) const {
    const int64_t thread = task / tasks_of_thread_, i = products_ * thread / threads_ + task % tasks_of_thread_;
    if (i >= products_) return;
    const PanelRows product = rows_of(i);
    const int64_t row = border_row(product, i, thread), row_end = border_row(product, i, thread + 1);
    if (row < row_end) run(product.panel, row, row_end);
  }

 private:
  // Returns the row of product number i at which the share of `thread` begins. Returns its last row + 1 if the share
  // begins later, and its first row if the share begins earlier.
  int64_t border_row(const PanelRows& product, int64_t i, int64_t thread) const {
    const int64_t border = products_ * thread / threads_, rest = products_ * thread % threads_;
    if (i != border) return i < border ? product.end : product.begin;
    const int64_t rows = product.end - product.begin, tiles = ceil_div(rows, tile_rows_);
    return product.begin + rows * ((2 * tiles * rest + threads_) / (2 * threads_)) / tiles;
  }

  int64_t products_, threads_, tile_rows_, tasks_of_thread_;
};

// Calls run(panel, row, row_end) for parts of all products. rows_of(i) returns product number i. Each thread gets
// consecutive products, in the order of the weights in memory.
template <class RowsOf, class Run>
static inline void spread(const LinearJob& job, int64_t products, int64_t tile_rows, const RowsOf& rows_of,
                          const Run& run) {
  // Waking a second thread for a small product would take longer than the product.
  const bool small = job.shape.panels * job.shape.panel_bytes < (256 << 10) &&
                     job.args.rows * job.header.columns * job.header.depth < (1 << 20);
  const ThreadShares shares(products, small ? 1 : threads_of_loop(), tile_rows);
  const auto task = [&](int64_t i) { shares.run_task(i, rows_of, run); };
  if (small) {
    for (int64_t i = 0; i < shares.tasks(); ++i) task(i);
  } else {
    parallel_stretches(shares.tasks(), task);
  }
}

}  // namespace llmk::LLMK_ARCH
