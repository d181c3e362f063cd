// Divides RotaryAttention into tasks. A row is one query: one token and one of the query heads that share a kv head. A
// task computes some rows of one sequence for one or a few kv heads. It may cover only a range of the context's
// partitions. A partition is a fixed number of keys (kPartition). If several tasks divide the context of the same rows,
// the task that finishes last combines the results of all partitions, in order.
//
// A task rotates its queries. It also writes the keys and values of its tokens, so that a decode step is one parallel
// loop. In two cases, all keys and values are written before the tasks start. Either a sequence has more rows than a
// task, or a sequence reads blocks that another sequence writes in this step.
#pragma once
#include <cmath>

#include "paged_layout.h"
#include "paged_rows.h"
#include "paged_write.h"

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

// The memory for the keys and values of one partition. A task processes one partition at a time.
struct PanelMemory {
  Unit* keys;     // keys of one head, if the products do not read the cache directly
  Unit* values;   // values of one head
  float* scales;  // [kTaskHeads][2][kPartition]: scales of keys, then of values
};

struct PagedScratch {
  char* memory;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* start = reinterpret_cast<T*>(memory + used);
    used += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
    return start;
  }
};

static inline SoftmaxState place_state(PagedScratch* scratch, int64_t rows, int64_t padded_dim) {
  return {scratch->take<float>(rows), scratch->take<float>(rows), scratch->take<float>(rows * padded_dim)};
}

// Sets the softmax totals of a task's rows to their start values, before the first partition. The start values are
// zero, or the sinks of the query heads (paged_rows.h).
static inline void start_totals(const RotaryAttentionArgs& args, const PagedTask& task, const TaskRows& all) {
  clear_state(all.total, all.heads * all.rows, all.padded_dim);
  if (args.sinks == nullptr) return;
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t i = 0; i < all.heads * all.rows; ++i) {
    const int64_t head = (task.head + i / all.rows) * group + (task.first_row + i % all.rows) % group;
    all.total.best[i] = args.sinks[head] * kLog2E;
    all.total.mass[i] = 1.0f;
  }
}

// Rotates the queries of one kv head, and packs them into all->queries, one row for each query.
template <class F>
static inline void place_queries(const RotaryAttentionArgs& args, const PagedTask& task, int64_t h, float* buffer,
                                 TaskRows* all) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t token = args.query_starts[task.seq] + (task.first_row + row) / group, number = h * task.rows + row;
    const int64_t head = (task.head + h) * group + (task.first_row + row) % group;
    if (row + kLoadAhead * group < task.rows) prefetch_head(args, token + kLoadAhead, head);
    load_rotated(args, token, head, buffer);
    all->factors[number] = args.scale * kLog2E;
    F::pack_query(buffer, args.dim, all->queries + number * F::kRowWords * all->query_units, all->query_units,
                  all->factors + number, all->offsets + number);
  }
}

// Divides a row's weighted sums of values by the sum of its weights, and writes them to the output. If not `in_order`,
// the dims of the sums have the order of F::pack_values(), so first restores their order.
template <class F>
static inline void finish_row(const RotaryAttentionArgs& args, const PagedTask& task, int64_t kv_head, int64_t row,
                              int64_t padded_dim, bool in_order, const SoftmaxState& total) {
  const int64_t group = args.heads / args.kv_heads, position = task.first_row + row;
  const int64_t token = args.query_starts[task.seq] + position / group;
  float* sums = total.sums;
  const Vec share = broadcast(1.0f / *total.mass);
  // Adds zero, which turns -0 into +0.
  for (int64_t d = 0; d < padded_dim; d += kLanes) store(sums + d, add(mul(load(sums + d), share), zero()));
  for (int64_t d = 0; d < padded_dim && !in_order; d += F::kDimStep) F::restore_order(sums + d);
  const int64_t head = token * args.heads + kv_head * group + position % group;
  store_floats(args.dtype, sums, args.dim, static_cast<char*>(args.out) + head * args.dim * size_of(args.dtype));
  if (args.lse != nullptr) args.lse[head] = *total.best / kLog2E + std::log(*total.mass);  // best is an exponent of 2
}

// Returns the memory in which a task leaves the result of one partition for one row. The last task combines these
// results. The memory exists only if several tasks share the context of the rows.
static inline float* joined_part(const PagedTask& task, const PagedJoin& join, int64_t h, int64_t row, int64_t part,
                                 int64_t padded_dim) {
  return join.parts + ((h * task.rows + row) * (task.parts - task.seen) + part - task.seen) * part_floats(padded_dim);
}

