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

// Panels of the tile in work.
struct TileMemory {
  Unit* keys;
  Unit* values;
  float* scales;  // of keys, then of values
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

template <class F>
static inline int64_t task_scratch_bytes(int64_t all_rows, int64_t padded_dim, int64_t query_units) {
  const int64_t per_row = F::kPasses * query_units + 2 * padded_dim + kLanes + 10;
  return 4 * (all_rows * per_row + kKeyTile * (query_units + 2) * F::kPerUnit + kKeyTile * (padded_dim + 2)) + 8192;
}

// Rotates and packs the queries of one kv head's rows.
template <class F>
static inline void place_queries(const RotaryAttentionArgs& args, const PagedTask& task, int64_t kv_head,
                                 float* buffer, HeadRows* head) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t token = args.query_starts[task.seq] + (task.first_row + row) / group;
    load_rotated(args, token, kv_head * group + (task.first_row + row) % group, buffer);
    head->factors[row] = args.scale * kLog2E;
    F::pack_query(buffer, args.dim, head->queries + row * F::kPasses * head->query_units, head->query_units,
                  head->factors + row, head->offsets + row);
  }
}

template <class F>
static inline void finish_row(const RotaryAttentionArgs& args, const PagedTask& task, int64_t kv_head, int64_t row,
                              int64_t padded_dim, float mass, float* sums) {
  const int64_t group = args.heads / args.kv_heads, position = task.first_row + row;
  const int64_t token = args.query_starts[task.seq] + position / group;
  // + 0: a sum of nothing but zeros may have either sign
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    store(sums + d, add(div(load(sums + d), broadcast(mass)), zero()));
  }
  for (int64_t d = 0; d < padded_dim; d += F::kDimStep) F::restore_order(sums + d);
  const int64_t place = (token * args.heads + kv_head * group + position % group) * args.dim;
  store_floats(args.dtype, sums, args.dim, static_cast<char*>(args.out) + place * size_of(args.dtype));
}

// Where a row's partition waits for the others.
static inline float* joined_part(const PagedTask& task, const PagedJoin& join, int64_t h, int64_t row, int64_t part,
                                 int64_t padded_dim) {
  return join.parts + ((h * task.rows + row) * (task.parts - task.seen) + part - task.seen) * part_floats(padded_dim);
}

// Ends a partition: the rows that saw it fold it into their total, or leave it for the join.
static inline void close_partition(const PagedTask& task, int64_t part, int64_t h, const HeadRows& head,
                                   const PagedJoin* join) {
  for (int64_t row = 0; row < head.rows; ++row) {
    if (head.visible[row] <= part * kPartition || head.first_key(row) >= (part + 1) * kPartition) continue;
    const float mass = sum(load(head.partition.mass + row * kLanes));
    const float* sums = head.partition.sums + row * head.padded_dim;
    if (join == nullptr) {
      fold_partition(head.partition.best[row], mass, sums, head.padded_dim, part == head.first_key(row) / kPartition,
                     head.total.best + row, head.total.mass + row, head.total.sums + row * head.padded_dim);
    } else {
      float* out = joined_part(task, *join, h, row, part, head.padded_dim);
      out[0] = head.partition.best[row];
      out[1] = mass;
      std::memcpy(out + kLanes, sums, static_cast<size_t>(head.padded_dim) * sizeof(float));
    }
  }
}

template <class F>
static inline void fold_joined(const RotaryAttentionArgs& args, const PagedTask& task, const PagedJoin& join,
                               int64_t h, const HeadRows& head) {
  for (int64_t row = 0; row < task.rows; ++row) {
    float best = 0, mass = 0;
    const int64_t parts = ceil_div(head.visible[row], kPartition), first = head.first_key(row) / kPartition;
    for (int64_t part = first; part < parts; ++part) {
      const float* from = joined_part(task, join, h, row, part, head.padded_dim);
      fold_partition(from[0], from[1], from + kLanes, head.padded_dim, part == first, &best, &mass, head.total.sums);
    }
    finish_row<F>(args, task, task.head + h, row, head.padded_dim, mass, head.total.sums);
  }
}

static inline int64_t task_end(const RotaryAttentionArgs& args, const PagedTask& task) {
  return smaller(task.end_part * kPartition, visible_keys(args, task.seq, task.first_row + task.rows - 1));
}

// How often TileFetch::some is called while a tile is worked on.
template <class F>
static inline int64_t fetch_calls(const RotaryAttentionArgs& args, const PagedTask& task) {
  const int64_t blocks = smaller(kFetchBlocks, ceil_div(task.rows, kRowBlock));
  const int64_t scores = ceil_div(ceil_div(args.dim, F::kPerUnit), kFetchUnits) * (kTileVectors / kBlockVectors);
  const int64_t values = kKeyTile / F::kPerUnit / kFetchUnits * ceil_div(args.dim, kBlockVectors * kLanes);
  return task.heads * (2 * kTileVectors + blocks * F::kPasses * (scores + values));
}

