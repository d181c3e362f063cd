// The products of paged attention (paged_rows.h) with vector registers: the scores, and the weighted sums of values.
// paged_amx.h has the same products on AMX tiles.
#pragma once
#include <type_traits>

#include "paged_rows.h"

namespace llmk::LLMK_ARCH::paged {

constexpr int kFetchUnits = 8;  // number of units that are multiplied between two prefetches

// Sizes of a register tile: kMostRows rows are multiplied by kBlockVectors vectors of a panel at a time. The sums just
// fit into the registers. Int8Form multiplies in two passes with separate sums, so its tile has fewer rows.
#if defined(LLMK_VEC_AVX512)
template <int kPasses>
constexpr int kMostRows = 6 / kPasses;
template <int kPasses, int kRows>
constexpr int kBlockVectors = 4;
#elif defined(LLMK_VEC_AVX2)
template <int kPasses>
constexpr int kMostRows = 6 / kPasses;
template <int kPasses, int kRows>
constexpr int kBlockVectors = kPasses * kRows <= 3 ? 2 : 1;
#else
template <int kPasses>
constexpr int kMostRows = 2 / kPasses;
template <int kPasses, int kRows>
constexpr int kBlockVectors = 2;
#endif

// The prefetching of several blocks of rows that read the same keys. Each block prefetches an equal part of the cache
// lines.
struct SharedFetch {
  TileFetch* fetch;  // null: nothing is prefetched
  int64_t blocks;
};

// The rows that a product multiplies: the address of the first row, and the distances to the next row and to the next
// pass. Distances are in units. Only Int8Form has two passes, for the high and for the low bytes.
struct ProductRows {
  const Unit* units;
  int64_t stride, pass_stride;
};

// Adds the products of one unit of WordForm to the sums. `row` is the unit of the first row, and `stride` the distance
// to the next row. The units of the panels are at panel[v] + at.
template <class P, int R, int V>
LLMK_INLINE void multiply_words(const Unit* const (&panel)[V], int64_t at, const Unit* row, int64_t stride,
                                typename P::Acc (&sums)[R][V]) {
  LLMK_UNROLL
  for (int j = 0; j < P::kParts * V; ++j) {
    const typename P::Acc part = P::part(panel[j % V] + at, j / V);
    LLMK_UNROLL
    for (int i = 0; i < R; ++i) {
      add_product(&sums[i][j % V], part, reinterpret_cast<const int16_t*>(row + i * stride + j / V));
    }
  }
}

// Adds the dot product of row r and panel vector v to total[r][v], for each r and v. The product covers the pieces
// [begin, end) of the depth. A piece is `units` consecutive units of the depth, and at(piece, v) returns the address of
// its first unit.
//
// Int8Form is different: it overwrites `total` instead of adding to it. It has two passes (paged_units.h). It shifts
// the sums of the first pass and then adds the sums of the second pass.
template <class P, int kPasses, int R, int V, class At>
LLMK_INLINE void multiply(const ProductRows& rows, int64_t begin, int64_t end, int64_t units, int64_t panel_stride,
                          const At& at, const int32_t* offsets, SharedFetch shared, typename P::Acc (&total)[R][V]) {
  static_assert(R <= kMostRows<kPasses> && V <= kBlockVectors<kPasses, R>, "the sums stay in registers");
  typename P::Acc sums[kPasses][R][V];
  LLMK_UNROLL
  for (int i = 0; i < kPasses * R * V; ++i) {
    sums[i / (R * V)][i / V % R][i % V] = kPasses == 1 ? total[i / V % R][i % V] : P::clear();
  }
  const int64_t lines = ceil_div(V * smaller(units, kFetchUnits), shared.blocks);
  for (int64_t piece = begin; piece < end; ++piece) {
    const Unit* panel[V];
    LLMK_UNROLL
    for (int v = 0; v < V; ++v) panel[v] = at(piece, v);
    const Unit* row = rows.units + piece * units * P::kParts;
    for (int64_t k = 0; k < units;) {
      const int64_t last = smaller(units, k + kFetchUnits);
      if (shared.fetch != nullptr) shared.fetch->some(lines);
      for (; k < last; ++k) {
#ifdef LLMK_VEC_AVX2
        if constexpr (std::is_same_v<typename P::Acc, Vec>) {
          LLMK_UNROLL
          for (int j = 0; j < P::kParts * V; ++j) {
            const Vec part = P::part(panel[j % V] + k * panel_stride, j / V);
            LLMK_UNROLL
            for (int i = 0; i < R; ++i) {
              const Unit* x = row + i * rows.stride + k * P::kParts + j / V;
              add_product(&sums[0][i][j % V], part, reinterpret_cast<const float*>(x));
            }
          }
          continue;
        }
#endif
        if constexpr (P::kIntegers && P::kParts > 1) {
          multiply_words<P, R, V>(panel, k * panel_stride, row + k * P::kParts, rows.stride, sums[0]);
        } else {
          typename P::Operand lanes[V];
          LLMK_UNROLL
          for (int v = 0; v < V; ++v) lanes[v] = P::lanes(panel[v] + k * panel_stride);
          LLMK_UNROLL
          for (int i = 0; i < kPasses * R; ++i) {
            const typename P::Operand x = P::spread(row + i % R * rows.stride + i / R * rows.pass_stride + k);
            LLMK_UNROLL
            for (int v = 0; v < V; ++v) sums[i / R][i % R][v] = P::step(x, lanes[v], sums[i / R][i % R][v]);
          }
        }
      }
    }
  }
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) {
    const auto sum = sums[0][i / V][i % V];
    const int32_t offset = offsets == nullptr ? 0 : offsets[i / V];
    if constexpr (!P::kIntegers) {
      total[i / V][i % V] = sum;
    } else if constexpr (kPasses == 1) {
      total[i / V][i % V] = P::shift(sum, offset);
    } else {
      total[i / V][i % V] = P::join(P::shift(sum, offset), sums[kPasses - 1][i / V][i % V]);
    }
  }
}

