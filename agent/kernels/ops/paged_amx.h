// A tile of keys for up to 16 rows at once, both products on AMX tiles (amx_tiles.h): the panels of paged_units.h are
// laid out as they take them. int8 gives the integers it gives in registers. bfloat16 adds up 16 units at a time from
// zero, one row or 16, so every product with such a cache is made here.
#pragma once

#ifdef LLMK_AMX
#include "amx_tiles.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

template <class F>
struct TileProducts {
  static constexpr int64_t kLeastRows = 1 << 30;  // none of this form
};

template <>
struct TileProducts<BFloat16Form> {
  static constexpr int64_t kLeastRows = 1;
  template <int S, int X, int W>
  LLMK_INLINE void score() {
    multiply_bfloats<S, X, W>();
  }
  template <int S, int X, int W>
  LLMK_INLINE void value() {
    multiply_bfloats<S, X, W>();
  }
};

template <>
struct TileProducts<Int8Form> {
  static constexpr int64_t kLeastRows = 4;  // fewer are faster in registers
  template <int S, int X, int W>
  LLMK_INLINE void score() {
    multiply_bytes<S, X, W>();
  }
  template <int S, int X, int W>
  LLMK_INLINE void value() {
    multiply_unsigned_bytes<S, X, W>();
  }
};

template <class F>
static inline bool fits_tiles(const HeadRows& head) {
  return head.rows >= TileProducts<F>::kLeastRows && head.dim % (F::kPerUnit * kAmxSteps) == 0;
}

// out[rows][64] of 32 bits = rows of `steps` times 16 units by 64 columns of a panel. kValues: the second product.
template <class F, bool kValues>
LLMK_INLINE void multiply_panel(const Unit* rows, int64_t row_units, const Unit* panel, int64_t panel_units,
                                int64_t steps, TileFetch* fetch, void* out) {
  using P = TileProducts<F>;
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  const int64_t stride = panel_units * 4;
  for (int64_t s = 0; s < steps; ++s, rows += kAmxSteps, panel += kAmxSteps * panel_units) {
    if (fetch != nullptr) fetch->some();
    load_tile<4>(rows, row_units * 4);
    load_tile<6>(panel, stride);
    load_tile<7>(panel + kLanes, stride);
    if constexpr (kValues) {
      P::template value<0, 4, 6>();
      P::template value<1, 4, 7>();
    } else {
      P::template score<0, 4, 6>();
      P::template score<1, 4, 7>();
    }
    load_tile<6>(panel + 2 * kLanes, stride);
    load_tile<7>(panel + 3 * kLanes, stride);
    if constexpr (kValues) {
      P::template value<2, 4, 6>();
      P::template value<3, 4, 7>();
    } else {
      P::template score<2, 4, 6>();
      P::template score<3, 4, 7>();
    }
  }
  char* sums = static_cast<char*>(out);
  store_tile<0>(sums, 256);
  store_tile<1>(sums + 64, 256);
  store_tile<2>(sums + 128, 256);
  store_tile<3>(sums + 192, 256);
}

// The sums of a form's passes as floats.
template <class F, class P>
LLMK_INLINE Vec join_passes(const Unit* high, const Unit* low, int32_t offset) {
  if constexpr (F::kPasses == 1) {
    return load(reinterpret_cast<const float*>(high));
  } else {
    return P::result(_mm512_add_epi32(P::shift(_mm512_load_si512(high), offset), _mm512_load_si512(low)));
  }
}

using TileSums = Unit[kAmxRows][kKeyTile];

template <class F>
static inline void score_rows(const HeadRows& head, const TilePanels& panels, int64_t row, int64_t rows,
                              TileFetch* fetch, float (&scores)[kAmxRows][kKeyTile]) {
  alignas(64) TileSums sums[F::kPasses];
  const int64_t stride = F::kPasses * head.query_units, steps = head.dim / (F::kPerUnit * kAmxSteps);
  for (int pass = 0; pass < F::kPasses; ++pass) {
    multiply_panel<F, false>(head.queries + row * stride + pass * head.query_units, stride, panels.keys, kKeyTile,
                             steps, fetch, sums[pass]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    LLMK_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      const Unit *high = sums[0][r] + i * kLanes, *low = sums[F::kPasses - 1][r] + i * kLanes;
      store(scores[r] + i * kLanes, join_passes<F, typename F::ScoreProduct>(high, low, head.offsets[row + r]));
    }
  }
}

