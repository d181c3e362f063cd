// The split of RotaryAttention into tasks. A task is some rows of one sequence (tokens x the query heads of a kv head)
// for one or a few kv heads over a range of partitions of the context, and walks the tiles of it; the heads of a block
// lie side by side, so decode tasks take several of them tile by tile. Where the context is split, the task that ends
// last folds the partitions of all, in order.
//
// A task rotates its queries itself. It also writes its tokens' keys and values, so that a decode step is one parallel
// loop, unless a sequence has more rows than one task or reads what another one writes: then all are written before.
#pragma once
#include "paged_rows.h"
#include "paged_write.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

constexpr int64_t kTaskHeads = 16;

struct PagedTask {
  int64_t seq, first_row, rows;
  int64_t head, heads;               // kv heads
  int64_t first_part, end_part;      // partitions of the context
  int64_t seen, parts;               // all that the rows see: partitions [seen, parts)
  int64_t join;                      // -1: the task covers all partitions
};

// Tasks of the same rows: who finishes last folds.
struct PagedJoin {
  int64_t waiting;
  float* parts;  // [heads][rows][partitions seen][part_floats]: best, mass, ..., sums
};

struct PagedPlan {
  PagedTask* tasks;
  PagedJoin* joins;
  float* parts;
  int64_t num_tasks, num_joins, num_part_floats;
  bool writes;  // tasks write the cache
};

static inline int64_t part_floats(int64_t padded_dim) { return padded_dim + kLanes; }

// Work of one kv head, in about equal units.
static inline int64_t task_cost(int64_t rows, int64_t parts) { return parts * (8 + rows); }

template <class Function>
static inline void for_row_tiles(const RotaryAttentionArgs& args, const Function& function) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t rows = args.query_lens[seq] * group;
    for (int64_t tile = ceil_div(rows, kTaskRows) - 1; tile >= 0; --tile) {  // those that see the most go first
      const int64_t count = smaller(kTaskRows, rows - tile * kTaskRows);
      const int64_t visible = visible_keys(args, seq, tile * kTaskRows + count - 1);
      int64_t first = first_key(args, seq, tile * kTaskRows);
      for (int64_t row = 1; args.first_keys != nullptr && row < count; ++row) {
        first = smaller(first, first_key(args, seq, tile * kTaskRows + row));
      }
      const int64_t seen = first / kPartition;
      function(PagedTask{seq, tile * kTaskRows, count, 0, 0, 0, 0, seen, ceil_div(visible, kPartition), -1});
    }
  }
}

// Splits heads and context of one row tile; `add(task)` takes each.
template <class Function>
static inline void split_row_tile(const RotaryAttentionArgs& args, PagedTask task, int64_t total_cost, bool writes,
                                  const Function& add) {
  constexpr int64_t kTileBytes = 256 << 10;  // this tile and the next one in the second-level cache
  const int64_t parts = task.parts - task.seen, cost = task_cost(task.rows, parts) * args.kv_heads;
  const int64_t pieces = ceil_div(cost * 8 * num_threads(), larger(1, total_cost));
  const int64_t by_rows = smaller(kTaskHeads, 2 * kTaskRows / task.rows);
  const int64_t by_cache = kTileBytes * args.block_size / (2 * chunk_bytes(args) * kKeyTile);
  int64_t heads = larger(1, smaller(smaller(by_rows, by_cache), args.kv_heads));
  const int64_t ranges = smaller(parts, ceil_div(pieces, ceil_div(args.kv_heads, heads)));
  heads = larger(1, smaller(heads, args.kv_heads * ranges / pieces));
  int64_t written_part = task.parts;
  if (writes) written_part = (args.context_lens[task.seq] - args.query_lens[task.seq]) / kPartition;
  for (task.head = 0; task.head < args.kv_heads; task.head += heads) {
    task.heads = smaller(heads, args.kv_heads - task.head);
    const int64_t per_range = ceil_div(parts, larger(1, ranges));
    task.join = ranges > 1 ? 0 : -1;
    for (task.first_part = task.seen; task.first_part < task.parts; task.first_part = task.end_part) {
      task.end_part = smaller(task.parts, task.first_part + per_range);
      if (task.end_part > written_part) task.end_part = task.parts;  // what is written is read by the same task
      add(task);
    }
  }
}