// Fetches the tile after `begin`: of this task or, at its end, the first of the thread's next task (null: none).
template <class F>
static inline void fetch_next(const RotaryAttentionArgs& args, const PagedTask& task, int64_t begin,
                              const PagedTask* next, TileFetch* fetch) {
  const int64_t end = task_end(args, task), calls = fetch_calls<F>(args, task);
  fetch->rest();
  fetch->stop();
  if (begin + kKeyTile < end) {
    fetch->start(args, task.seq, begin + kKeyTile, smaller(end, begin + 2 * kKeyTile), task.head, task.heads, calls);
  } else if (next != nullptr) {
    const int64_t first = next->first_part * kPartition;
    fetch->start(args, next->seq, first, smaller(first + kKeyTile, task_end(args, *next)), next->head, next->heads,
                 calls);
  }
}

template <class F, class C>
static inline void walk_tiles(const RotaryAttentionArgs& args, const PagedTask& task, const PagedTask* next,
                              const HeadRows* heads, const PagedJoin* join, const TileMemory& memory,
                              TileFetch* fetch) {
  const int64_t stride = head_bytes(args), end = task_end(args, task);
  for (int64_t begin = task.first_part * kPartition; begin < end; begin += kKeyTile) {
    PagedTile tile;
    locate_tile(args, task.seq, begin, end, &tile);
    fetch_next<F>(args, task, begin, next, fetch);
    for (int64_t h = 0; h < task.heads; ++h) {
      const int64_t offset = (task.head + h) * stride;
      const HeadTile now{&tile, static_cast<const char*>(args.key_cache) + offset,
                         static_cast<const char*>(args.value_cache) + offset};
      TilePanels panels{begin, 0, memory.keys, memory.values, nullptr, nullptr};
      if (sizeof(C) == 1) {
        gather_scales(tile, now.keys, memory.scales);
        gather_scales(tile, now.values, memory.scales + kKeyTile);
        panels.key_scales = memory.scales;
        panels.value_scales = memory.scales + kKeyTile;
      }
      pack_keys<F, C>(now, fetch, args.dim, memory.keys);
      panels.value_units = pack_values<F, C>(now, fetch, args.dim, heads[0].padded_dim, memory.values);
      attend_tile<F>(heads[h], panels, fetch);
    }
    if ((begin + kKeyTile) % kPartition == 0 || begin + kKeyTile >= end) {
      for (int64_t h = 0; h < task.heads; ++h) close_partition(task, begin / kPartition, h, heads[h], join);
    }
  }
}

template <class F, class C>
static inline void run_task(const RotaryAttentionArgs& args, const PagedPlan& plan, const PagedTask& task,
                            const PagedTask* next, TileFetch* fetch) {
  const int64_t padded_dim = ceil_div(args.dim, F::kDimStep) * F::kDimStep;
  const int64_t query_units = ceil_div(ceil_div(args.dim, F::kPerUnit), kLanes) * kLanes, rows = task.rows;
  const int64_t bytes = task_scratch_bytes<F>(task.heads * (rows + 32), padded_dim, query_units);
  PagedScratch scratch{static_cast<char*>(thread_scratch(kScratchTile, bytes))};
  TileMemory memory{};
  memory.keys = scratch.take<Unit>(query_units * kKeyTile);
  memory.values = scratch.take<Unit>(kKeyTile * padded_dim);
  memory.scales = scratch.take<float>(2 * kKeyTile);
  float* buffer = scratch.take<float>(args.dim + kLanes);
  int64_t* visible = scratch.take<int64_t>(rows);
  int64_t* first = args.window == 0 && args.first_keys == nullptr ? nullptr : scratch.take<int64_t>(rows);
  for (int64_t row = 0; row < rows; ++row) {
    visible[row] = visible_keys(args, task.seq, task.first_row + row);
    if (first != nullptr) first[row] = first_key(args, task.seq, task.first_row + row);
  }
  if (plan.writes && task.end_part == task.parts) {
    for (int64_t i = 0; i < args.query_lens[task.seq]; ++i) {
      write_token(args, args.query_starts[task.seq] + i, task.head, task.heads, buffer);
    }
  }
  HeadRows heads[kTaskHeads];
  for (int64_t h = 0; h < task.heads; ++h) {
    HeadRows& head = heads[h];
    head = HeadRows{rows, args.dim, padded_dim, query_units, visible, first, nullptr, nullptr, nullptr, {}, {}};
    head.queries = scratch.take<Unit>(rows * F::kPasses * query_units);
    head.factors = scratch.take<float>(rows);
    head.offsets = scratch.take<int32_t>(rows);
    head.partition = place_state(&scratch, rows, kLanes, padded_dim);
    head.total = place_state(&scratch, rows, 1, padded_dim);
    place_queries<F>(args, task, task.head + h, buffer, &head);
  }
  PagedJoin* join = task.join < 0 ? nullptr : plan.joins + task.join;
  walk_tiles<F, C>(args, task, next, heads, join, memory, fetch);
  if (join == nullptr) {
    for (int64_t h = 0; h < task.heads; ++h) {
      for (int64_t row = 0; row < rows; ++row) {
        finish_row<F>(args, task, task.head + h, row, padded_dim, heads[h].total.mass[row],
                      heads[h].total.sums + row * padded_dim);
      }
    }
  } else if (__atomic_sub_fetch(&join->waiting, 1, __ATOMIC_ACQ_REL) == 0) {
    for (int64_t h = 0; h < task.heads; ++h) fold_joined<F>(args, task, *join, h, heads[h]);
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
  const int64_t padded_dim = ceil_div(args.dim, F::kDimStep) * F::kDimStep, group = args.heads / args.kv_heads;
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