constexpr int kSoftRows = 4;

template <class F>
using TileWeights = Unit[kAmxRows][F::kPasses * kKeyTile / F::kPerUnit];

template <class F, int R>
LLMK_INLINE void soften_some(const HeadRows& head, const TilePanels& panels, int64_t row, int64_t r, bool fresh,
                             float (&scores)[kAmxRows][kKeyTile], TileWeights<F>& weights, float* decays,
                             float* steps) {
  alignas(64) float decay[kLanes];
  auto& some_scores = reinterpret_cast<float(&)[R][kKeyTile]>(scores[r]);
  auto& some_weights = reinterpret_cast<Unit(&)[R][F::kPasses * kKeyTile / F::kPerUnit]>(weights[r]);
  float step[R];
  soften_block<F, R>(head, panels, row + r, fresh, some_scores, some_weights, decay, step);
  for (int i = 0; i < R; ++i) {
    decays[r + i] = decay[i];
    steps[r + i] = step[i];
  }
}

template <class F>
static inline void add_value_rows(const HeadRows& head, const TilePanels& panels, int64_t row, int64_t rows,
                                  bool fresh, const TileWeights<F>& weights, const float* decays, const float* steps,
                                  TileFetch* fetch) {
  constexpr int64_t kPass = kKeyTile / F::kPerUnit;
  alignas(64) TileSums sums[F::kPasses];
  const int64_t products = ceil_div(panels.value_units, kAmxSteps);
  for (int64_t d = 0; d < head.padded_dim; d += kKeyTile) {
    for (int pass = 0; pass < F::kPasses; ++pass) {
      multiply_panel<F, true>(weights[0] + pass * kPass, F::kPasses * kPass, panels.values + d, head.padded_dim,
                              products, fetch, sums[pass]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* totals = head.partition.sums + (row + r) * head.padded_dim + d;
      for (int64_t i = 0; i < smaller(kKeyTile, head.padded_dim - d); i += kLanes) {
        Vec part = join_passes<F, typename F::ValueProduct>(sums[0][r] + i, sums[F::kPasses - 1][r] + i, 0);
        if (F::kPasses > 1) part = mul(part, broadcast(steps[r]));
        store(totals + i, fresh ? part : fma(load(totals + i), broadcast(decays[r]), part));
      }
    }
  }
}

// attend_block for up to 16 rows.
template <class F>
static inline void attend_rows(const HeadRows& head, const TilePanels& panels, int64_t row, int64_t rows,
                               TileFetch* fetch) {
  alignas(64) float scores[kAmxRows][kKeyTile];
  alignas(64) TileWeights<F> weights;
  float decays[kAmxRows], steps[kAmxRows];
  const bool fresh = panels.begin % kPartition == 0;
  score_rows<F>(head, panels, row, rows, fetch, scores);
  int64_t r = 0;
  for (; r + kSoftRows <= rows; r += kSoftRows) {
    soften_some<F, kSoftRows>(head, panels, row, r, fresh, scores, weights, decays, steps);
  }
  for (; r < rows; ++r) soften_some<F, 1>(head, panels, row, r, fresh, scores, weights, decays, steps);
  add_value_rows<F>(head, panels, row, rows, fresh, weights, decays, steps, fetch);
}

// attend_tile from `row` on.
template <class F>
static inline void attend_tiles(const HeadRows& head, const TilePanels& panels, int64_t row, TileFetch* fetch) {
  int64_t configured = 0;
  for (int block = 0; row < head.rows; ++block) {
    const int64_t left = head.rows - row, size = ceil_div(left, ceil_div(left, kAmxRows));
    if (size != configured) configure_tiles(size, 0);
    configured = size;
    attend_rows<F>(head, panels, row, size, block < kFetchBlocks ? fetch : nullptr);
    row += size;
  }
  release_tiles();
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
#endif