// Of the tile in work, for each head of a block.
struct TileMemory {
  Unit* keys;     // a panel; one head at a time where the cache is not read directly
  Unit* values;   // [heads][value_panel_units]
  float* scales;  // [heads][2][kKeyTile]: of keys, of values
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

static inline SoftmaxState place_state(PagedScratch* scratch, int64_t rows, int64_t masses, int64_t padded_dim) {
  return {scratch->take<float>(rows), scratch->take<float>(rows * masses), scratch->take<float>(rows * padded_dim)};
}

// Rotates and packs the queries of one kv head's rows.
template <class F>
static inline void place_queries(const RotaryAttentionArgs& args, const PagedTask& task, int64_t h, float* buffer,
                                 TaskRows* all) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t token = args.query_starts[task.seq] + (task.first_row + row) / group, number = h * task.rows + row;
    load_rotated(args, token, (task.head + h) * group + (task.first_row + row) % group, buffer);
    all->factors[number] = args.scale * kLog2E;
    F::pack_query(buffer, args.dim, all->queries + number * F::kPasses * all->query_units, all->query_units,
                  all->factors + number, all->offsets + number);
  }
}

template <class F>
static inline void finish_row(const RotaryAttentionArgs& args, const PagedTask& task, int64_t kv_head, int64_t row,
                              int64_t padded_dim, bool in_order, float mass, float* sums) {
  const int64_t group = args.heads / args.kv_heads, position = task.first_row + row;
  const int64_t token = args.query_starts[task.seq] + position / group;
  // + 0: a sum of nothing but zeros may have either sign
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    store(sums + d, add(div(load(sums + d), broadcast(mass)), zero()));
  }
  for (int64_t d = 0; d < padded_dim && !in_order; d += F::kDimStep) F::restore_order(sums + d);
  const int64_t place = (token * args.heads + kv_head * group + position % group) * args.dim;
  store_floats(args.dtype, sums, args.dim, static_cast<char*>(args.out) + place * size_of(args.dtype));
}

// Where a row's partition waits for the others.
static inline float* joined_part(const PagedTask& task, const PagedJoin& join, int64_t h, int64_t row, int64_t part,
                                 int64_t padded_dim) {
  return join.parts + ((h * task.rows + row) * (task.parts - task.seen) + part - task.seen) * part_floats(padded_dim);
}

// Ends a partition: the rows that saw it fold it into their total, or leave it for the join.
static inline void close_partition(const PagedTask& task, int64_t part, const TaskRows& all, const PagedJoin* join) {
  for (int64_t i = 0; i < all.heads * all.rows; ++i) {
    const int64_t row = i % all.rows;
    if (all.visible[row] <= part * kPartition || all.first_key(row) >= (part + 1) * kPartition) continue;
    const float mass = sum(load(all.partition.mass + i * kLanes));
    const float* sums = all.partition.sums + i * all.padded_dim;
    if (join == nullptr) {
      fold_partition(all.partition.best[i], mass, sums, all.padded_dim, part == all.first_key(row) / kPartition,
                     all.total.best + i, all.total.mass + i, all.total.sums + i * all.padded_dim);
    } else {
      float* out = joined_part(task, *join, i / all.rows, row, part, all.padded_dim);
      out[0] = all.partition.best[i];
      out[1] = mass;
      std::memcpy(out + kLanes, sums, static_cast<size_t>(all.padded_dim) * sizeof(float));
    }
  }
}

