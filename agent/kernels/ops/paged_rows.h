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
// All of that depends on the row's own position: prefill, chunk and decode form give the same bits. Keys past the
// sequence's context are never weighed, so what lies there (even NaN) cannot matter.
#pragma once
#include "paged_panels.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

constexpr int kPartition = 256;
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

struct HeadRows {
  int64_t rows, dim, padded_dim, query_units;  // units of one pass
  const int64_t* visible;                      // end of the keys each row sees; never falls from row to row
  const int64_t* first;                        // the first of them; null: 0
  Unit* queries;                               // [rows][passes][query_units]
  float* factors;                              // [rows]: score -> power of two
  int32_t* offsets;                            // [rows]: Int8ScoreProduct
  SoftmaxState partition, total;

  int64_t first_key(int64_t row) const { return first == nullptr ? 0 : first[row]; }
};

struct TilePanels {
  int64_t begin, value_units;
  const Unit* keys;
  const Unit* values;
  const float* key_scales;  // int8 caches; null otherwise
  const float* value_scales;
};

// total[r][v] += sum over units of row r and panel vectors v; kPasses products with a shift between.
template <class P, int kPasses, int R, int V>
LLMK_INLINE void multiply(const Unit* rows, int64_t row_stride, int64_t pass_stride, const Unit* panel,
                          int64_t panel_stride, int64_t units, const int32_t* offsets, TileFetch* fetch,
                          typename P::Acc (&total)[R][V]) {
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) total[i / V][i % V] = P::clear();
  for (int pass = 0; pass < kPasses; ++pass, rows += pass_stride) {
    if (pass > 0) {
      LLMK_UNROLL
      for (int i = 0; i < R * V; ++i) {
        total[i / V][i % V] = P::shift(total[i / V][i % V], offsets == nullptr ? 0 : offsets[i / V]);
      }
    }
    for (int64_t k = 0; k < units;) {
      if (fetch != nullptr) fetch->some();
      for (const int64_t end = smaller(units, k + kFetchUnits); k < end; ++k) {
        typename P::Operand lanes[V];
        LLMK_UNROLL
        for (int v = 0; v < V; ++v) lanes[v] = P::lanes(panel + k * panel_stride + v * kLanes);
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) {
          const typename P::Operand row = P::spread(rows + r * row_stride + k);
          LLMK_UNROLL
          for (int v = 0; v < V; ++v) total[r][v] = P::step(row, lanes[v], total[r][v]);
        }
      }
    }
  }
}

template <class F, int R>
LLMK_INLINE void score_block(const HeadRows& head, const TilePanels& panels, int64_t row, TileFetch* fetch,
                             float (&scores)[R][kKeyTile]) {
  using P = typename F::ScoreProduct;
  const int64_t units = ceil_div(head.dim, F::kPerUnit), stride = F::kPasses * head.query_units;
  for (int key = 0; key < kKeyTile; key += kBlockVectors * kLanes) {
    typename P::Acc total[R][kBlockVectors];
    multiply<P, F::kPasses, R, kBlockVectors>(head.queries + row * stride, stride, head.query_units, panels.keys + key,
                                              kKeyTile, units, head.offsets + row, fetch, total);
    LLMK_UNROLL
    for (int i = 0; i < R * kBlockVectors; ++i) {
      store(scores[i / kBlockVectors] + key + i % kBlockVectors * kLanes,
            P::result(total[i / kBlockVectors][i % kBlockVectors]));
    }
  }
}

