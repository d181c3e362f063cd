// Computes the products of paged attention (paged_rows.h) on AMX tiles: the scores, and the weighted sums of values.
// The panels of keys and values (paged_units.h) have the layout of tiles. Their elements are units of 4 bytes: two
// bfloat16 or four int8 numbers. A cache that stores these units also has this layout, so tiles read it directly.
//
// For int8, tiles give the same integers as vector registers. For bfloat16, a tile product adds up 16 units from zero,
// which is another order than in vector registers. Therefore every product with a bfloat16 cache uses tiles, even for a
// single row. So a row gets the same bits in a step with any number of rows.
//
// Each tile of a panel is multiplied by two tiles of rows (upper and lower), so that it is loaded only once for both.
// With bfloat16, the two tiles hold 32 rows. With int8, they hold the high bytes and the low bytes of the same 16 rows.
#pragma once

#ifdef LLMK_AMX
#include "amx_tiles.h"
#include "paged_products.h"

namespace llmk::LLMK_ARCH::paged {

template <class F>
struct TileProducts {
  static constexpr int64_t kLeastRows = 1 << 30;  // the form F never uses tiles
};

template <>
struct TileProducts<BFloat16Form> {
  static constexpr int64_t kLeastRows = 1;
  static constexpr int64_t kRows = 2 * kAmxRows;  // rows of a block
  template <int S, int X, int W>
  static LLMK_MEMBER void score() {
    multiply_bfloats<S, X, W>();
  }
  template <int S, int X, int W>
  static LLMK_MEMBER void value() {
    multiply_bfloats<S, X, W>();
  }
};

template <>
struct TileProducts<Int8Form> {
  static constexpr int64_t kLeastRows = 4;  // with fewer rows, vector registers are faster
  static constexpr int64_t kRows = kAmxRows;
  template <int S, int X, int W>
  static LLMK_MEMBER void score() {
    multiply_bytes<S, X, W>();
  }
  template <int S, int X, int W>
  static LLMK_MEMBER void value() {
    multiply_unsigned_bytes<S, X, W>();
  }
};

template <class F>
constexpr bool kHasTiles = TileProducts<F>::kLeastRows <= kTaskRows;

// Returns true if AMX tiles compute the products of a partition. `rows` is the number of rows of each head that see at
// least one key of the partition.
template <class F>
static inline bool uses_tiles(int64_t dim, int64_t rows) {
  return rows >= TileProducts<F>::kLeastRows && dim % (F::kPerUnit * kAmxSteps) == 0;
}

// Returns the number of rows in the second tile of a block, or 0 if the block has only one tile.
template <class F>
static inline int64_t lower_rows(int64_t rows) {
  return F::kPasses > 1 ? rows : larger(0, rows - kAmxRows);
}

template <class F>
static inline void configure_products(int64_t rows) {
  configure_tiles(smaller(rows, kAmxRows), lower_rows<F>(rows));
}

// The rows of a product, divided into two tiles. `lower` points to the first row of the second tile.
template <class F>
struct TileRows {
  const Unit *upper, *lower;
  int64_t stride;  // distance between rows, in units

