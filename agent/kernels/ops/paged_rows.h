// The rows (query heads x tokens) that share a kv head, and what a tile of keys does to them. THE canonical order:
//
//   score    units of dim in order, one accumulator per (row, key); then the key's scale, masked past the row's position
//   tile     kKeyTile keys aligned to position 0: m' = max(m, largest score * factor), p = 2^(score * factor - m'),
//            l' = l * 2^(m - m') + p (16 lanes: keys = lane mod 16; pairs for BFloat16Form),
//            o' = o * 2^(m - m') + sum of weight * value over units of keys in order from 0
//            (online softmax of FlashAttention, Dao et al. 2022, in powers of two)
//   partition  kPartition keys aligned to position 0 start from nothing; they are folded from the first to the last
//            (as Flash-Decoding does, Dao et al. 2023), each with the same operations whoever computed them
//
// A window's first key only masks more: a tile of which a row sees nothing leaves its sums as they are, and a partition
// of which it sees nothing is not folded.
//
// On AMX the products of bfloat16 add up from zero 16 units of dims at a time and the 8 units of 16 keys, then add
// that up in order (amx_tiles.h).
//
// All of that depends on the row's own position: prefill, chunk and decode form give the same bits. Keys past the
// sequence's context are never weighed, so what lies there (even NaN) cannot matter.
#pragma once
#include <type_traits>

#include "paged_panels.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

constexpr int kPartition = 256;
constexpr int64_t kTaskRows = 96;
constexpr int kFetchUnits = 8;  // units multiplied between two calls of TileFetch
#ifdef LLMK_VEC_AVX512
constexpr int kRowBlock = 6, kBlockVectors = 4;  // rows and vectors of a panel multiplied together
#else
constexpr int kRowBlock = 2, kBlockVectors = 2;
#endif

// Running softmax of some rows: over a partition, or over all partitions so far.
struct SoftmaxState {
  float* best;  // [rows], in powers of two
  float* mass;  // partition: [rows][kLanes]; total: [rows]
  float* sums;  // [rows][padded_dim]
};

// The rows of a task: row r of head h is number h * rows + r.
struct TaskRows {
  int64_t heads, rows, dim, padded_dim, query_units;  // units of one pass
  const int64_t* visible;                             // [rows]: end of the keys each sees; never falls from row to row
  const int64_t* first;                               // [rows]: the first of them; null: 0
  Unit* queries;                                      // [heads * rows][passes][query_units]
  float* factors;                                     // [heads * rows]: score -> power of two
  int32_t* offsets;                                   // [heads * rows]: Int8ScoreProduct
  SoftmaxState partition, total;

  int64_t first_key(int64_t row) const { return first == nullptr ? 0 : first[row]; }
};

constexpr int kBlockRows = 16;

// Rows [first, first + rows) of heads [head, head + heads), up to kBlockRows together.
struct RowBlock {
  int64_t head, heads, first, rows;

  int64_t count() const { return heads * rows; }
};

using BlockScores = float[kBlockRows][kKeyTile];
template <class F>
using BlockWeights = Unit[kBlockRows][F::kPasses * kKeyTile / F::kPerUnit];