// Returns the number of blocks of rows, which is the number of calls that for_row_blocks() makes.
template <int kPasses>
LLMK_INLINE int64_t row_blocks(int64_t rows) {
  return ceil_div(rows, kMostRows<kPasses>);
}

// Calls function(first row, number of rows) for blocks of rows of about equal size. The number of rows is passed as a
// std::integral_constant.
template <int kPasses, class Function>
LLMK_INLINE void for_row_blocks(int64_t rows, const Function& function) {
  constexpr int kMost = kMostRows<kPasses>;
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, size = ceil_div(left, ceil_div(left, kMost));
    if constexpr (kMost == 6) {
      if (size == 6) function(row, std::integral_constant<int, 6>());
      if (size == 5) function(row, std::integral_constant<int, 5>());
      if (size == 4) function(row, std::integral_constant<int, 4>());
    }
    if constexpr (kMost >= 3) {
      if (size == 3) function(row, std::integral_constant<int, 3>());
    }
    if constexpr (kMost >= 2) {
      if (size == 2) function(row, std::integral_constant<int, 2>());
    }
    if (size == 1) function(row, std::integral_constant<int, 1>());
    row += size;
  }
}

template <class P, int R, int V>
LLMK_INLINE void clear_sums(typename P::Acc (&total)[R][V]) {
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) total[i / V][i % V] = P::clear();
}

// Stores the scores of R rows for V groups of 16 keys, from group number `group` on. A score is a dot product, times
// the scale of its key if the keys have scales.
template <class P, int R, int V>
LLMK_INLINE void store_scores(const typename P::Acc (&total)[R][V], const float* key_scales, int64_t group,
                              float* scores) {
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) {
    const int64_t key = (group + i % V) * kLanes;
    const Vec score = P::result(total[i / V][i % V]);
    store(scores + i / V * kScoreStride + key, key_scales == nullptr ? score : mul(score, load(key_scales + key)));
  }
}