template <class F>
static inline void fold_joined(const RotaryAttentionArgs& args, const PagedTask& task, const PagedJoin& join,
                               const TaskRows& all, bool in_order) {
  for (int64_t i = 0; i < all.heads * all.rows; ++i) {
    const int64_t h = i / all.rows, row = i % all.rows;
    float best = 0, mass = 0;
    const int64_t parts = ceil_div(all.visible[row], kPartition), first = all.first_key(row) / kPartition;
    for (int64_t part = first; part < parts; ++part) {
      const float* from = joined_part(task, join, h, row, part, all.padded_dim);
      fold_partition(from[0], from[1], from + kLanes, all.padded_dim, part == first, &best, &mass, all.total.sums);
    }
    finish_row<F>(args, task, task.head + h, row, all.padded_dim, in_order, mass, all.total.sums);
  }
}

static inline int64_t task_end(const RotaryAttentionArgs& args, const PagedTask& task) {
  return smaller(task.end_part * kPartition, visible_keys(args, task.seq, task.first_row + task.rows - 1));
}

// Fetches the tile after `begin`: of this task or, at its end, the first of the thread's next task (null: none).
static inline void fetch_next(const RotaryAttentionArgs& args, const PagedTask& task, int64_t begin,
                              const PagedTask* next, TileFetch* fetch) {
  const int64_t end = task_end(args, task);
  fetch->rest();
  fetch->stop();
  if (begin + kKeyTile < end) {
    fetch->start(args, task.seq, begin + kKeyTile, smaller(end, begin + 2 * kKeyTile), task.head, task.heads);
  } else if (next != nullptr) {
    const int64_t first = next->first_part * kPartition;
    fetch->start(args, next->seq, first, smaller(first + kKeyTile, task_end(args, *next)), next->head, next->heads);
  }
}

// The panels of a tile for one head; h: its place in `memory`.
template <class F, class C>
static inline TilePanels make_panels(const RotaryAttentionArgs& args, const PagedTile& tile, int64_t head, int64_t h,
                                     const TaskRows& all, bool tiles, const TileMemory& memory) {
  const int64_t offset = head * head_bytes(args);
  const HeadTile now{&tile, static_cast<const char*>(args.key_cache) + offset,
                     static_cast<const char*>(args.value_cache) + offset};
  TilePanels panels{tile.begin, ceil_div(tile.count, kGroupKeys), kKeyTile, all.padded_dim, {}, {}, nullptr, nullptr};
  if (sizeof(C) == 1) {
    float* scales = memory.scales + h * 2 * kKeyTile;
    gather_scales(tile, now.keys, scales);
    gather_scales(tile, now.values, scales + kKeyTile);
    panels.key_scales = scales;
    panels.value_scales = scales + kKeyTile;
  }
  Unit* values = memory.values + h * value_panel_units(all.padded_dim);
  if (reads_cache<F, C>(args)) {
    point_at_cache<F>(now, args.dim, values, &panels);
#ifdef LLMK_AMX
    if (tiles) join_values<F>(args.dim, values, &panels);
#endif
    return panels;
  }
  static_cast<void>(tiles);
  if (cache_has_units(args)) {
    if constexpr (F::kPerUnit == 1) widen_units<C>(now, args.dim, all.padded_dim, memory.keys, values);
  } else {
    pack_keys<F, C>(now, args.dim, memory.keys);
    pack_values<F, C>(now, args.dim, all.padded_dim, values);
  }
  for (int64_t g = 0; g < kTileGroups; ++g) {
    panels.keys[g] = memory.keys + g * kGroupKeys;
    panels.values[g] = values + g * (kGroupKeys / F::kPerUnit) * all.padded_dim;
  }
  return panels;
}

