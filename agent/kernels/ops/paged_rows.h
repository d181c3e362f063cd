// Computes the rows (query heads x tokens) that share a kv head, partition by partition. The numbers are added in the
// following canonical order:
//
//  score      of a row and a key: the sum over the units of dims in order, in one accumulator, times the key's scale;
//             keys that the row does not see are masked
//  partition  of kPartition keys; the first partition begins at position 0:
//             m = largest score * factor
//             p = 2^(score * factor - m) of each key, the key's weight
//             l = sum of p, in 16 lanes: lane i adds the keys with number % 16 = i (BFloat16Form: pairs of weights)
//             o = sum of p * value, over units of keys in order from 0
//  total      of all partitions so far; the following partition adds its m, l and o to the totals M, L and O:
//             M' = max(M, m),   L' = L * 2^(M - M') + l * 2^(m - M'),   O' = O * 2^(M - M') + o * 2^(m - M')
//
// Without a sink, the totals begin with M = lowest, L = 0 and O = 0. With a sink s, they begin with M = s * log2(e) and
// L = 1.
//
// This is the online softmax of FlashAttention (Dao et al. 2022) in powers of two, split like Flash-Decoding (2023).
//
// A window only masks more keys. A partition in which a row sees no key does not change the row's total.
//
// On AMX, a tile product with bfloat16 adds up 16 units of dims, or the 16 units of 32 keys, from zero. Then these sums
// are added in order (amx_tiles.h).
//
// The order depends only on the row's own position, so prefill, chunks and decode give the same bits. Keys after the
// sequence's context have no weight, so their memory, even NaN, has no effect.
#pragma once
#include <type_traits>

#include "paged_panels.h"

namespace llmk::LLMK_ARCH::paged {

constexpr int64_t kTaskRows = 192;
constexpr int64_t kTileRows = 16;   // rows of one head that are processed together
constexpr int64_t kBlockRows = 32;  // rows of a block: those of several heads, or two tiles of rows
constexpr int kFetchUnits = 8;      // number of units that are multiplied between two prefetches
constexpr float kLowest = -3.4028235e38f;

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

// Returns the size of a chunk: how many groups of 16 keys are multiplied at a time if a block of rows has `heads`
// heads.
//
// All heads of the block read a chunk before the next chunk, because the keys of the heads are adjacent in memory. With
// fewer heads, chunks are larger, because the sums are loaded and stored once for each chunk.
LLMK_INLINE int64_t chunk_groups(int64_t heads) { return smaller(kPartGroups, larger(4, kBlockRows / heads / 4 * 4)); }

// The state of the online softmax of some rows, over the keys processed so far.
struct SoftmaxState {
  float* best;  // [rows]: the largest value of score * factor, an exponent of 2
  float* mass;  // [rows]: sum of the weights
  float* sums;  // [rows][padded_dim]: weighted sums of values
};

// The query rows of a task: `rows` rows for each of `heads` kv heads. Row r of head h has the number h * rows + r.
struct TaskRows {
  // `query_units` is the number of 32-bit units of a key, rounded up to a multiple of 16. A packed query has
  // F::kRowWords 32-bit words for each of these units. Int8Form has two words, one for each pass over the units.
  // WordForm has two words, one for each pair of elements.
  // WidenedForm has one float for each element of the unit.
  int64_t heads, rows, dim, padded_dim, query_units;
  const int64_t* visible;                             // [rows]: a row sees keys before this position; ascending
  const int64_t* first;                               // [rows]: first key that a row sees; null: key 0 for all rows
  Unit* queries;                                      // packed queries: [heads * rows][kRowWords * query_units]
  // [heads * rows]: the factor of a score. It includes log2(e), because weights are computed as powers of two.
  float* factors;
  // [heads * rows]: the number that the forms for int8 caches add to the sums of integers
  int32_t* offsets;
  SoftmaxState total;                                 // [heads * rows]; unused if several tasks share the context

  int64_t first_key(int64_t row) const { return first == nullptr ? 0 : first[row]; }
};

// A block of rows: rows [first, first + rows) of heads [head, head + heads). It has at most kBlockRows rows in total.
struct RowBlock {
  int64_t head, heads, first, rows;