  static LLMK_MEMBER TileRows of_queries(const TaskRows& all, int64_t row) {
    const int64_t stride = F::kPasses * all.query_units;
    const Unit* upper = all.queries + row * stride;
    return {upper, F::kPasses > 1 ? upper + all.query_units : upper + kAmxRows * stride, stride};
  }
  static LLMK_MEMBER TileRows of_weights(const Unit* weights) {
    constexpr int64_t kPass = kPartition / F::kPerUnit;
    return {weights, weights + (F::kPasses > 1 ? kPass : kAmxRows * kWeightStride<F>), kWeightStride<F>};
  }
};

template <class F, bool kScores, int S, int X, int W>
LLMK_INLINE void multiply_tile() {
  if constexpr (kScores) TileProducts<F>::template score<S, X, W>();
  if constexpr (!kScores) TileProducts<F>::template value<S, X, W>();
}

// Multiplies rows by several panels and adds the products to the sums in tiles 0 to 3. `columns` is the number of
// panels: 2 or 4. If kLower is false, multiplies only the upper rows, and tile i has the sums of panel i. If kLower is
// true, there are two panels. Tiles 0 and 1 have the sums of the upper rows, tiles 2 and 3 those of the lower rows.
//
// The function at(step, column) returns the address of the 16 units that panel number `column` has for a step. These
// units are `stride` bytes apart. If `loaded`, tiles 4 and 5 already have the rows of the only step.
template <class F, bool kScores, bool kLower, class At>
LLMK_INLINE void multiply_tiles(const TileRows<F>& rows, int64_t begin, int64_t end, int64_t columns, int64_t stride,
                                TileFetch* fetch, const At& at, bool loaded = false) {
  for (int64_t s = begin; s < end; ++s) {
    if (fetch != nullptr) fetch->some(kAmxSteps * columns);
    if (!loaded) load_tile<4>(rows.upper + s * kAmxSteps, rows.stride * 4);
    load_tile<6>(at(s, 0), stride);
    multiply_tile<F, kScores, 0, 4, 6>();
    if constexpr (kLower) {
      if (!loaded) load_tile<5>(rows.lower + s * kAmxSteps, rows.stride * 4);
      multiply_tile<F, kScores, 2, 5, 6>();
    }
    load_tile<7>(at(s, 1), stride);
    multiply_tile<F, kScores, 1, 4, 7>();
    if constexpr (kLower) multiply_tile<F, kScores, 3, 5, 7>();
    if (kLower || columns < 4) continue;
    load_tile<6>(at(s, 2), stride);
    multiply_tile<F, kScores, 2, 4, 6>();
    load_tile<7>(at(s, 3), stride);
    multiply_tile<F, kScores, 3, 4, 7>();
  }
}

LLMK_INLINE void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
}

// Stores the sums of tiles 0 and 1 side by side, as rows of 32 sums, which are `stride` bytes apart. The function
// store_lower() does the same with tiles 2 and 3.
LLMK_INLINE void store_upper(void* out, int64_t stride) {
  store_tile<0>(out, stride);
  store_tile<1>(static_cast<char*>(out) + 64, stride);
}
LLMK_INLINE void store_lower(void* out, int64_t stride) {
  store_tile<2>(out, stride);
  store_tile<3>(static_cast<char*>(out) + 64, stride);
}

// Stores the sums of the tiles as rows, which are `stride` floats apart. A tile has 16 sums (a vector) of each row.
// Tiles 0 and 1 have vectors 0 and 1 of the upper rows. With `lower`, tiles 2 and 3 have vectors 0 and 1 of the lower
// rows. Without `lower`, they have vectors 2 and 3 of the upper rows. If `columns` is 2, vectors 2 and 3 do not exist.
// The function restore_sums() loads the tiles from the same addresses.
LLMK_INLINE void store_sums(float* out, int64_t stride, bool lower, int64_t columns) {
  store_upper(out, stride * 4);
  if (lower || columns > 2) store_lower(lower ? out + kAmxRows * stride : out + 2 * kLanes, stride * 4);
}
LLMK_INLINE void restore_sums(const float* from, int64_t stride, bool lower, int64_t columns) {
  load_tile<0>(from, stride * 4);
  load_tile<1>(from + kLanes, stride * 4);
  if (!lower && columns <= 2) return;
  const float* second = lower ? from + kAmxRows * stride : from + 2 * kLanes;
  load_tile<2>(second, stride * 4);
  load_tile<3>(second + kLanes, stride * 4);
}

// Combines the sums of the two passes of Int8Form. One pass multiplies by the high bytes of the rows, the other by the
// low bytes. Tiles 0 and 1 have the products of the high bytes, tiles 2 and 3 those of the low bytes. Calls emit(row,
// i, sums) for the vectors i = 0 and 1 of each row.
template <class P, class Emit>
LLMK_INLINE void join_passes(int64_t rows, const int32_t* offsets, const Emit& emit) {
  alignas(64) Unit high[kAmxRows][2 * kLanes], low[kAmxRows][2 * kLanes];
  store_upper(high, sizeof(high[0]));
  store_lower(low, sizeof(low[0]));
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t offset = offsets == nullptr ? 0 : offsets[r];
    LLMK_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Ints upper = load_ints(high[r] + i * kLanes), under = load_ints(low[r] + i * kLanes);
      emit(r, i, P::join(P::shift(upper, offset), under));
    }
  }
}

