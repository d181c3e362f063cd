// The softmax of paged attention (paged_rows.h): turns the scores of a partition into weights, and adds the result of a
// partition to the totals of the earlier partitions.
#pragma once
#include "paged_rows.h"

namespace llmk::LLMK_ARCH::paged {

constexpr float kLowest = -3.4028235e38f;  // the score of a key that a row does not see

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

LLMK_INLINE SoftmaxState rows_from(const SoftmaxState& state, int64_t row, int64_t padded_dim) {
  return {state.best + row, state.mass + row, state.sums + row * padded_dim};
}

LLMK_INLINE void clear_state(const SoftmaxState& state, int64_t rows, int64_t padded_dim) {
  for (int64_t i = 0; i < rows; ++i) state.best[i] = kLowest;
  std::memset(state.mass, 0, static_cast<size_t>(rows) * sizeof(float));
  std::memset(state.sums, 0, static_cast<size_t>(rows * padded_dim) * sizeof(float));
}

// Adds the result of a partition to the totals of the earlier partitions, in the order that paged_rows.h defines.
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