// Completes a partition for a block of rows. If several tasks share the context, stores the partition's result for the
// last task. Otherwise adds the result to the totals of the rows.
static inline void close_block(const PagedTask& task, int64_t part, const TaskRows& all, const RowBlock& block,
                               const SoftmaxState& state, const PagedJoin* join) {
  for (int64_t h = 0; h < block.heads; ++h) {
    const int64_t at = h * block.rows, number = (block.head + h) * all.rows + block.first;
    const SoftmaxState rows = rows_from(state, at, all.padded_dim);
    if (join == nullptr) {
      fold_partition(rows, block.rows, all.padded_dim, rows_from(all.total, number, all.padded_dim));
      continue;
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      float* out = joined_part(task, *join, block.head + h, block.first + r, part, all.padded_dim);
      out[0] = rows.best[r];
      out[1] = rows.mass[r];
      std::memcpy(out + kLanes, rows.sums + r * all.padded_dim, static_cast<size_t>(all.padded_dim) * sizeof(float));
    }
  }
}

// Combines the partitions of all tasks that share the context of the same rows, in order, and writes the output rows.
template <class F>
static inline void fold_joined(const RotaryAttentionArgs& args, const PagedTask& task, const PagedJoin& join,
                               const TaskRows& all, bool in_order) {
  for (int64_t i = 0; i < all.heads * all.rows; ++i) {
    const int64_t h = i / all.rows, row = i % all.rows;
    const SoftmaxState total = rows_from(all.total, i, all.padded_dim);
    for (int64_t part = all.first_key(row) / kPartition; part * kPartition < all.visible[row]; ++part) {
      float* from = joined_part(task, join, h, row, part, all.padded_dim);
      fold_partition({from, from + 1, from + kLanes}, 1, all.padded_dim, total);
    }
    finish_row<F>(args, task, task.head + h, row, all.padded_dim, in_order, total);
  }
}

static inline int64_t task_end(const RotaryAttentionArgs& args, const PagedTask& task) {
  return smaller(task.end_part * kPartition, visible_keys(args, task.seq, task.first_row + task.rows - 1));
}

// Returns the number of heads that the kernel computes together. The kernel computes kBlockRows query rows at a time.
// If a head has fewer rows, a block has the rows of several heads. Keys in the layout of the native primitives
// (lies_in_rows()) are packed one head at a time.
static inline int64_t heads_together(const RotaryAttentionArgs& args, const PagedTask& task) {
  return lies_in_rows(args) ? 1 : larger(1, kBlockRows / task.rows);
}

// Returns the number of cache blocks that are prefetched at the same time. A task with few rows per head mostly waits
// for memory, so it prefetches several blocks at a time. With AMX, prefetching a single block, head after head, is
// faster.
static inline int blocks_together(const PagedTask& task) {
#ifdef LLMK_AMX
  static_cast<void>(task);
  return 1;
#else
  return task.rows <= 3 ? 4 : 1;
#endif
}

// Prefetches the first keys of `task` in the partition at `begin`, for the heads from number `head` on. If the task
// `writes` into this partition, also prefetches the cache lines that it writes.
static inline void fetch_keys(const RotaryAttentionArgs& args, const PagedTask& task, int64_t begin, int64_t head,
                              bool writes, TileFetch* fetch) {
  const int64_t heads = smaller(heads_together(args, task), task.heads - head);
  const int64_t end = begin + chunk_groups(heads) * kGroupKeys;
  fetch->start(args, true, task.seq, begin, smaller(end, task_end(args, task)), task.head + head, heads,
               blocks_together(task));
  if (writes && head == 0 && begin + kPartition >= task_end(args, task) && task.end_part == task.parts) {
    fetch->add_written(args, task.seq, task.head, task.heads);
  }
}

// Prefetches the keys that a task reads next, when it has read the heads before `head` in the partition at `begin`.
// These keys belong to the following heads, or to the next partition. At the end of the task, prefetches keys of
// `next`, the thread's next task, unless it is null.
static inline void fetch_next(const RotaryAttentionArgs& args, const PagedTask& task, int64_t begin, int64_t head,
                              const PagedTask* next, bool writes, TileFetch* fetch) {
  if (head < task.heads) return fetch_keys(args, task, begin, head, writes, fetch);
  if (begin + kPartition < task_end(args, task)) return fetch_keys(args, task, begin + kPartition, 0, writes, fetch);
  if (next != nullptr) fetch_keys(args, *next, next->first_part * kPartition, 0, writes, fetch);
}

