// One tile of kKeyTile keys for the rows of an attention task: scores, online softmax, weighted sum of values.
//
// Order: keys in tiles aligned to position 0; scores by ops/dot.h; per row and tile the online softmax of
// FlashAttention (Dao et al. 2022): m' = max(m, tile), l' = l * e^(m - m') + sum(p), o' = o * e^(m - m'), then
// o' += p_j * v_j key after key. All of that depends on the row's position only: decode, chunk and prefill agree. Keys
// a row may not see are scored at most, never weighed, so what lies there (even NaN) cannot matter.
#pragma once
#include "../common/types.h"
#include "dot.h"

namespace llmk {
namespace LLMK_ARCH {

constexpr int kKeyTile = 64;
constexpr int kTaskRows = 32;
constexpr int kTaskHeads = 16;  // most kv heads of a task
#ifdef LLMK_VEC_AVX512
constexpr int kScoreRows = 4, kKeyGroup = 16;   // scores done together: R rows with kKeyGroup / R keys
constexpr int kValueRows = 4, kValueLanes = 4;  // rows and vectors of a value added up together
#else
constexpr int kScoreRows = 2, kKeyGroup = 4;
constexpr int kValueRows = 2, kValueLanes = 2;
#endif
constexpr int kFewRows = 4;     // up to here keys and values are used as they lie, above they are packed first
constexpr int kFetchRows = 16;  // up to here the next tile is fetched; more rows have work enough to wait behind
constexpr int kFetchStep = 16;  // keys

// The rows that share a kv head.
template <class T>
struct AttentionTask {
  const AttentionArgs* args;
  int64_t rows, dim, padded_dim;
  const T* query[kTaskRows];
  T* out[kTaskRows];
  int64_t first[kTaskRows];    // the first key this row sees
  int64_t visible[kTaskRows];  // end of the keys this row sees
  float best[kTaskRows];       // running maximum of the scores
  float mass[kTaskRows];       // running sum of the weights
  float* sums;                 // [rows][padded_dim]
  float* weights;              // [rows][kKeyTile]: scores, then their exponentials
  float* value_chunk;          // [kKeyTile][kValueLanes * kLanes]: part of the tile's values as floats
  typename Packed<T>::Type* key_group;  // a few keys, packed for ops/dot.h
};

// Where the keys and values of a tile lie, for the first kv head of those walked together.
template <class T>
struct KeyTile {
  int64_t begin, count;  // positions
  const T* keys[kKeyTile];
  const T* values[kKeyTile];
};

// What one kv head works on now, and its share of fetching the next tile: while head `index` works on key j, the
// row (64 * index + j) / heads of keys or values, `width` elements, comes into the second-level cache.
template <class T>
struct HeadTile {
  const KeyTile<T>* now;
  const KeyTile<T>* next;
  int64_t fetched;  // rows of the next tile to fetch
  int64_t index, share, offset, width;  // share: 65536 / heads, rounded up

  const T* key(int64_t j) const { return now->keys[j] + offset; }
  const T* value(int64_t j) const { return now->values[j] + offset; }

  // Call it for every key; it works once per kFetchStep of them.
  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops the calls.
  __attribute__((always_inline)) void fetch(const T* const* rows, int64_t key) const {
    if (key % kFetchStep != 0 || fetched == 0) return;
    const int64_t from = ((index * kKeyTile + key) * share) >> 16;
    const int64_t to = smaller(((index * kKeyTile + key + kFetchStep) * share) >> 16, fetched);
    for (int64_t j = from; j < to; ++j) {
      for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(rows[j] + i, 0, 2);
    }
  }
};

template <int R, int C, class T, class W>
LLMK_INLINE void score_tile(AttentionTask<T>& task, const W& w, int64_t row, int64_t key) {
  const T* x[R];
  Vec total[R][C];
  float scores[R * C];
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) x[r] = task.query[row + r];
  clear(total);
  dot_tile<R, C>(x, w, task.dim, total);
  sum_tile(total, scores);
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) std::memcpy(task.weights + (row + r) * kKeyTile + key, scores + r * C, C * sizeof(float));
}

// The scores of R rows with all keys of the tile.
template <int R, class T>
static inline void score_few_rows(AttentionTask<T>& task, const HeadTile<T>& tile, int64_t row) {
  constexpr int C = kKeyGroup / R;
  for (int64_t key = 0; key < tile.now->count; key += C) {
    ColumnPointers<C, T> w;
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) w.column[c] = tile.key(key + c);
    if (row == 0) tile.fetch(tile.next->keys, key);
    score_tile<R, C>(task, w, row, key);
  }
}

