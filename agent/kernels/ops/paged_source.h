// Prepares the keys and values that a task of paged attention reads: prefetches them, and unpacks them to panels if the
// products cannot read the cache directly.
#pragma once
#include "paged_blocks.h"
#include "paged_plan.h"

namespace llmk::LLMK_ARCH::paged {

// The memory for the keys and values of one partition. A task processes one partition at a time.
struct PanelMemory {
  Unit* keys;     // keys of one head, if the products do not read the cache directly
  Unit* values;   // values of one head
  float* scales;  // [kTaskHeads][2][kPartition]: scales of keys, then of values
};

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

}  // namespace llmk::LLMK_ARCH::paged