static inline HeadTile head_tile(const RotaryAttentionArgs& args, const PagedTile& tile, int64_t head) {
  const int64_t offset = head * head_bytes(args);
  return {&tile, static_cast<const char*>(args.key_cache) + offset,
          static_cast<const char*>(args.value_cache) + offset};
}

// Returns the panels of the keys of one head. Packs the keys into `memory`, or points into the cache if the products
// can read it directly. The caller adds values and scales to the result later. `h` is the index of the head in
// `memory`.
template <class F, class C>
static inline TilePanels place_keys(const RotaryAttentionArgs& args, const HeadTile& now, int64_t h,
                                    const TaskRows& all, const PanelMemory& memory) {
  TilePanels panels{
      now.tile->begin, ceil_div(now.tile->count, kGroupKeys), all.padded_dim, {}, {}, nullptr, nullptr, 0};
  if (sizeof(C) == 1) {
    panels.key_scales = memory.scales + h * 2 * kPartition;
    panels.value_scales = panels.key_scales + kPartition;
  }
  if (reads_cache<F, C>(args)) {
    point_at_keys(now, &panels);
    return panels;
  }
  if (cache_has_units(args)) {
    if constexpr (F::kPerUnit == 1) widen_keys<C>(now, args.dim, memory.keys);
  } else {
    if constexpr (F::kPacks) pack_keys<F, C>(now, args.dim, all.query_units, memory.keys);
  }
  for (int64_t g = 0; g < kPartGroups; ++g) {
    panels.keys[g] = memory.keys + (g < panels.groups ? g : 0) * kGroupKeys * all.query_units;
  }
  return panels;
}

// Finds the panels of the values of one head for `groups`. Packs the values, or points into the cache. With AMX
// (`tiles`), a product reads the values of F::kPerUnit groups of keys at a time, otherwise those of one group.
template <class F, class C>
static inline void place_values(const RotaryAttentionArgs& args, const HeadTile& now, const TaskRows& all, bool tiles,
                                GroupRange groups, const PanelMemory& memory, TilePanels* panels) {
  const int64_t product_groups = tiles ? F::kPerUnit : 1;
  if (reads_cache<F, C>(args)) {
    return point_at_values<F>(now, groups.begin, groups.end, args.dim, product_groups, memory.values, panels);
  }
  if (cache_has_units(args)) {
    if constexpr (F::kPerUnit == 1) widen_values<C>(now, args.dim, all.padded_dim, memory.values);
  } else {
    if constexpr (F::kPacks) pack_values<F, C>(now, args.dim, all.padded_dim, product_groups, memory.values);
  }
  const int64_t piece_units = product_groups * kGroupKeys / F::kPerUnit * all.padded_dim;
  for (int64_t i = 0; i * product_groups < panels->groups; ++i) panels->values[i] = memory.values + i * piece_units;
}

// The memory that a thread uses for a task.
struct TaskMemory {
  TaskRows all;
  PanelMemory panels;
  BlockMemory block[2];     // attend_blocks() uses both elements, other functions only the first
  float* buffer;            // working memory of write_tokens() and load_rotated()
  int64_t *visible, *first;  // [rows]: a row sees keys [first, visible), or [0, visible) if `first` is null
};

// Prepares the keys and values that attend_block() reads: prefetches them, and unpacks scales and values to panels.
// Unpacks as late as possible, so that the prefetched cache lines have arrived.
template <class F, class C>
struct BlockSource {
  const RotaryAttentionArgs& args;
  const PagedTask& task;
  const PagedTask* next;
  const PagedTile& tile;
  const TaskMemory& memory;
  TilePanels* panels;
  int64_t head, heads;
  // first: true if this is the first block of rows that reads the prepared keys.
  bool tiles, first;
  bool writes;        // the tasks write new keys and values to the cache
  TileFetch* fetch;   // null: no prefetches