// Many rows: each group of keys is packed once for all of them.
template <class T>
static inline int64_t score_many_rows(AttentionTask<T>& task, const HeadTile<T>& tile) {
  using P = typename Packed<T>::Type;
  constexpr int R = kScoreRows, C = kKeyGroup / R, kStep = Dot<T, P>::kStep;
  const int64_t rows = task.rows / R * R;
  for (int64_t key = 0; key < tile.now->count; key += C) {
    P* out = task.key_group;
    for (int64_t d = 0; d < task.dim; d += kStep) {
      for (int c = 0; c < C; ++c, out += kStep) copy_step(out, tile.key(key + c) + d, smaller(kStep, task.dim - d));
    }
    tile.fetch(tile.next->keys, key);
    for (int64_t row = 0; row < rows; row += R) {
      score_tile<R, C>(task, PackedColumns<C, P>{task.key_group}, row, key);
    }
  }
  return rows;
}

template <class T>
static inline void score_rows(AttentionTask<T>& task, const HeadTile<T>& tile) {
  int64_t row = task.rows > kFewRows ? score_many_rows(task, tile) : 0;
  for (; row + kScoreRows <= task.rows; row += kScoreRows) score_few_rows<kScoreRows>(task, tile, row);
  for (; row + 2 <= task.rows; row += 2) score_few_rows<2>(task, tile, row);
  if (row < task.rows) score_few_rows<1>(task, tile, row);
}

// Turns the scores of a row's first `keys` keys of this tile, less `hidden` at its start, into weights and rescales
// what was summed before.
template <class T>
static inline void soften_row(AttentionTask<T>& task, int64_t row, int64_t keys, int64_t hidden, bool first_tile) {
  constexpr float kLowest = -3.4028235e38f;
  float* weights = task.weights + row * kKeyTile;
  const Vec scale = broadcast(task.args->scale);
  Vec scores[kKeyTile / kLanes];
  Vec top = broadcast(kLowest);
  for (int i = 0; i < kKeyTile / kLanes; ++i) {
    const int64_t n = larger(0, smaller(kLanes, keys - i * kLanes));
    scores[i] = mul(load_n(weights + i * kLanes, n), scale);
    if (hidden > i * kLanes) scores[i] = hide_first(scores[i], hidden - i * kLanes, kLowest);
    top = maximum(top, keep_first(scores[i], n, kLowest));
  }
  const float previous = first_tile ? kLowest : task.best[row];
  float best = largest(top);
  if (previous > best) best = previous;
  Vec total = zero();
  for (int i = 0; i < kKeyTile / kLanes; ++i) {
    const int64_t n = larger(0, smaller(kLanes, keys - i * kLanes));
    Vec weight = keep_first(exponential(sub(scores[i], broadcast(best))), n, 0.0f);
    if (hidden > i * kLanes) weight = hide_first(weight, hidden - i * kLanes, 0.0f);
    store(weights + i * kLanes, weight);
    total = add(total, weight);
  }
  task.best[row] = best;
  float* sums = task.sums + row * task.padded_dim;
  if (first_tile) {
    task.mass[row] = sum(total);
    for (int64_t i = 0; i < task.padded_dim; i += kLanes) store(sums + i, zero());
  } else if (previous == best) {  // e^0 is exactly 1
    task.mass[row] += sum(total);
  } else {
    const float decay = exponential(previous - best);
    task.mass[row] = task.mass[row] * decay + sum(total);
    for (int64_t i = 0; i < task.padded_dim; i += kLanes) store(sums + i, mul(load(sums + i), broadcast(decay)));
  }
}

// sums[row .. row + R)[d .. d + V vectors) += weights * value(key) for keys [begin, end), one key after the other.
// `value(key)` points at element d; only `n` of the last vector's lanes exist.
template <int R, int V, class T, class Value>
LLMK_INLINE void add_values(AttentionTask<T>& task, int64_t row, int64_t d, int64_t begin, int64_t end, int64_t n,
                            const Value& value) {
  Vec total[R][V];
  float* sums = task.sums + row * task.padded_dim + d;
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) total[i / V][i % V] = load(sums + i / V * task.padded_dim + i % V * kLanes);
  const float* weights = task.weights + row * kKeyTile;
  for (int64_t key = begin; key < end; ++key) {
    const auto* lanes = value(key);
    Vec part[V];
    LLMK_UNROLL
    for (int v = 0; v < V; ++v) {
      part[v] = v + 1 < V || n == kLanes ? load(lanes + v * kLanes) : load_n(lanes + v * kLanes, n);
    }
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec weight = broadcast(weights[r * kKeyTile + key]);
      LLMK_UNROLL
      for (int v = 0; v < V; ++v) total[r][v] = fma(weight, part[v], total[r][v]);
    }
  }
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) store(sums + i / V * task.padded_dim + i % V * kLanes, total[i / V][i % V]);
}