// sums[r][v] = sum over units of row r and panel vectors v: `parts` pieces of `units` each, at(part, v) the first one of a
// piece. With two passes (of int8) the second one's products are added to the shifted first.
template <class P, int kPasses, int R, int V, class At>
LLMK_INLINE void multiply(const Unit* rows, int64_t row_stride, int64_t pass_stride, int64_t parts, int64_t units,
                          int64_t panel_stride, const At& at, const int32_t* offsets, TileFetch* fetch,
                          typename P::Acc (&total)[R][V]) {
  constexpr int kSide = kPasses * R * V <= 16 ? kPasses : 1;  // passes side by side
  for (int pass = 0; pass < kPasses; pass += kSide) {
    typename P::Acc sums[kSide][R][V];
    LLMK_UNROLL
    for (int i = 0; i < kSide * R * V; ++i) sums[i / (R * V)][i / V % R][i % V] = P::clear();
    for (int64_t part = 0; part < parts; ++part) {
      const Unit* panel[V];
      LLMK_UNROLL
      for (int v = 0; v < V; ++v) panel[v] = at(part, v);
      const Unit* row = rows + pass * pass_stride + part * units;
      for (int64_t k = 0; k < units;) {
        const int64_t end = smaller(units, k + kFetchUnits);
        if (fetch != nullptr && pass == 0) fetch->some(V * (end - k));
        for (; k < end; ++k) {
          typename P::Operand lanes[V];
          LLMK_UNROLL
          for (int v = 0; v < V; ++v) lanes[v] = P::lanes(panel[v] + k * panel_stride);
          LLMK_UNROLL
          for (int i = 0; i < kSide * R; ++i) {
            const typename P::Operand x = P::spread(row + i % R * row_stride + i / R * pass_stride + k);
            LLMK_UNROLL
            for (int v = 0; v < V; ++v) sums[i / R][i % R][v] = P::step(x, lanes[v], sums[i / R][i % R][v]);
          }
        }
      }
    }
    LLMK_UNROLL
    for (int i = 0; i < R * V; ++i) {
      auto& out = total[i / V][i % V];
      const int32_t offset = offsets == nullptr ? 0 : offsets[i / V];
      if (kPasses == 1) out = sums[0][i / V][i % V];
      if (kPasses > 1 && kSide > 1) out = P::join(P::shift(sums[0][i / V][i % V], offset), sums[kSide - 1][i / V][i % V]);
      if (kPasses > 1 && kSide == 1) {
        out = pass == 0 ? P::shift(sums[0][i / V][i % V], offset) : P::join(out, sums[0][i / V][i % V]);
      }
    }
  }
}

// Calls function(row, std::integral_constant rows) over `rows` rows in blocks of about equal size.
template <class Function>
LLMK_INLINE void for_row_blocks(int64_t rows, const Function& function) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, size = ceil_div(left, ceil_div(left, kRowBlock));
#ifdef LLMK_VEC_AVX512
    if (size == 6) function(row, std::integral_constant<int, 6>());
    if (size == 5) function(row, std::integral_constant<int, 5>());
    if (size == 4) function(row, std::integral_constant<int, 4>());
    if (size == 3) function(row, std::integral_constant<int, 3>());
#endif
    if (size == 2) function(row, std::integral_constant<int, 2>());
    if (size == 1) function(row, std::integral_constant<int, 1>());
    row += size;
  }
}

// Scores of `rows` rows of one head from number `row` on.
template <class F>
static inline void score_rows(const TaskRows& all, const TilePanels& panels, int64_t row, int64_t rows,
                              TileFetch* fetch, float (*scores)[kKeyTile]) {
  using P = typename F::ScoreProduct;
  const int64_t units = ceil_div(all.dim, F::kPerUnit), stride = F::kPasses * all.query_units;
  for_row_blocks(rows, [&](int64_t r, auto size) {
    constexpr int R = decltype(size)::value;
    for (int g = 0; g < kTileGroups; g += kBlockVectors) {
      typename P::Acc total[R][kBlockVectors];
      multiply<P, F::kPasses, R, kBlockVectors>(
          all.queries + (row + r) * stride, stride, all.query_units, 1, units, panels.key_stride,
          [&](int64_t, int v) { return panels.keys[g + v]; }, all.offsets + row + r, r == 0 ? fetch : nullptr, total);
      LLMK_UNROLL
      for (int i = 0; i < R * kBlockVectors; ++i) {
        store(scores[r + i / kBlockVectors] + (g + i % kBlockVectors) * kLanes,
              P::result(total[i / kBlockVectors][i % kBlockVectors]));
      }
    }
  });
}

// The first `hidden` lanes become `other`: keys before a window, of which a row meets few tiles.
static inline __attribute__((noinline)) Vec hide_lanes(Vec v, int64_t hidden, float other) {
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < smaller(hidden, kLanes); ++i) lanes[i] = other;
  return load(lanes);
}