  // Prefetches the groups of keys or values that follow `groups`. The caller must call this before it reads `groups`.
  void begin(bool keys, GroupRange groups) const {
    if (fetch == nullptr) return;
    fetch->rest();
    fetch->stop();
    if (!keys && groups.done) return fetch_next(args, task, tile.begin, head + heads, next, writes, fetch);
    const int64_t chunk = chunk_groups(heads) * kGroupKeys;
    const int64_t first = groups.done ? 0 : groups.end * kGroupKeys, end = smaller(tile.count, first + chunk);
    fetch->start(args, keys && !groups.done, task.seq, tile.begin + first, tile.begin + end, task.head + head, heads,
                 blocks_together(task));
  }

  // Unpacks the scales of `groups` for all heads. If there is only one head, unpacks the scales of all groups.
  void place_scales(bool keys, GroupRange groups) const {
    if (sizeof(C) > 1 || !first) return;
    if (heads == 1) groups = {0, kPartGroups, true};
    for (int64_t h = 0; h < heads; ++h) {
      const HeadTile now = head_tile(args, tile, task.head + head + h);
      gather_scales(tile, keys ? now.keys : now.values, groups.begin, groups.end,
                    keys ? panels[h].key_scales : panels[h].value_scales);
      if (!keys) panels[h].largest_value_scale = largest_of(panels[h].value_scales);
    }
  }

  // Unpacks the values of `groups` for head h. If there is only one head, unpacks the values of all groups.
  void place_values(int64_t h, GroupRange groups) const {
    if (!first) return;
    if (heads == 1) groups = {0, panels->groups, true};
    const HeadTile now = head_tile(args, tile, task.head + head + h);
    paged::place_values<F, C>(args, now, memory.all, tiles, groups, memory.panels, panels + h);
  }
};

// Computes one partition for all heads of a task. Rows before number `skip` see none of the partition's keys.
template <class F, class C>
static inline void attend_partition(const RotaryAttentionArgs& args, const PagedTask& task, const PagedTask* next,
                                    bool writes, const PagedTile& tile, const TaskMemory& memory, int64_t skip,
                                    const PagedJoin* join, int64_t* configured, TileFetch* fetch) {
  const TaskRows& all = memory.all;
  const int64_t span = reads_cache<F, C>(args) ? heads_together(args, task) : 1;
  int64_t block_rows = kTileRows;
  bool tiles = false;
#ifdef LLMK_AMX
  if constexpr (kHasTiles<F>) {
    tiles = uses_tiles<F>(all.dim, all.rows - skip);
    if (tiles) block_rows = TileProducts<F>::kRows;
  }
#endif
  TilePanels panels[kTaskHeads];
  for (int64_t head = 0; head < all.heads; head += span) {
    const int64_t heads = smaller(span, all.heads - head);
    for (int64_t h = 0; h < heads; ++h) {
      panels[h] = place_keys<F, C>(args, head_tile(args, tile, task.head + head + h), h, all, memory.panels);
    }
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles && all.rows - skip > block_rows) {  // a task with more rows than a block computes one head at a time
        if (*configured != block_rows) configure_products<F>(block_rows);
        *configured = block_rows;
        const BlockSource<F, C> source{args, task, next, tile, memory, panels, head, 1, true, true, writes, nullptr};
        const GroupRange whole{0, kPartGroups, true};
        source.place_scales(true, whole);
        source.place_scales(false, whole);
        source.place_values(0, whole);
        attend_blocks<F>(all, *panels, head, skip, memory.block, [&](const RowBlock& block, const BlockMemory& done) {
          close_block(task, tile.begin / kPartition, all, block, done.part, join);
        });
        continue;
      }
    }
#endif
    for (int64_t row = skip; row < all.rows;) {
      const int64_t left = all.rows - row, size = ceil_div(left, ceil_div(left, block_rows));
#ifdef LLMK_AMX
      if constexpr (kHasTiles<F>) {
        if (tiles && *configured != size) configure_products<F>(size);
        if (tiles) *configured = size;
      }
#endif
      const RowBlock block{head, heads, row, size};
      const bool first = row == skip;
      // Does not prefetch if there are more rows than a tile holds. Then reading takes less time than the computation.
      TileFetch* fetching = all.rows <= kTileRows ? fetch : nullptr;
      const BlockSource<F, C> source{args, task,  next,  tile,  memory, panels,
                                     head, heads, tiles, first, writes, fetching};
      attend_block<F>(all, panels, block, tiles, memory.block[0], fetching, source);
      close_block(task, tile.begin / kPartition, all, block, memory.block[0].part, join);
      row += size;
    }
  }
  static_cast<void>(configured);
}