// Where the keys that the row sees of a tile end; those before its first one weigh nothing.
template <class T>
static inline int64_t visible_in_tile(const AttentionTask<T>& task, int64_t row, int64_t tile) {
  if (task.first[row] >= tile + kKeyTile) return 0;
  return larger(0, smaller(kKeyTile, task.visible[row] - tile));
}

// V vectors of the values from element d on, for all rows: some rows together as far as all see, then each alone.
template <int V, class T, class Value>
static inline void add_values_rows(AttentionTask<T>& task, int64_t d, int64_t tile, int64_t n, const Value& value) {
  constexpr int R = kValueRows;
  int64_t row = 0;
  for (; row + R <= task.rows; row += R) {
    int64_t common = kKeyTile;
    for (int r = 0; r < R; ++r) common = smaller(common, visible_in_tile(task, row + r, tile));
    if (common > 0) add_values<R, V>(task, row, d, 0, common, n, value);
    for (int r = 0; r < R; ++r) {
      const int64_t visible = visible_in_tile(task, row + r, tile);
      if (visible > common) add_values<1, V>(task, row + r, d, common, visible, n, value);
    }
  }
  for (; row < task.rows; ++row) {
    const int64_t visible = visible_in_tile(task, row, tile);
    if (visible > 0) add_values<1, V>(task, row, d, 0, visible, n, value);
  }
}

template <int V, class T>
static inline void add_chunk(AttentionTask<T>& task, const HeadTile<T>& tile, int64_t d) {
  const int64_t n = smaller(kLanes, task.dim - d - (V - 1) * kLanes), begin = tile.now->begin;
  if (task.rows <= kFewRows) {
    return add_values_rows<V>(task, d, begin, n, [&tile, d](int64_t key) {
      if (d == 0) tile.fetch(tile.next->values, key);
      return tile.value(key) + d;
    });
  }
  for (int64_t key = 0; key < tile.now->count; ++key) {
    float* chunk = task.value_chunk + key * V * kLanes;
    if (d == 0) tile.fetch(tile.next->values, key);
    for (int v = 0; v < V; ++v) {
      store(chunk + v * kLanes, load_n(tile.value(key) + d + v * kLanes, v + 1 < V ? kLanes : n));
    }
  }
  add_values_rows<V>(task, d, begin, kLanes, [&task](int64_t key) { return task.value_chunk + key * V * kLanes; });
}

template <class T>
static inline void attend_tile(AttentionTask<T>& task, const HeadTile<T>& tile) {
  const int64_t begin = tile.now->begin;
  score_rows(task, tile);
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t visible = visible_in_tile(task, row, begin);
    const int64_t first = task.first[row];
    if (visible > 0) soften_row(task, row, visible, first - begin, begin == first / kKeyTile * kKeyTile);
  }
  constexpr int V = kValueLanes;
  int64_t d = 0;
  for (; d + V * kLanes <= task.padded_dim; d += V * kLanes) add_chunk<V>(task, tile, d);
  for (; V > 2 && d + 2 * kLanes <= task.padded_dim; d += 2 * kLanes) add_chunk<2>(task, tile, d);
  if (d < task.padded_dim) add_chunk<1>(task, tile, d);
}

template <class T>
static inline void finish_rows(AttentionTask<T>& task) {
  for (int64_t row = 0; row < task.rows; ++row) {
    const float* sums = task.sums + row * task.padded_dim;
    const Vec mass = broadcast(task.mass[row]);
    int64_t d = 0;
    for (; d + kLanes <= task.dim; d += kLanes) store(task.out[row] + d, div(load(sums + d), mass));
    if (d < task.dim) store_n(task.out[row] + d, div(load(sums + d), mass), task.dim - d);
  }
}

}  // namespace LLMK_ARCH
}  // namespace llmk