// Computes the scores of `rows` rows of one head, from row number `row` on.
template <class F>
LLMK_OUTLINE void score_rows(const TaskRows& all, const TilePanels& panels, GroupRange groups, int64_t row,
                             int64_t rows, TileFetch* fetch, float* scores) {
  using P = typename F::ScoreProduct;
  const int64_t units = ceil_div(all.dim, F::kPerUnit), stride = F::kRowWords * all.query_units;
  const SharedFetch shared{fetch, row_blocks<F::kPasses>(rows)};
  for_row_blocks<F::kPasses>(rows, [&](int64_t r, auto size) {
    constexpr int R = decltype(size)::value, V = kBlockVectors<F::kPasses, R>;
    const ProductRows queries{all.queries + (row + r) * stride, stride, all.query_units};
    for (int64_t g = groups.begin; g < groups.end; g += V) {
      typename P::Acc total[R][V];
      clear_sums<P>(total);
      multiply<P, F::kPasses, R, V>(
          queries, 0, 1, units, kGroupKeys, [&](int64_t, int v) { return panels.keys[g + v]; }, all.offsets + row + r,
          shared, total);
      store_scores<P>(total, panels.key_scales, g, scores + r * kScoreStride);
    }
  });
}

// Writes `total`, the sum of softmax weights times values for a chunk of keys, to `sums`. Int8Form first adds the sum
// of the earlier chunks, which is in `sums`, unless the chunk is the first (`fresh`). With all other forms, `total`
// already includes the earlier chunks. Sums of integers are converted to floats if the chunk is the last (`done`).
template <class F>
LLMK_INLINE void store_values(typename F::ValueProduct::Acc total, bool fresh, bool done, float step, float* sums) {
  using P = typename F::ValueProduct;
  if constexpr (!P::kIntegers) {
    store(sums, P::result(total));
  } else {
    if (F::kPasses > 1 && !fresh) total = P::join(total, P::restore(sums));
    if (done) return store(sums, mul(P::result(total), broadcast(step)));
    P::keep(total, sums);
  }
}

template <class F, int R, int V>
LLMK_INLINE void add_values(const TilePanels& panels, GroupRange groups, int64_t d, int64_t padded_dim,
                            const Unit* weights, const float* steps, SharedFetch shared, float* sums) {
  using P = typename F::ValueProduct;
  constexpr int64_t kPass = kPartition / F::kPerUnit;
  const bool fresh = groups.begin == 0;
  typename P::Acc total[R][V];
  clear_sums<P>(total);
  LLMK_UNROLL
  for (int i = 0; i < R * V && F::kPasses == 1; ++i) {
    if (!fresh) total[i / V][i % V] = P::restore(sums + i / V * padded_dim + d + i % V * kLanes);
  }
  multiply<P, F::kPasses, R, V>(
      {weights, kWeightStride<F>, kPass}, groups.begin, groups.end, kGroupKeys / F::kPerUnit, panels.value_stride,
      [&](int64_t g, int v) { return panels.values[g] + d + v * kLanes; }, nullptr, shared, total);
  LLMK_UNROLL
  for (int i = 0; i < R * V; ++i) {
    store_values<F>(total[i / V][i % V], fresh, groups.done, steps[i / V],
                    sums + i / V * padded_dim + d + i % V * kLanes);
  }
}

// Adds the products of weights and values to `sums`, for `rows` rows of one head.
template <class F>
static inline void value_rows(const TilePanels& panels, GroupRange groups, int64_t rows, int64_t padded_dim,
                              const Unit* weights, const float* steps, TileFetch* fetch, float* sums) {
  const SharedFetch shared{fetch, row_blocks<F::kPasses>(rows)};
  for_row_blocks<F::kPasses>(rows, [&](int64_t r, auto size) {
    constexpr int R = decltype(size)::value, V = kBlockVectors<F::kPasses, R>;
    const Unit* from = weights + r * kWeightStride<F>;
    float* out = sums + r * padded_dim;
    int64_t d = 0;
    for (; d + V * kLanes <= padded_dim; d += V * kLanes) {
      add_values<F, R, V>(panels, groups, d, padded_dim, from, steps + r, shared, out);
    }
    if constexpr (V > 2) {
      for (; d + 2 * kLanes <= padded_dim; d += 2 * kLanes) {
        add_values<F, R, 2>(panels, groups, d, padded_dim, from, steps + r, shared, out);
      }
    }
    if (d < padded_dim) add_values<F, R, 1>(panels, groups, d, padded_dim, from, steps + r, shared, out);
  });
}

}  // namespace llmk::LLMK_ARCH::paged