// Computes the partitions of a task one after the other, and writes the new keys and values before they are read.
template <class F, class C>
static inline void walk_partitions(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                                   const PagedTask* next, const PagedJoin* join, const TaskMemory& memory,
                                   TileFetch* fetch) {
  const TaskRows& all = memory.all;
  const int64_t end = task_end(args, task);
  // The task writes its keys and values just before it reads them. By then, their cache lines have been prefetched.
  bool writes = plan.writes && task.end_part == task.parts;
  const int64_t written = args.context_lens[task.seq] - args.query_lens[task.seq];
  int64_t configured = 0, skip = 0;
  for (int64_t begin = task.first_part * kPartition; begin < end; begin += kPartition) {
    if (writes && written < begin + kPartition) {
      const int64_t first_token = args.query_starts[task.seq];
      write_tokens(args, first_token, first_token + args.query_lens[task.seq], task.head, task.heads,
                   write_buffer(args, memory.buffer));
      writes = false;
    }
    while (skip < all.rows && all.visible[skip] <= begin) ++skip;
    PagedTile tile;
    locate_tile(args, task.seq, begin, end, &tile);
    attend_partition<F, C>(args, task, next, plan.writes, tile, memory, skip, join, &configured, fetch);
  }
#ifdef LLMK_AMX
  if (configured > 0) release_tiles();
#endif
}

// Places the memory of a task in `scratch`. If `scratch` has no memory, only computes the required size.
template <class F>
static inline TaskMemory place_task(const RotaryAttentionArgs& args, const PagedTask& task, int64_t padded_dim,
                                    PagedScratch* scratch) {
  const int64_t query_units = ceil_div(ceil_div(args.dim, F::kPerUnit), kLanes) * kLanes;
  const int64_t rows = task.rows, all_rows = task.heads * rows;
  TaskMemory memory{};
  memory.panels.keys = scratch->take<Unit>(key_panel_units(query_units));
  memory.panels.values = scratch->take<Unit>(value_panel_units(padded_dim) / F::kPerUnit);
  memory.panels.scales = scratch->take<float>(kTaskHeads * 2 * kPartition);
  memory.buffer = scratch->take<float>(write_buffer_floats(args));
  memory.visible = scratch->take<int64_t>(rows);
  memory.first = args.window == 0 && args.first_keys == nullptr ? nullptr : scratch->take<int64_t>(rows);
  for (BlockMemory& block : memory.block) {
    block.scores = scratch->take<float>(kBlockRows * kScoreStride);
    block.weights = scratch->take<Unit>(kBlockRows * kWeightStride<F>);
    block.steps = scratch->take<float>(kBlockRows);
    block.part = place_state(scratch, kBlockRows, padded_dim);
  }
  TaskRows& all = memory.all;
  all = {task.heads,   rows,    args.dim, padded_dim, query_units, memory.visible,
         memory.first, nullptr, nullptr,  nullptr,    {}};
  all.queries = scratch->take<Unit>((all_rows + kBlockRows) * F::kRowWords * query_units);  // tiles read whole blocks
  all.factors = scratch->take<float>(all_rows);
  all.offsets = scratch->take<int32_t>(all_rows);
  all.total = place_state(scratch, all_rows, padded_dim);
  return memory;
}

template <class F, class C>
static inline int64_t padded_dim_of(const RotaryAttentionArgs& args) {
  return reads_cache<F, C>(args) ? args.dim : ceil_div(args.dim, F::kDimStep) * F::kDimStep;
}

// Runs a task: rotates its queries, computes its partitions, and writes its rows of the output. If tasks share the
// context of the rows, only the last of these tasks writes the rows.
template <class F, class C>
static inline void run_task(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                            const PagedTask* next, TileFetch* fetch) {
  const int64_t padded_dim = padded_dim_of<F, C>(args);
  const bool in_order = reads_cache<F, C>(args);
  fetch->rest();  // the prefetched lines arrive while the queries are rotated
  PagedScratch measured{nullptr};
  place_task<F>(args, task, padded_dim, &measured);
  PagedScratch scratch{static_cast<char*>(thread_scratch(kScratchTile, measured.used))};
  TaskMemory memory = place_task<F>(args, task, padded_dim, &scratch);
  TaskRows& all = memory.all;
  for (int64_t row = 0; row < task.rows; ++row) {
    memory.visible[row] = visible_keys(args, task.seq, task.first_row + row);
    if (memory.first != nullptr) memory.first[row] = first_key(args, task.seq, task.first_row + row);
  }
  for (int64_t h = 0; h < task.heads; ++h) place_queries<F>(args, task, h, memory.buffer, &all);
  start_totals(args, task, all);
  PagedJoin* join = task.join < 0 ? nullptr : plan.joins + task.join;
  walk_partitions<F, C>(args, plan, task, next, join, memory, fetch);
  if (join == nullptr) {
    for (int64_t i = 0; i < all.heads * all.rows; ++i) {
      finish_row<F>(args, task, task.head + i / all.rows, i % all.rows, padded_dim, in_order,
                    rows_from(all.total, i, padded_dim));
    }
  } else if (__atomic_sub_fetch(&join->waiting, 1, __ATOMIC_ACQ_REL) == 0) {
    fold_joined<F>(args, task, *join, all, in_order);
  }
}