// A tile for the rows of each head from `skip` on, which see any of it.
template <class F, class C>
static inline void attend_tile(const RotaryAttentionArgs& args, const PagedTask& task, const PagedTile& tile,
                               const TaskRows& all, int64_t skip, const TileMemory& memory, int64_t* configured,
                               TileFetch* fetch) {
  const int64_t rows = all.rows - skip;
  const int64_t span = reads_cache<F, C>(args) ? larger(1, kBlockRows / rows) : 1;  // heads in a block
  bool tiles = false;
#ifdef LLMK_AMX
  if constexpr (kHasTiles<F>) tiles = uses_tiles<F>(all.dim, rows);
#endif
  TilePanels panels[kBlockRows];
  for (int64_t head = 0; head < all.heads; head += span) {
    const int64_t heads = smaller(span, all.heads - head);
    for (int64_t h = 0; h < heads; ++h) {
      panels[h] = make_panels<F, C>(args, tile, task.head + head + h, h, all, tiles, memory);
    }
    for (int64_t row = skip; row < all.rows;) {
      const int64_t left = all.rows - row, size = ceil_div(left, ceil_div(left, kBlockRows));
#ifdef LLMK_AMX
      if constexpr (kHasTiles<F>) {
        if (tiles && *configured != size) configure_products<F>(size);
        if (tiles) *configured = size;
      }
#endif
      attend_block<F>(all, panels, {head, heads, row, size}, tiles, row == skip ? fetch : nullptr);
      row += size;
    }
  }
  static_cast<void>(configured);
}

// The task's own tokens into the cache.
static inline void write_tokens(const RotaryAttentionArgs& args, const PagedTask& task, float* buffer) {
  for (int64_t i = 0; i < args.query_lens[task.seq]; ++i) {
    write_token(args, args.query_starts[task.seq] + i, task.head, task.heads, buffer);
  }
}

template <class F, class C>
static inline void walk_tiles(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                              const PagedTask* next, const TaskRows& all, const PagedJoin* join,
                              const TileMemory& memory, float* buffer, TileFetch* fetch) {
  const int64_t end = task_end(args, task);
  // Written just before they are read, when their lines have been fetched.
  bool writes = plan.writes && task.end_part == task.parts;
  const int64_t written = args.context_lens[task.seq] - args.query_lens[task.seq];
  int64_t configured = 0, skip = 0;
  for (int64_t begin = task.first_part * kPartition; begin < end; begin += kKeyTile) {
    if (writes && written < begin + kKeyTile) {
      write_tokens(args, task, buffer);
      writes = false;
    }
    while (skip < all.rows && all.visible[skip] <= begin) ++skip;
    fetch_next(args, task, begin, next, fetch);
    PagedTile tile;
    locate_tile(args, task.seq, begin, end, &tile);
    attend_tile<F, C>(args, task, tile, all, skip, memory, &configured, fetch);
    if ((begin + kKeyTile) % kPartition == 0 || begin + kKeyTile >= end) close_partition(task, begin / kPartition, all, join);
  }
#ifdef LLMK_AMX
  if (configured > 0) release_tiles();
#endif
}

// Memory of a task; with none, how much it takes.
template <class F>
static inline TaskRows place_task(const RotaryAttentionArgs& args, const PagedTask& task, int64_t padded_dim,
                                  PagedScratch* scratch, TileMemory* memory, float** buffer, int64_t** visible,
                                  int64_t** first) {
  const int64_t query_units = ceil_div(ceil_div(args.dim, F::kPerUnit), kLanes) * kLanes;
  const int64_t rows = task.rows, all_rows = task.heads * rows;
  memory->keys = scratch->take<Unit>(key_panel_units(query_units, F::kPerUnit));
  memory->values = scratch->take<Unit>(kBlockRows * value_panel_units(padded_dim));
  memory->scales = scratch->take<float>(kBlockRows * 2 * kKeyTile);
  *buffer = scratch->take<float>(write_buffer_floats(args));
  *visible = scratch->take<int64_t>(rows);
  *first = args.window == 0 && args.first_keys == nullptr ? nullptr : scratch->take<int64_t>(rows);
  TaskRows all{task.heads, rows, args.dim, padded_dim, query_units, *visible, *first, nullptr, nullptr, nullptr, {}, {}};
  all.queries = scratch->take<Unit>(all_rows * F::kPasses * query_units);
  all.factors = scratch->take<float>(all_rows);
  all.offsets = scratch->take<int32_t>(all_rows);
  all.partition = place_state(scratch, all_rows, kLanes, padded_dim);
  all.total = place_state(scratch, all_rows, 1, padded_dim);
  return all;
}