struct BlockRow {
  int64_t number, row;  // of TaskRows; within its head
  const TilePanels* panels;
};

// Scores -> weights; updates best and mass; `decays`: by what the earlier sums shrink.
template <class F, int R>
LLMK_INLINE void soften_rows(const TaskRows& all, const BlockRow* rows, bool fresh, float (*scores)[kKeyTile],
                             Unit (*weights)[F::kPasses * kKeyTile / F::kPerUnit], float* decays, float* steps) {
  constexpr float kLowest = -3.4028235e38f;
  alignas(64) float before[kLanes] = {}, after[kLanes] = {}, decay[kLanes];
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    const BlockRow& row = rows[r];
    const TilePanels& panels = *row.panels;
    const int64_t visible = all.visible[row.row] - panels.begin, hidden = all.first_key(row.row) - panels.begin;
    Vec top = broadcast(kLowest);
    LLMK_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      Vec score = load(scores[r] + i * kLanes);
      if (panels.key_scales != nullptr) score = mul(score, load(panels.key_scales + i * kLanes));
      if (hidden > i * kLanes) score = hide_first(score, hidden - i * kLanes, kLowest);
      if (visible < kKeyTile) score = keep_first(score, larger(0, visible - i * kLanes), kLowest);
      if (panels.key_scales != nullptr || visible < kKeyTile || hidden > i * kLanes) store(scores[r] + i * kLanes, score);
      top = maximum(top, score);
    }
    const float best = largest(top) * all.factors[row.number];
    before[r] = fresh ? best : all.partition.best[row.number];
    after[r] = before[r] > best ? before[r] : best;
    all.partition.best[row.number] = after[r];
  }
  store(decay, power_of_two<false>(sub(load(before), load(after))));
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    const BlockRow& row = rows[r];
    const TilePanels& panels = *row.panels;
    const int64_t visible = all.visible[row.row] - panels.begin, hidden = all.first_key(row.row) - panels.begin;
    const Vec factor = broadcast(all.factors[row.number]), least = broadcast(-after[r]);
    Vec p[kTileVectors];
    LLMK_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      p[i] = power_of_two<F::kCoarse>(fma(load(scores[r] + i * kLanes), factor, least));
      if (visible < kKeyTile) p[i] = keep_first(p[i], larger(0, visible - i * kLanes), 0.0f);
      if (hidden > i * kLanes) p[i] = hide_first(p[i], hidden - i * kLanes, 0.0f);
    }
    const Vec mass = F::pack_weights(p, panels.value_scales, weights[r], &steps[r]);
    float* sum = all.partition.mass + row.number * kLanes;
    store(sum, fresh ? mass : fma(load(sum), broadcast(decay[r]), mass));
    decays[r] = decay[r];
  }
}

template <class F, int R, int V>
LLMK_INLINE void add_values(const TaskRows& all, const TilePanels& panels, int64_t row, int64_t d, bool fresh,
                            const Unit* weights, const float* decays, const float* steps, TileFetch* fetch) {
  using P = typename F::ValueProduct;
  constexpr int64_t kPass = kKeyTile / F::kPerUnit;
  typename P::Acc total[R][V];
  multiply<P, F::kPasses, R, V>(
      weights, F::kPasses * kPass, kPass, panels.groups, kGroupKeys / F::kPerUnit, panels.value_stride,
      [&](int64_t g, int v) { return panels.values[g] + d + v * kLanes; }, nullptr, fetch, total);
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    float* sums = all.partition.sums + (row + r) * all.padded_dim + d;
    LLMK_UNROLL
    for (int v = 0; v < V; ++v) {
      Vec part = P::result(total[r][v]);
      if (F::kPasses > 1) part = mul(part, broadcast(steps[r]));
      store(sums + v * kLanes, fresh ? part : fma(load(sums + v * kLanes), broadcast(decays[r]), part));
    }
  }
}