  int64_t count() const { return heads * rows; }
};

// Groups [begin, end) of 16 keys of a partition. `done` is true if the block of rows sees no later group.
struct GroupRange {
  int64_t begin, end;
  bool done;
};

// Memory of a block of rows. The row with number h * rows + r is row r of head h of the block.
struct BlockMemory {
  float* scores;      // [rows][kScoreStride]; the first kPartition elements of a row are used
  Unit* weights;      // softmax weights [rows][kWeightStride]; used part of a row: [passes][units of a partition]
  float* steps;       // [rows]: factor by which sums of weight * value are multiplied
  SoftmaxState part;  // state of the softmax over the keys of this partition
};

// Distance between two rows of scores. It is an odd number of cache lines. If it were a power of two, all rows would
// use the same few sets of the caches. The constant kWeightStride is the distance between two rows of weights.
constexpr int64_t kScoreStride = kPartition + kLanes;
template <class F>
constexpr int64_t kWeightStride = F::kRowWords * kPartition / F::kPerUnit + kLanes;
// Number of groups of keys whose softmax weights are computed together. On AMX, a tile product needs kAmxSteps units of
// weights.
template <class F>
constexpr int64_t kWeightGroups = F::kPerUnit > 2 ? F::kPerUnit : 2;

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

// The keys [hidden, visible) of a partition, which are the keys that a row sees. The row sees all keys of the first
// `whole` groups, so these groups need no mask. `whole` is even.
struct RowView {
  int64_t hidden, visible, whole;

  LLMK_MEMBER RowView(const TaskRows& all, const TilePanels& panels, int64_t row)
      : hidden(larger(0, all.first_key(row) - panels.begin)),
        visible(smaller(kPartition, all.visible[row] - panels.begin)),
        whole(hidden > 0 ? 0 : visible / (2 * kGroupKeys) * 2) {}

