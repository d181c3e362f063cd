// Runs the tasks of RotaryAttention (paged_plan.h).
//
// A task rotates its queries. It also writes the keys and values of its tokens, so that a decode step is one parallel
// loop. In two cases, all keys and values are written before the tasks start. Either a sequence has more rows than a
// task, or a sequence reads blocks that another sequence writes in this step.
#pragma once
#include <cmath>

#include "paged_layout.h"
#include "paged_source.h"
#include "paged_write.h"

namespace llmk::LLMK_ARCH::paged {

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
  const int64_t group = args.heads / args.kv_heads, first_head = (task.head + h) * group;
  int64_t token = args.query_starts[task.seq] + task.first_row / group, head = first_head + task.first_row % group;
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t number = h * task.rows + row;
    if (row + kLoadAhead * group < task.rows) prefetch_head(args, token + kLoadAhead, head);
    load_rotated(args, token, head, buffer);
    all->factors[number] = args.scale * kLog2E;
    F::pack_query(buffer, args.dim, all->queries + number * F::kRowWords * all->query_units, all->query_units,
                  all->factors + number, all->offsets + number);
    if (++head < first_head + group) continue;
    head = first_head;
    ++token;
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