// Scores -> weights in place of the row's units; updates best and mass; `decays`: by what the earlier sums shrink.
template <class F, int R>
LLMK_INLINE void soften_block(const HeadRows& head, const TilePanels& panels, int64_t row, bool fresh,
                              float (&scores)[R][kKeyTile], Unit (&weights)[R][F::kPasses * kKeyTile / F::kPerUnit],
                              float (&decays)[kLanes], float (&steps)[R]) {
  constexpr float kLowest = -3.4028235e38f;
  float before[kLanes] = {}, after[kLanes] = {};
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    const int64_t visible = head.visible[row + r] - panels.begin, hidden = head.first_key(row + r) - panels.begin;
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
    const float best = largest(top) * head.factors[row + r];
    before[r] = fresh ? best : head.partition.best[row + r];
    after[r] = before[r] > best ? before[r] : best;
    head.partition.best[row + r] = after[r];
  }
  store(decays, power_of_two<false>(sub(load(before), load(after))));
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    const int64_t visible = head.visible[row + r] - panels.begin, hidden = head.first_key(row + r) - panels.begin;
    const Vec factor = broadcast(head.factors[row + r]), least = broadcast(-after[r]);
    Vec p[kTileVectors];
    LLMK_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      p[i] = power_of_two<F::kCoarse>(fma(load(scores[r] + i * kLanes), factor, least));
      if (visible < kKeyTile) p[i] = keep_first(p[i], larger(0, visible - i * kLanes), 0.0f);
      if (hidden > i * kLanes) p[i] = hide_first(p[i], hidden - i * kLanes, 0.0f);
    }
    const Vec mass = F::pack_weights(p, panels.value_scales, weights[r], &steps[r]);
    float* sum = head.partition.mass + (row + r) * kLanes;
    store(sum, fresh ? mass : fma(load(sum), broadcast(decays[r]), mass));
  }
}

template <class F, int R, int V>
LLMK_INLINE void add_values(const HeadRows& head, const TilePanels& panels, int64_t row, int64_t d, bool fresh,
                            const Unit* weights, const float (&decays)[kLanes], const float (&steps)[R],
                            TileFetch* fetch) {
  using P = typename F::ValueProduct;
  constexpr int64_t kPass = kKeyTile / F::kPerUnit;
  typename P::Acc total[R][V];
  multiply<P, F::kPasses, R, V>(weights, F::kPasses * kPass, kPass, panels.values + d, head.padded_dim,
                                panels.value_units, nullptr, fetch, total);
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    float* sums = head.partition.sums + (row + r) * head.padded_dim + d;
    LLMK_UNROLL
    for (int v = 0; v < V; ++v) {
      Vec part = P::result(total[r][v]);
      if (F::kPasses > 1) part = mul(part, broadcast(steps[r]));
      store(sums + v * kLanes, fresh ? part : fma(load(sums + v * kLanes), broadcast(decays[r]), part));
    }
  }
}

template <class F, int R>
static inline void attend_block(const HeadRows& head, const TilePanels& panels, int64_t row, TileFetch* fetch) {
  alignas(64) float scores[R][kKeyTile];
  alignas(64) Unit weights[R][F::kPasses * kKeyTile / F::kPerUnit];
  alignas(64) float decays[kLanes];
  float steps[R];
  const bool fresh = panels.begin % kPartition == 0;
  score_block<F, R>(head, panels, row, fetch, scores);
  soften_block<F, R>(head, panels, row, fresh, scores, weights, decays, steps);
  constexpr int V = kBlockVectors;
  int64_t d = 0;
  for (; d + V * kLanes <= head.padded_dim; d += V * kLanes) {
    add_values<F, R, V>(head, panels, row, d, fresh, weights[0], decays, steps, fetch);
  }
  for (; V > 2 && d + 2 * kLanes <= head.padded_dim; d += 2 * kLanes) {
    add_values<F, R, 2>(head, panels, row, d, fresh, weights[0], decays, steps, fetch);
  }
  if (d < head.padded_dim) add_values<F, R, 1>(head, panels, row, d, fresh, weights[0], decays, steps, fetch);
}

// One tile for all rows that see any of it, in blocks of about equal size.
template <class F>
static inline void attend_tile(const HeadRows& head, const TilePanels& panels, TileFetch* fetch) {
  int64_t row = 0;
  while (row < head.rows && head.visible[row] <= panels.begin) ++row;
  for (int block = 0; row < head.rows; ++block) {
    if (block == kFetchBlocks) fetch = nullptr;
    const int64_t left = head.rows - row, size = ceil_div(left, ceil_div(left, kRowBlock));
#ifdef LLMK_VEC_AVX512
    if (size == 6) attend_block<F, 6>(head, panels, row, fetch);
    if (size == 5) attend_block<F, 5>(head, panels, row, fetch);
    if (size == 4) attend_block<F, 4>(head, panels, row, fetch);
    if (size == 3) attend_block<F, 3>(head, panels, row, fetch);
#endif
    if (size == 2) attend_block<F, 2>(head, panels, row, fetch);
    if (size == 1) attend_block<F, 1>(head, panels, row, fetch);
    row += size;
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