// Copies the scores from the tiles to `scores`: for `rows` rows from number `row` on, and for the groups of keys from
// number `g` on.
template <class F>
LLMK_INLINE void keep_scores(const TaskRows& all, const TilePanels& panels, int64_t g, int64_t row, int64_t rows,
                             bool both, float* scores) {
  using P = typename F::ScoreProduct;
  float* out = scores + g * kLanes;
  if constexpr (F::kPasses == 1) {
    store_sums(out, kScoreStride, both, 4);
  } else {
    const Vec scales[2] = {load(panels.key_scales + g * kLanes), load(panels.key_scales + (g + 1) * kLanes)};
    join_passes<P>(rows, all.offsets + row, [&](int64_t r, int i, typename P::Acc total) {
      store(out + r * kScoreStride + i * kLanes, mul(P::result(total), scales[i]));
    });
  }
}

// Copies the weighted sums of values from the tiles to `sums`, for the dims from number `d` on.
template <class F>
LLMK_INLINE void keep_values(GroupRange groups, int64_t d, int64_t rows, int64_t padded_dim, bool both,
                             int64_t columns, const float* steps, float* sums) {
  using P = typename F::ValueProduct;
  float* out = sums + d;
  if constexpr (F::kPasses == 1) {
    store_sums(out, padded_dim, both, columns);
  } else {
    join_passes<P>(rows, nullptr, [&](int64_t r, int i, typename P::Acc total) {
      store_values<F>(total, groups.begin == 0, groups.done, steps[r], out + r * padded_dim + i * kLanes);
    });
  }
}

// Computes the scores of all rows of a block with AMX tiles, for the keys of `groups`.
template <class F>
static inline void score_tiles(const TaskRows& all, const TilePanels& panels, GroupRange groups, int64_t row,
                               int64_t rows, TileFetch* fetch, float* scores) {
  const int64_t steps = all.dim / (F::kPerUnit * kAmxSteps);
  const auto queries = TileRows<F>::of_queries(all, row);
  const bool both = lower_rows<F>(rows) > 0;
  for (int64_t g = groups.begin; g < groups.end; g += both ? 2 : 4) {
    const auto at = [&](int64_t s, int64_t i) { return panels.keys[g + i] + s * kAmxSteps * kGroupKeys; };
    clear_sums();
    if (both) {
      multiply_tiles<F, true, true>(queries, 0, steps, 2, kGroupKeys * 4, fetch, at);
    } else {
      multiply_tiles<F, true, false>(queries, 0, steps, 4, kGroupKeys * 4, fetch, at);
    }
    keep_scores<F>(all, panels, g, row, rows, both, scores);
  }
}

// Adds the products of attention weights and values to `sums` with tile instructions, for all rows of a block and the
// keys of `groups`.
template <class F>
static inline void value_tiles(const TilePanels& panels, GroupRange groups, int64_t rows, int64_t padded_dim,
                               const Unit* weights, const float* steps, TileFetch* fetch, float* sums) {
  const int64_t first = groups.begin / F::kPerUnit, last = ceil_div(groups.end, F::kPerUnit);
  const auto weight_rows = TileRows<F>::of_weights(weights);
  const bool both = lower_rows<F>(rows) > 0, fresh = groups.begin == 0;
  for (int64_t d = 0; d < padded_dim;) {
    const auto at = [&](int64_t s, int64_t i) { return panels.values[s] + d + i * kLanes; };
    const int64_t columns = both ? 2 : smaller(4, (padded_dim - d) / kLanes);
    if (fresh || F::kPasses > 1) {
      clear_sums();
    } else {
      restore_sums(sums + d, padded_dim, both, columns);
    }
    if (both) {
      multiply_tiles<F, false, true>(weight_rows, first, last, 2, panels.value_stride * 4, fetch, at);
    } else {
      multiply_tiles<F, false, false>(weight_rows, first, last, columns, panels.value_stride * 4, fetch, at);
    }
    keep_values<F>(groups, d, rows, padded_dim, both, columns, steps, sums);
    d += columns * kLanes;
  }
}

