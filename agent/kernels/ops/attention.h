// Causal attention over keys and values that lie in a paged cache or side by side; FlashAttentionScore, PagedAttention
// and the custom op are all this one kernel, so they give the same bits.
//
//   query, out [tokens, heads * dim]; sequence s owns query_lens[s] rows from query_starts[s] and has context_lens[s]
//   keys; its row i sits at position context - query_len + i and sees the keys of positions 0 .. that one.
//   key j of sequence s:  paged   cache slot block_tables[s][j / block_size] * block_size + j % block_size
//                         plain   row key_starts[s] + j
//   with first_keys, row t of the query sees no key before position first_keys[t] (a sliding window)
//   a slot or row holds kv_heads * dim elements; query head h uses kv head h / (heads / kv_heads)
//
// This file splits the work: a task is a few tokens of one sequence for one or a few kv heads and walks all their keys.
// attention_tile.h has the arithmetic and its order.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct AttentionArgs {
  const void* query;
  void* out;
  const void* keys;
  const void* values;
  const int64_t* query_starts;
  const int64_t* key_starts;    // plain only
  const int32_t* block_tables;  // paged only; null otherwise
  const int32_t* query_lens;
  const int32_t* context_lens;
  const int64_t* first_keys;  // [tokens]; null: 0
  int64_t table_width, block_size;
  int64_t num_seqs, heads, kv_heads, dim;
  float scale;
  DType dtype;
};

static inline int64_t key_row(const AttentionArgs& args, int64_t seq, int64_t position) {
  if (args.block_tables == nullptr) return args.key_starts[seq] + position;
  const int64_t block = args.block_tables[seq * args.table_width + position / args.block_size];
  return block * args.block_size + position % args.block_size;
}

namespace reference {

void attention(const AttentionArgs& args);

}  // namespace reference
}  // namespace llmk

#ifdef LLMK_ARCH
#include "attention_tile.h"