  LLMK_MEMBER Vec mask(Vec v, int64_t group, float other) const {
    v = keep_first(v, larger(0, visible - group * kLanes), other);
    return hide_first(v, larger(0, hidden - group * kLanes), other);
  }
};

LLMK_INLINE float largest_score(const RowView& view, const float* scores) {
  Vec top = broadcast(kLowest), second = top;
  for (int64_t g = 0; g < view.whole; g += 2) {
    top = maximum(top, load(scores + g * kLanes));
    second = maximum(second, load(scores + (g + 1) * kLanes));
  }
  for (int64_t g = view.whole; g * kLanes < view.visible; ++g) {
    top = maximum(top, view.mask(load(scores + g * kLanes), g, kLowest));
  }
  return largest(maximum(top, second));
}

// Returns the largest scale of the values that the row sees.
LLMK_INLINE float largest_value_scale(const RowView& view, const TilePanels& panels) {
  if (panels.value_scales == nullptr || view.whole == kPartGroups) return panels.largest_value_scale;
  Vec top = zero();
  for (int64_t g = 0; g * kLanes < view.visible; ++g) {
    top = maximum(top, view.mask(load(panels.value_scales + g * kLanes), g, 0.0f));
  }
  return largest(top);
}

// Converts the scores of `groups` groups of keys to softmax weights. `groups` is even. Hidden keys get the weight 0.
// Returns the sum of the weights.
template <class F>
LLMK_INLINE float weigh_row(const RowView& view, const TilePanels& panels, float factor, float best, int64_t groups,
                            const float* scores, Unit* weights, float* step) {
  const Vec scale = broadcast(factor), least = broadcast(-best);
  typename F::Weights out(panels.value_scales, largest_value_scale(view, panels), weights);
  const auto put = [&](int64_t g) __attribute__((always_inline)) {
    const float* pair = scores + g * kLanes;
    out.put(g, F::power(fma(load(pair), scale, least)), F::power(fma(load(pair + kLanes), scale, least)));
  };
  if (view.whole == kPartGroups) {  // the usual case; the loop is unrolled, so that sums stay in registers
    LLMK_UNROLL
    for (int g = 0; g < kPartGroups; g += 2) put(g);
  } else {
    for (int64_t g = 0; g < view.whole; g += 2) put(g);
  }
  for (int64_t g = view.whole; g < groups; g += 2) {
    const float* pair = scores + g * kLanes;
    const Vec first = F::power(fma(load(pair), scale, least)),
              second = F::power(fma(load(pair + kLanes), scale, least));
    out.put(g, view.mask(first, g, 0.0f), view.mask(second, g + 1, 0.0f));
  }
  *step = out.step();
  return sum(out.mass());
}

// Computes the softmax of a partition for a block of rows. Turns the scores of each row into weights, and stores the
// largest score (`best`) and the sum of the weights (`mass`). Calls meanwhile() after each row.
template <class F, class Meanwhile>
static inline void soften_block(const TaskRows& all, const TilePanels* panels, const RowBlock& block, int64_t groups,
                                const BlockMemory& memory, const Meanwhile& meanwhile) {
  const auto for_rows = [&](const auto& function) {
    for (int64_t h = 0, i = 0; h < block.heads; ++h) {
      const float* factors = all.factors + (block.head + h) * all.rows;
      for (int64_t row = block.first; row < block.first + block.rows; ++row, ++i) {
        function(i, panels[h], RowView(all, panels[h], row), factors[row]);
      }
    }
  };
  for_rows([&](int64_t i, const TilePanels&, const RowView& view, float factor) {
    memory.part.best[i] = largest_score(view, memory.scores + i * kScoreStride) * factor;
  });
  for_rows([&](int64_t i, const TilePanels& panel, const RowView& view, float factor) {
    const float* scores = memory.scores + i * kScoreStride;
    memory.part.mass[i] = weigh_row<F>(view, panel, factor, memory.part.best[i], groups, scores,
                                       memory.weights + i * kWeightStride<F>, memory.steps + i);
    meanwhile();
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

LLMK_INLINE SoftmaxState rows_from(const SoftmaxState& state, int64_t row, int64_t padded_dim) {
  return {state.best + row, state.mass + row, state.sums + row * padded_dim};
}

LLMK_INLINE void clear_state(const SoftmaxState& state, int64_t rows, int64_t padded_dim) {
  for (int64_t i = 0; i < rows; ++i) state.best[i] = kLowest;
  std::memset(state.mass, 0, static_cast<size_t>(rows) * sizeof(float));
  std::memset(state.sums, 0, static_cast<size_t>(rows * padded_dim) * sizeof(float));
}

// Adds the result of a partition to the totals of the earlier partitions, as the comment at the start of this file
// describes.
static inline void fold_partition(const SoftmaxState& part, int64_t rows, int64_t padded_dim,
                                  const SoftmaxState& total) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t n = smaller(kLanes, rows - first);
    const Vec before = load_n(total.best + first, n), now = load_n(part.best + first, n), best = maximum(before, now);
    const Vec old_share = power_of_two(sub(before, best)), share = power_of_two(sub(now, best));
    const Vec mass = add(mul(load_n(total.mass + first, n), old_share), mul(load_n(part.mass + first, n), share));
    store_n(total.best + first, best, n);
    store_n(total.mass + first, mass, n);
    float old_shares[kLanes], shares[kLanes];
    store(old_shares, old_share);
    store(shares, share);
    for (int64_t i = 0; i < n; ++i) {
      const float* from = part.sums + (first + i) * padded_dim;
      float* sums = total.sums + (first + i) * padded_dim;
      const Vec shrink = broadcast(old_shares[i]), weight = broadcast(shares[i]);
      for (int64_t d = 0; d < padded_dim; d += kLanes) {
        store(sums + d, fma(load(from + d), weight, mul(load(sums + d), shrink)));
      }
    }
  }
}

}  // namespace llmk::LLMK_ARCH::paged

#include "paged_amx.h"

namespace llmk::LLMK_ARCH::paged {

// Returns the number of groups of 16 keys that any row of the block sees. The function weight_groups() rounds this
// number up to a multiple of kWeightGroups.
LLMK_INLINE int64_t groups_seen(const TaskRows& all, const TilePanels& panels, const RowBlock& block) {
  return smaller(panels.groups, ceil_div(all.visible[block.first + block.rows - 1] - panels.begin, kGroupKeys));
}
template <class F>
LLMK_INLINE int64_t weight_groups(int64_t groups) {
  return ceil_div(groups, kWeightGroups<F>) * kWeightGroups<F>;
}

// Computes a partition for a block of rows: all scores, then all weights, then all weighted sums of values. `panels`
// has one entry per head of the block. If `tiles`, AMX computes the products.
//
// Calls source.begin(keys, groups) before each chunk, source.place_scales(keys, groups) before the scales are used, and
// source.place_values(h, groups) before the values of head h are read.
template <class F, class Source>
static inline void attend_block(const TaskRows& all, const TilePanels* panels, const RowBlock& block, bool tiles,
                                const BlockMemory& memory, TileFetch* fetch, const Source& source) {
  const int64_t groups = groups_seen(all, *panels, block);
  const int64_t chunk = chunk_groups(block.heads);
  const auto for_chunks = [&](bool keys, const auto& function) {
    for (int64_t g = 0; g < groups; g += chunk) {
      const GroupRange range{g, smaller(g + chunk, groups), g + chunk >= groups};
      source.begin(keys, range);
      for (int64_t h = 0; h < block.heads; ++h) function(range, h, h * block.rows);
    }
  };
  for_chunks(true, [&](GroupRange range, int64_t h, int64_t at) {
    if (h == 0) source.place_scales(true, range);
    const int64_t number = (block.head + h) * all.rows + block.first;
    float* scores = memory.scores + at * kScoreStride;
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles) return score_tiles<F>(all, panels[h], range, number, block.rows, fetch, scores);
    }
#endif
    score_rows<F>(all, panels[h], range, number, block.rows, fetch, scores);
  });
  source.place_scales(false, {0, kPartGroups, true});
  soften_block<F>(all, panels, block, weight_groups<F>(groups), memory, [] {});
  for_chunks(false, [&](GroupRange range, int64_t h, int64_t at) {
    source.place_values(h, range);
    const Unit* weights = memory.weights + at * kWeightStride<F>;
    float* sums = memory.part.sums + at * all.padded_dim;
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles) {
        return value_tiles<F>(panels[h], range, block.rows, all.padded_dim, weights, memory.steps + at, fetch, sums);
      }
    }
#endif
    value_rows<F>(panels[h], range, block.rows, all.padded_dim, weights, memory.steps + at, fetch, sums);
  });
  static_cast<void>(tiles);
}

