// Divides RotaryAttention into tasks, which paged_attention.h runs. A row is one query: one token and one of the query
// heads that share a kv head. A task computes some rows of one sequence for one or a few kv heads. It may cover only a
// range of the context's partitions. A partition is a fixed number of keys (kPartition). If several tasks divide the
// context of the same rows, the task that finishes last combines the results of all partitions, in order.
#pragma once
#include "paged_rows.h"

namespace llmk::LLMK_ARCH::paged {

constexpr int64_t kTaskHeads = 16;

struct PagedTask {
  int64_t seq, first_row, rows;
  int64_t head, heads;               // kv heads [head, head + heads)
  int64_t first_part, end_part;      // partitions of this task
  int64_t seen, parts;               // the rows see keys of the partitions [seen, parts) of the context
  int64_t join;                      // index of the PagedJoin; -1 if this task covers all partitions
};

// The shared state of tasks that divide the context of the same rows. `waiting` counts unfinished tasks. The last task
// combines the results of all partitions.
struct PagedJoin {
  int64_t waiting;
  // The results of all partitions: [heads][rows][partitions seen][part_floats]. The part_floats() floats of one result
  // begin with `best` and `mass` of SoftmaxState. After padding, its `sums` follow.
  float* parts;
};

struct PagedPlan {
  PagedTask* tasks;
  PagedJoin* joins;
  float* parts;
  int64_t num_tasks, num_joins, num_part_floats;
  bool writes;  // the tasks write the new keys and values to the cache
};

static inline int64_t part_floats(int64_t padded_dim) { return padded_dim + kLanes; }

// Returns the estimated cost of a task, in units of one row of one kv head in one partition. The task has `rows` rows
// and `parts` partitions. Reading the keys and values of a partition costs as much as computing 8 rows.
static inline int64_t task_cost(int64_t rows, int64_t parts) { return parts * (8 + rows); }

// Divides the rows of each sequence into tiles of at most kTaskRows rows. Calls function(task) for each tile. The task
// covers all partitions that the rows see, and split_row_tile() divides it further.
template <class Function>
static inline void for_row_tiles(const RotaryAttentionArgs& args, const Function& function) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t rows = args.query_lens[seq] * group, tiles = ceil_div(rows, kTaskRows);
    // If the rows form several tiles, all tiles read one kv head while it is in the L2 cache, then all read the next
    // head.
    const int64_t heads = tiles > 1 ? 1 : args.kv_heads;
    for (int64_t i = 0; i < args.kv_heads / heads * tiles; ++i) {
      const int64_t tile = tiles - 1 - i % tiles;  // the tiles that see the most keys run first
      const int64_t count = smaller(kTaskRows, rows - tile * kTaskRows);
      const int64_t visible = visible_keys(args, seq, tile * kTaskRows + count - 1);
      int64_t first = first_key(args, seq, tile * kTaskRows);
      for (int64_t row = 1; args.first_keys != nullptr && row < count; ++row) {
        first = smaller(first, first_key(args, seq, tile * kTaskRows + row));
      }
      const int64_t seen = first / kPartition, parts = ceil_div(visible, kPartition);
      function(PagedTask{seq, tile * kTaskRows, count, i / tiles, heads, 0, 0, seen, parts, -1});
    }
  }
}

// Divides one tile of rows into tasks by heads and by ranges of the context. Calls add(task) for each task.
template <class Function>
static inline void split_row_tile(const RotaryAttentionArgs& args, PagedTask task, int64_t total_cost, bool writes,
                                  const Function& add) {
  const int64_t parts = task.parts - task.seen, cost = task_cost(task.rows, parts) * task.heads;
  const int64_t pieces = ceil_div(cost * 8 * num_threads(), larger(1, total_cost));
  const int64_t by_rows = smaller(kTaskHeads, kTaskRows / task.rows), end_head = task.head + task.heads;
  int64_t heads = smaller(by_rows, task.heads);
  const int64_t ranges = smaller(parts, ceil_div(pieces, ceil_div(task.heads, heads)));
  heads = larger(1, smaller(heads, task.heads * ranges / pieces));
  int64_t written_part = task.parts;
  if (writes) written_part = (args.context_lens[task.seq] - args.query_lens[task.seq]) / kPartition;
  for (; task.head < end_head; task.head += heads) {
    task.heads = smaller(heads, end_head - task.head);
    const int64_t per_range = ceil_div(parts, larger(1, ranges));
    task.join = ranges > 1 ? 0 : -1;
    for (task.first_part = task.seen; task.first_part < task.parts; task.first_part = task.end_part) {
      task.end_part = smaller(task.parts, task.first_part + per_range);
      // The task that writes the new keys also reads them. The new keys are at the end of the context, so the
      // partitions of this task reach to the end.
      if (task.end_part > written_part) task.end_part = task.parts;
      add(task);
    }
  }
}

// Divides the step into tasks and writes them to `plan`. If plan->tasks is null, the function only counts the tasks,
// the joins, and the floats that partial results need. A join combines the partial results of several tasks.
static inline void plan_tasks(const RotaryAttentionArgs& args, int64_t padded_dim, PagedPlan* plan) {
  int64_t total = 0;
  for_row_tiles(args,
                [&](const PagedTask& tile) { total += task_cost(tile.rows, tile.parts - tile.seen) * tile.heads; });
  const bool filling = plan->tasks != nullptr;
  plan->num_tasks = plan->num_joins = plan->num_part_floats = 0;
  for_row_tiles(args, [&](const PagedTask& tile) {
    split_row_tile(args, tile, total, plan->writes, [&](PagedTask task) {
      if (task.join >= 0) {
        if (task.first_part == task.seen) {
          if (filling) plan->joins[plan->num_joins] = PagedJoin{0, plan->parts + plan->num_part_floats};
          ++plan->num_joins;
          plan->num_part_floats += task.heads * task.rows * (task.parts - task.seen) * part_floats(padded_dim);
        }
        task.join = plan->num_joins - 1;
        if (filling) ++plan->joins[task.join].waiting;
      }
      if (filling) plan->tasks[plan->num_tasks] = task;
      ++plan->num_tasks;
    });
  });
}

}  // namespace llmk::LLMK_ARCH::paged