namespace llmk {
namespace LLMK_ARCH {

// What a task computes: `count` tokens from `first` of a sequence, for some kv heads.
struct AttentionWork {
  int64_t seq, first, count, kv_head, kv_heads;
};

// Where keys [begin, begin + count) lie; the rest of the tile repeats the last one, so that whole groups can be scored.
template <class T>
static inline void locate_keys(const AttentionArgs& args, const AttentionWork& work, int64_t begin, int64_t last,
                               KeyTile<T>* tile) {
  const T* key_base = static_cast<const T*>(args.keys) + work.kv_head * args.dim;
  const T* value_base = static_cast<const T*>(args.values) + work.kv_head * args.dim;
  const int64_t stride = args.kv_heads * args.dim, count = larger(0, smaller(kKeyTile, last - begin));
  int64_t row = 0, left = 0;  // rows side by side from here
  for (int64_t i = 0; i < count; ++i, ++row, --left) {
    if (left == 0) {
      row = key_row(args, work.seq, begin + i);
      left = args.block_tables == nullptr ? count : args.block_size - (begin + i) % args.block_size;
    }
    tile->keys[i] = key_base + row * stride;
    tile->values[i] = value_base + row * stride;
  }
  for (int64_t i = count; i < kKeyTile && count > 0; ++i) tile->keys[i] = tile->keys[count - 1];
  tile->begin = begin;
  tile->count = count;
}

template <class T>
static inline void walk_keys(const AttentionArgs& args, const AttentionWork& work, AttentionTask<T>* tasks,
                             int64_t first, int64_t last) {
  KeyTile<T> tiles[2];
  first = first / kKeyTile * kKeyTile;
  locate_keys(args, work, first, last, &tiles[0]);
  for (int64_t begin = first, now = 0; begin < last; begin += kKeyTile, now ^= 1) {
    locate_keys(args, work, begin + kKeyTile, last, &tiles[now ^ 1]);
    const int64_t fetched = tasks[0].rows <= kFetchRows ? tiles[now ^ 1].count : 0;
    for (int64_t head = 0; head < work.kv_heads; ++head) {
      attend_tile(tasks[head],
                  HeadTile<T>{&tiles[now], &tiles[now ^ 1], fetched, head, ceil_div(1 << 16, work.kv_heads),
                              head * args.dim, work.kv_heads * args.dim});
    }
  }
}

// Rows [begin, begin + task.rows) of the work's tokens times the query heads of kv head `kv_head`.
template <class T>
static inline void place_rows(const AttentionArgs& args, const AttentionWork& work, int64_t kv_head, int64_t begin,
                              AttentionTask<T>* task, int64_t* first, int64_t* last) {
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t row = 0; row < task->rows; ++row) {
    const int64_t token = work.first + (begin + row) / group, head = kv_head * group + (begin + row) % group;
    const int64_t offset = ((args.query_starts[work.seq] + token) * args.heads + head) * args.dim;
    task->query[row] = static_cast<const T*>(args.query) + offset;
    task->out[row] = static_cast<T*>(args.out) + offset;
    task->visible[row] = args.context_lens[work.seq] - args.query_lens[work.seq] + token + 1;
    task->first[row] = args.first_keys == nullptr ? 0 : args.first_keys[args.query_starts[work.seq] + token];
    *first = smaller(*first, task->first[row]);
    *last = larger(*last, task->visible[row]);
  }
}

template <class T>
static inline void attend(const AttentionArgs& args, const AttentionWork& work) {
  const int64_t rows = work.count * (args.heads / args.kv_heads), padded_dim = ceil_div(args.dim, kLanes) * kLanes;
  const int64_t shared = kKeyTile * kValueLanes * kLanes + kKeyGroup * (padded_dim + 2 * kLanes);
  const int64_t floats = shared + work.kv_heads * kTaskRows * (padded_dim + kKeyTile);
  float* scratch = static_cast<float*>(thread_scratch(kScratchTile, floats * static_cast<int64_t>(sizeof(float))));
  AttentionTask<T> tasks[kTaskHeads];
  for (int64_t begin = 0; begin < rows; begin += kTaskRows) {
    int64_t first = int64_t{1} << 62, last = 0;
    for (int64_t head = 0; head < work.kv_heads; ++head) {
      AttentionTask<T>& task = tasks[head];
      task.args = &args;
      task.dim = args.dim;
      task.padded_dim = padded_dim;
      task.rows = smaller(kTaskRows, rows - begin);
      task.value_chunk = scratch;
      task.key_group = reinterpret_cast<typename Packed<T>::Type*>(scratch + kKeyTile * kValueLanes * kLanes);
      task.sums = scratch + shared + head * kTaskRows * (padded_dim + kKeyTile);
      task.weights = task.sums + kTaskRows * padded_dim;
      place_rows(args, work, work.kv_head + head, begin, &task, &first, &last);
    }
    walk_keys(args, work, tasks, first, last);
    for (int64_t head = 0; head < work.kv_heads; ++head) finish_rows(tasks[head]);
  }
}

// Few rows read more than they compute: heads that lie side by side in memory are walked together, as many as leave
// a tile and the next one in the second-level cache. Many rows take the heads one by one.
static inline int64_t heads_per_task(const AttentionArgs& args, int64_t row_tasks) {
  constexpr int64_t kTileBytes = 256 << 10;
  const int64_t tokens = args.query_starts[args.num_seqs - 1] + args.query_lens[args.num_seqs - 1];
  if (tokens * args.heads > args.num_seqs * args.kv_heads * kFetchRows) return 1;
  const int64_t by_cache = kTileBytes / (2 * kKeyTile * args.dim * size_of(args.dtype));
  const int64_t by_threads = row_tasks * args.kv_heads / (4 * num_threads());
  return larger(1, smaller(smaller(kTaskHeads, args.kv_heads), smaller(by_cache, by_threads)));
}

template <class T>
static inline void attention_typed(const AttentionArgs& args) {
  const int64_t per_task = larger(1, kTaskRows / (args.heads / args.kv_heads));  // tokens
  int64_t* starts = static_cast<int64_t*>(
      thread_scratch(kScratchDriver, (args.num_seqs + 1) * static_cast<int64_t>(sizeof(int64_t))));
  starts[0] = 0;
  for (int64_t s = 0; s < args.num_seqs; ++s) starts[s + 1] = starts[s] + ceil_div(args.query_lens[s], per_task);
  const int64_t row_tasks = starts[args.num_seqs];
  if (row_tasks == 0) return;
  const int64_t task_heads = heads_per_task(args, row_tasks), head_tasks = ceil_div(args.kv_heads, task_heads);
  // The last rows of a sequence see the most keys: they go first, so that the threads end together.
  parallel_for(row_tasks * head_tasks, [&](int64_t task) {
    const int64_t index = row_tasks - 1 - task / head_tasks;
    int64_t low = 0, high = args.num_seqs;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (starts[middle] <= index ? low : high) = middle;
    }
    AttentionWork work{low, (index - starts[low]) * per_task, 0, task % head_tasks * task_heads, 0};
    work.count = smaller(per_task, args.query_lens[low] - work.first);
    work.kv_heads = smaller(task_heads, args.kv_heads - work.kv_head);
    attend<T>(args, work);
  });
}

static void attention(const AttentionArgs& args) {
  if (args.dtype == DType::kFloat32) attention_typed<float>(args);
  if (args.dtype == DType::kFloat16) attention_typed<half_t>(args);
  if (args.dtype == DType::kBFloat16) attention_typed<bfloat_t>(args);
}

}  // namespace LLMK_ARCH
}  // namespace llmk
#endif