// The values' part for `rows` rows of one head from number `row` on.
template <class F>
static inline void value_rows(const TaskRows& all, const TilePanels& panels, int64_t row, int64_t rows, bool fresh,
                              const Unit (*weights)[F::kPasses * kKeyTile / F::kPerUnit], const float* decays,
                              const float* steps, TileFetch* fetch) {
  for_row_blocks(rows, [&](int64_t r, auto size) {
    constexpr int R = decltype(size)::value, V = kBlockVectors;
    TileFetch* fetching = r == 0 ? fetch : nullptr;
    int64_t d = 0;
    for (; d + V * kLanes <= all.padded_dim; d += V * kLanes) {
      add_values<F, R, V>(all, panels, row + r, d, fresh, weights[r], decays + r, steps + r, fetching);
    }
    for (; V > 2 && d + 2 * kLanes <= all.padded_dim; d += 2 * kLanes) {
      add_values<F, R, 2>(all, panels, row + r, d, fresh, weights[r], decays + r, steps + r, fetching);
    }
    if (d < all.padded_dim) {
      add_values<F, R, 1>(all, panels, row + r, d, fresh, weights[r], decays + r, steps + r, fetching);
    }
  });
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk

#include "paged_amx.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

#ifdef LLMK_VEC_AVX512
constexpr int kSoftRows = 4;
#else
constexpr int kSoftRows = 2;
#endif

// What a tile of keys does to a block of rows: all scores, then all weights, then all sums, so that no step waits for
// the one before. `panels`: of the block's heads; `tiles`: AMX makes the products.
template <class F>
static inline void attend_block(const TaskRows& all, const TilePanels* panels, const RowBlock& block, bool tiles,
                                TileFetch* fetch) {
  alignas(64) BlockScores scores;
  alignas(64) BlockWeights<F> weights;
  float decays[kBlockRows], steps[kBlockRows];
  BlockRow rows[kBlockRows];
  const bool fresh = panels->begin % kPartition == 0;
  for (int64_t h = 0; h < block.heads; ++h) {
    const int64_t number = (block.head + h) * all.rows + block.first, at = h * block.rows;
    for (int64_t r = 0; r < block.rows; ++r) rows[at + r] = {number + r, block.first + r, panels + h};
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles) {
        score_tiles<F>(all, panels[h], number, block.rows, fetch, scores + at);
        continue;
      }
    }
#endif
    score_rows<F>(all, panels[h], number, block.rows, fetch, scores + at);
  }
  int64_t r = 0;
  for (const int64_t count = block.count(); r < count;) {
    if (r + kSoftRows <= count) {
      soften_rows<F, kSoftRows>(all, rows + r, fresh, scores + r, weights + r, decays + r, steps + r);
      r += kSoftRows;
    } else {
      soften_rows<F, 1>(all, rows + r, fresh, scores + r, weights + r, decays + r, steps + r);
      ++r;
    }
  }
#ifdef LLMK_AMX
  if constexpr (kHasTiles<F>) {
    if (tiles) return value_tiles<F>(all, panels, block, fresh, weights, decays, steps, fetch);
  }
#endif
  static_cast<void>(tiles);
  for (int64_t h = 0; h < block.heads; ++h) {
    const int64_t at = h * block.rows;
    value_rows<F>(all, panels[h], rows[at].number, block.rows, fresh, weights + at, decays + at, steps + at, fetch);
  }
}

// Adds a partition's result to the total of the partitions before it.
LLMK_INLINE void fold_partition(float part_best, float part_mass, const float* part, int64_t padded_dim, bool first,
                                float* best, float* mass, float* sums) {
  if (first) {
    *best = part_best;
    *mass = part_mass;
    std::memcpy(sums, part, static_cast<size_t>(padded_dim) * sizeof(float));
    return;
  }
  const float top = *best > part_best ? *best : part_best;
  alignas(64) float shrink[kLanes] = {*best - top, part_best - top};
  store(shrink, power_of_two<false>(load(shrink)));
  *best = top;
  *mass = *mass * shrink[0] + part_mass * shrink[1];
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    store(sums + d, fma(load(part + d), broadcast(shrink[1]), mul(load(sums + d), broadcast(shrink[0]))));
  }
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