// Runs a task. F is its number format (paged_units.h), C the type of the cache. On AVX2, WidenedForm replaces FloatForm
// for a task with few rows, if the cache is bfloat16.
template <class F, class C>
static inline void choose_task(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                               const PagedTask* next, TileFetch* fetch) {
#ifdef LLMK_VEC_AVX2
  if constexpr (std::is_same_v<F, FloatForm> && std::is_same_v<C, bfloat_t>) {
    if (cache_has_units(args) && task.rows <= kTileRows) {
      return run_task<WidenedForm<C>, C>(args, plan, task, next, fetch);
    }
  }
#endif
  run_task<F, C>(args, plan, task, next, fetch);
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

// Runs the attention of a step with the number format F and a cache of type C: plans the tasks, then runs them.
template <class F, class C>
static inline void attend_paged(const RotaryAttentionArgs& args) {
  const int64_t padded_dim = padded_dim_of<F, C>(args), group = args.heads / args.kv_heads;
  PagedPlan plan{};
  plan.writes = !args.write_first && !args.ready;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    plan.writes = plan.writes && args.query_lens[seq] * group <= kTaskRows;
  }
  if (!plan.writes && !args.ready) write_all_tokens(args);
  plan_tasks(args, padded_dim, &plan);
  if (plan.num_tasks == 0) return;
  const int64_t part_bytes = ceil_div(plan.num_part_floats * 4, 64) * 64;
  const int64_t task_bytes = ceil_div(plan.num_tasks * static_cast<int64_t>(sizeof(PagedTask)), 64) * 64;
  const int64_t bytes = part_bytes + task_bytes + plan.num_joins * static_cast<int64_t>(sizeof(PagedJoin));
  char* memory = static_cast<char*>(thread_scratch(kScratchDriver, bytes));
  plan.parts = reinterpret_cast<float*>(memory);
  plan.tasks = reinterpret_cast<PagedTask*>(memory + part_bytes);
  plan.joins = reinterpret_cast<PagedJoin*>(memory + part_bytes + task_bytes);
  plan_tasks(args, padded_dim, &plan);
  // Before a thread runs a task, it also claims its next task. So the current task can prefetch the first keys of the
  // next one.
  int64_t claimed = 0;
  const auto claim = [&] {
    const int64_t i = __atomic_fetch_add(&claimed, 1, __ATOMIC_RELAXED);
    return i < plan.num_tasks ? plan.tasks + i : nullptr;
  };
  parallel_for(smaller(plan.num_tasks, num_threads()), [&](int64_t) {
    TileFetch fetch;
    for (const PagedTask *task = claim(), *next = nullptr; task != nullptr; task = next) {
      next = claim();
      choose_task<F, C>(args, plan, *task, next, &fetch);
    }
  });
}

// Computes attention over keys and values that are matrix rows instead of cache blocks. If the query rows of a sequence
// form several tiles, copies the sequence's keys and values to blocks (paged_layout.h) and computes this sequence
// alone. Then computes all other sequences together.
template <class F, class C>
static inline void attend_ready(const RotaryAttentionArgs& args) {
  int32_t* others = static_cast<int32_t*>(thread_scratch(kScratchLengths, args.num_seqs * 4));
  bool any = false;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const bool alone = pays_layout(args, seq);
    if (alone) attend_paged<F, C>(laid_out_sequence(args, seq));
    others[seq] = alone ? 0 : args.query_lens[seq];
    any = any || others[seq] > 0;
  }
  RotaryAttentionArgs rest = args;
  rest.query_lens = others;
  if (any) attend_paged<F, C>(rest);
}

}  // namespace llmk::LLMK_ARCH::paged