#ifdef LLMK_AMX
// Computes a partition for rows [skip, all.rows) of one head on tiles, block after block. The vector units convert the
// scores of one block to weights. At the same time, the tiles compute the scores of the next block and the sums of the
// previous block. So a block uses one of the two elements of `memory`, and the next block uses the other. Calls
// close(block, memory) when the sums of a block are complete.
template <class F, class Close>
static inline void attend_blocks(const TaskRows& all, const TilePanels& panels, int64_t head, int64_t skip,
                                 const BlockMemory (&memory)[2], const Close& close) {
  constexpr int64_t kRows = TileProducts<F>::kRows;
  const int64_t blocks = ceil_div(all.rows - skip, kRows);
  const auto block_at = [&](int64_t i) {
    const int64_t first = skip + i * kRows;
    return RowBlock{head, 1, first, smaller(kRows, all.rows - first)};
  };
  TileWork<F> work;
  const auto add_scores = [&](int64_t i) {
    const RowBlock block = block_at(i);
    work.add_scores(all, panels, groups_seen(all, panels, block), head * all.rows + block.first, block.rows,
                    memory[i % 2].scores);
  };
  add_scores(0);
  work.rest();
  for (int64_t i = 0; i <= blocks; ++i) {
    if (i + 1 < blocks) add_scores(i + 1);
    if (i > 0) {
      const RowBlock before = block_at(i - 1);
      const BlockMemory& made = memory[(i - 1) % 2];
      work.add_values(panels, groups_seen(all, panels, before), before.rows, all.padded_dim, made.weights, made.steps,
                      made.part.sums);
    }
    if (i < blocks) {
      const RowBlock block = block_at(i);
      const int64_t each = ceil_div(work.left(), block.rows);
      soften_block<F>(all, &panels, block, weight_groups<F>(groups_seen(all, panels, block)), memory[i % 2],
                      [&] { work.some(each); });
    }
    work.rest();
    if (i > 0) close(block_at(i - 1), memory[(i - 1) % 2]);
  }
}
#endif

}  // namespace llmk::LLMK_ARCH::paged