template <class F, class C>
static inline int64_t padded_dim_of(const RotaryAttentionArgs& args) {
  return reads_cache<F, C>(args) ? args.dim : ceil_div(args.dim, F::kDimStep) * F::kDimStep;
}

template <class F, class C>
static inline void run_task(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                            const PagedTask* next, TileFetch* fetch) {
  const int64_t padded_dim = padded_dim_of<F, C>(args);
  const bool in_order = reads_cache<F, C>(args);
  TileMemory memory{};
  float* buffer;
  int64_t *visible, *first;
  PagedScratch measured{nullptr};
  place_task<F>(args, task, padded_dim, &measured, &memory, &buffer, &visible, &first);
  PagedScratch scratch{static_cast<char*>(thread_scratch(kScratchTile, measured.used))};
  TaskRows all = place_task<F>(args, task, padded_dim, &scratch, &memory, &buffer, &visible, &first);
  for (int64_t row = 0; row < task.rows; ++row) {
    visible[row] = visible_keys(args, task.seq, task.first_row + row);
    if (first != nullptr) first[row] = first_key(args, task.seq, task.first_row + row);
  }
  for (int64_t h = 0; h < task.heads; ++h) place_queries<F>(args, task, h, buffer, &all);
  PagedJoin* join = task.join < 0 ? nullptr : plan.joins + task.join;
  walk_tiles<F, C>(args, plan, task, next, all, join, memory, buffer, fetch);
  if (join == nullptr) {
    for (int64_t i = 0; i < all.heads * all.rows; ++i) {
      finish_row<F>(args, task, task.head + i / all.rows, i % all.rows, padded_dim, in_order, all.total.mass[i],
                    all.total.sums + i * padded_dim);
    }
  } else if (__atomic_sub_fetch(&join->waiting, 1, __ATOMIC_ACQ_REL) == 0) {
    fold_joined<F>(args, task, *join, all, in_order);
  }
}

// Counts (with tasks null) or fills the plan.
static inline void plan_tasks(const RotaryAttentionArgs& args, int64_t padded_dim, PagedPlan* plan) {
  int64_t total = 0;
  for_row_tiles(args, [&](const PagedTask& tile) { total += task_cost(tile.rows, tile.parts - tile.seen) * args.kv_heads; });
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

template <class F, class C>
static inline void attend_paged(const RotaryAttentionArgs& args) {
  const int64_t padded_dim = padded_dim_of<F, C>(args), group = args.heads / args.kv_heads;
  PagedPlan plan{};
  plan.writes = !args.write_first && !args.ready;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) plan.writes = plan.writes && args.query_lens[seq] * group <= kTaskRows;
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
  // A thread claims its next task early, to fetch the first tile of it.
  int64_t claimed = 0;
  const auto claim = [&] {
    const int64_t i = __atomic_fetch_add(&claimed, 1, __ATOMIC_RELAXED);
    return i < plan.num_tasks ? plan.tasks + i : nullptr;
  };
  parallel_for(smaller(plan.num_tasks, num_threads()), [&](int64_t) {
    TileFetch fetch;
    for (const PagedTask *task = claim(), *next = nullptr; task != nullptr; task = next) {
      next = claim();
      run_task<F, C>(args, plan, *task, next, &fetch);
    }
  });
}

static void rotary_attention(const RotaryAttentionArgs& args) {
  if (args.int8_cache) {
#ifdef LLMK_VNNI
    return attend_paged<Int8Form, int8_t>(args);
#else
    return attend_paged<FloatForm, int8_t>(args);
#endif
  }
  if (args.dtype == DType::kFloat32) attend_paged<FloatForm, float>(args);
  if (args.dtype == DType::kFloat16) attend_paged<FloatForm, half_t>(args);
#ifdef LLMK_BF16_DOT
  if (args.dtype == DType::kBFloat16) attend_paged<BFloat16Form, bfloat_t>(args);
#else
  if (args.dtype == DType::kBFloat16) attend_paged<FloatForm, bfloat_t>(args);
#endif
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