// A queue of matrix products with AMX tiles. The caller queues the scores of one block of rows and the weighted sums of
// another block. Between other computations, it calls some(), which runs a few steps of the queued products. All scores
// are computed before the sums.
//
// The results of one set of tiles are stored only after the products of the next set have begun. So no store waits for
// a running product.
template <class F>
class TileWork {
 public:
  // Queues the computation of scores: for `rows` rows from number `row` on, and the first `groups` groups of keys.
  void add_scores(const TaskRows& all, const TilePanels& panels, int64_t groups, int64_t row, int64_t rows,
                  float* scores) {
    all_ = &all;
    panels_ = &panels;
    queries_ = TileRows<F>::of_queries(all, row);
    row_ = row;
    score_rows_ = rows;
    to_scores_ = scores;
    scores_ = {ceil_div(groups, 2), all.dim / (F::kPerUnit * kAmxSteps)};
  }
  // Queues the computation of weighted sums of values, for the first `groups` groups of keys.
  void add_values(const TilePanels& panels, int64_t groups, int64_t rows, int64_t padded_dim, const Unit* weights,
                  const float* steps, float* sums) {
    panels_ = &panels;
    weights_ = TileRows<F>::of_weights(weights);
    value_rows_ = rows;
    padded_dim_ = padded_dim;
    steps_ = steps;
    to_sums_ = sums;
    values_ = {padded_dim / (2 * kLanes), ceil_div(groups, F::kPerUnit)};
  }

  int64_t left() const { return scores_.left() + values_.left(); }

  // Runs up to `count` steps of the queued products. Not inlined, so that the code around the call keeps its registers.
  __attribute__((noinline)) void some(int64_t count) {
    for (; count > 0 && scores_.left() > 0; --count) step<true>(&scores_);
    for (; count > 0 && values_.left() > 0; --count) step<false>(&values_);
  }

  void rest() {
    some(left());
    keep();
  }

 private:
  struct Steps {
    // The progress of the queued products. The next product is step `step` (of `steps`) of column `column` (of
    // `columns`). For scores, a column is a pair of groups of keys. For weighted sums of values, it is a pair of
    // vectors of dims.
    int64_t columns = 0, steps = 0, column = 0, step = 0;

    int64_t left() const { return (columns - column) * steps - step; }
  };

  // Runs one queued step: adds 16 units of the depth to the sums of a pair of columns. After the last step of a pair,
  // the sums stay in the tiles until keep() stores them.
  template <bool kScores>
  LLMK_MEMBER void step(Steps* at) {
    if (at->step == 0) {
      keep();
      clear_sums();
    }
    const int64_t column = 2 * at->column, s = at->step;
    const auto panel = [&](int64_t, int64_t i) {
      return kScores ? panels_->keys[column + i] + s * kAmxSteps * kGroupKeys
                     : panels_->values[s] + (column + i) * kLanes;
    };
    const int64_t stride = kScores ? kGroupKeys : panels_->value_stride;
    const bool loaded = kScores && at->steps == 1 && column > 0;  // all columns multiply the same queries
    multiply_tiles<F, kScores, true>(kScores ? queries_ : weights_, s, s + 1, 2, stride * 4, nullptr, panel, loaded);
    if (++at->step < at->steps) return;
    at->step = 0;
    ++at->column;
    (kScores ? kept_scores_ : kept_values_) = column;
  }

  LLMK_MEMBER void keep() {
    if (kept_scores_ >= 0) keep_scores<F>(*all_, *panels_, kept_scores_, row_, score_rows_, true, to_scores_);
    if (kept_values_ >= 0) {
      keep_values<F>({0, 0, true}, kept_values_ * kLanes, value_rows_, padded_dim_, true, 2, steps_, to_sums_);
    }
    kept_scores_ = kept_values_ = -1;
  }

  const TaskRows* all_ = nullptr;
  const TilePanels* panels_ = nullptr;
  TileRows<F> queries_{}, weights_{};
  int64_t row_ = 0, score_rows_ = 0, value_rows_ = 0, padded_dim_ = 0;
  float* to_scores_ = nullptr;
  const float* steps_ = nullptr;
  float* to_sums_ = nullptr;
  Steps scores_, values_;
  // The first group of keys, or the first vector of dims, whose sums are still in the tiles; -1: there is none.
  int64_t kept_scores_ = -1, kept_values_ = -1;
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
