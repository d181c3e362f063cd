// A tile of keys for up to 16 rows at once, both products on AMX tiles (amx_tiles.h): the panels of paged_units.h are
// laid out as they take them, in the cache already where that holds units. int8 gives the integers it gives in
// registers. bfloat16 adds up 16 units of dims, or the units of 16 keys, from zero, one row or 16, so every product with
// such a cache is made here.
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
  static constexpr int64_t kValueUnits = kGroupKeys / BFloat16Form::kPerUnit;  // of keys in a product
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
  static constexpr int64_t kLeastRows = 4;    // fewer are faster in registers
  static constexpr int64_t kValueUnits = kAmxSteps;  // the whole tile's, in one piece
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
constexpr bool kHasTiles = TileProducts<F>::kLeastRows <= kTaskRows;

// Whether a tile that `rows` rows of each head see is multiplied here.
template <class F>
static inline bool uses_tiles(int64_t dim, int64_t rows) {
  return rows >= TileProducts<F>::kLeastRows && dim % (F::kPerUnit * kAmxSteps) == 0;
}

// Values of all groups in one piece, for products of more units than a group has.
template <class F>
static inline void join_values(int64_t dim, Unit* out, TilePanels* panels) {
  if constexpr (F::kFloatUnits) return;
  const int64_t units = kGroupKeys / F::kPerUnit * dim;
  if (panels->value_stride != dim) return;  // a packed panel
  for (int64_t g = 0; g < panels->groups; ++g) {
    std::memcpy(out + g * units, panels->values[g], static_cast<size_t>(units) * sizeof(Unit));
  }
  panels->values[0] = out;
}

// Tiles 0 to 3: sums of `rows` rows; 4 and 5: rows of the score and the value product; 6 and 7: their panels.
template <class F>
static inline void configure_products(int64_t rows) {
  constexpr int64_t kUnits = TileProducts<F>::kValueUnits;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = tile == 5 ? kUnits * 4 : 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : tile == 6 ? kAmxSteps : kUnits);
  }
  load_config(config);
}

// Sums of `count` (1 to 4) tiles.
LLMK_INLINE void store_sums(void* out, int64_t count) {
  char* sums = static_cast<char*>(out);
  store_tile<0>(sums, 256);
  if (count > 1) store_tile<1>(sums + 64, 256);
  if (count > 2) store_tile<2>(sums + 128, 256);
  if (count > 3) store_tile<3>(sums + 192, 256);
}

LLMK_INLINE void clear_sums() {
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
}

// out[rows][64] of 32 bits = the rows of a pass by the keys of a tile.
template <class F>
LLMK_INLINE void multiply_keys(const Unit* rows, int64_t row_units, const TilePanels& panels, int64_t steps,
                               TileFetch* fetch, void* out) {
  using P = TileProducts<F>;
  clear_sums();
  const int64_t stride = panels.key_stride * 4, groups = panels.groups;
  for (int64_t s = 0; s < steps; ++s, rows += kAmxSteps) {
    const int64_t offset = s * kAmxSteps * panels.key_stride;
    if (fetch != nullptr) fetch->some(kAmxSteps * groups);
    load_tile<4>(rows, row_units * 4);
    load_tile<6>(panels.keys[0] + offset, stride);
    P::template score<0, 4, 6>();
    if (groups > 1) {
      load_tile<6>(panels.keys[1] + offset, stride);
      P::template score<1, 4, 6>();
    }
    if (groups > 2) {
      load_tile<6>(panels.keys[2] + offset, stride);
      P::template score<2, 4, 6>();
    }
    if (groups > 3) {
      load_tile<6>(panels.keys[3] + offset, stride);
      P::template score<3, 4, 6>();
    }
  }
  store_sums(out, groups);
}

// out[rows][64] of 32 bits = the weights of a pass by `vectors` (1 to 4) times 16 dims of the values, from dim d on.
template <class F>
LLMK_INLINE void multiply_values(const Unit* weights, int64_t row_units, const TilePanels& panels, int64_t d,
                                 int64_t vectors, TileFetch* fetch, void* out) {
  using P = TileProducts<F>;
  constexpr int64_t kUnits = P::kValueUnits;
  clear_sums();
  const int64_t stride = panels.value_stride * 4, parts = kUnits == kAmxSteps ? 1 : panels.groups;
  for (int64_t part = 0; part < parts; ++part, weights += kUnits) {
    const Unit* values = panels.values[part] + d;
    if (fetch != nullptr) fetch->some(kUnits * vectors);
    load_tile<5>(weights, row_units * 4);
    load_tile<7>(values, stride);
    P::template value<0, 5, 7>();
    if (vectors > 1) {
      load_tile<7>(values + kLanes, stride);
      P::template value<1, 5, 7>();
    }
    if (vectors > 2) {
      load_tile<7>(values + 2 * kLanes, stride);
      P::template value<2, 5, 7>();
    }
    if (vectors > 3) {
      load_tile<7>(values + 3 * kLanes, stride);
      P::template value<3, 5, 7>();
    }
  }
  store_sums(out, vectors);
}

// The sums of a form's passes as floats.
template <class F, class P>
LLMK_INLINE Vec join_passes(const Unit* high, const Unit* low, int32_t offset) {
  if constexpr (F::kPasses == 1) {
    return load(reinterpret_cast<const float*>(high));
  } else {
    return P::result(P::join(P::shift(_mm512_load_si512(high), offset), _mm512_load_si512(low)));
  }
}

using TileSums = Unit[kBlockRows][kKeyTile];

// As score_rows.
template <class F>
static inline void score_tiles(const TaskRows& all, const TilePanels& panels, int64_t row, int64_t rows,
                               TileFetch* fetch, float (*scores)[kKeyTile]) {
  const int64_t stride = F::kPasses * all.query_units, steps = all.dim / (F::kPerUnit * kAmxSteps);
  const Unit* queries = all.queries + row * stride;
  if constexpr (F::kPasses == 1) return multiply_keys<F>(queries, stride, panels, steps, fetch, scores);
  alignas(64) TileSums sums[F::kPasses];
  for (int pass = 0; pass < F::kPasses; ++pass) {
    multiply_keys<F>(queries + pass * all.query_units, stride, panels, steps, pass == 0 ? fetch : nullptr, sums[pass]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < panels.groups; ++i) {
      const Unit *high = sums[0][r] + i * kLanes, *low = sums[F::kPasses - 1][r] + i * kLanes;
      store(scores[r] + i * kLanes, join_passes<F, typename F::ScoreProduct>(high, low, all.offsets[row + r]));
    }
  }
}

// The values' part of attend_block.
template <class F>
static inline void value_tiles(const TaskRows& all, const TilePanels* panels, const RowBlock& block, bool fresh,
                               const BlockWeights<F>& weights, const float* decays, const float* steps,
                               TileFetch* fetch) {
  constexpr int64_t kPass = kKeyTile / F::kPerUnit;
  alignas(64) TileSums sums[F::kPasses];
  for (int64_t d = 0; d < all.padded_dim; d += kKeyTile) {
    const int64_t vectors = smaller(kTileVectors, (all.padded_dim - d) / kLanes);
    for (int64_t h = 0; h < block.heads; ++h) {
      const int64_t at = h * block.rows;
      for (int pass = 0; pass < F::kPasses; ++pass) {
        multiply_values<F>(weights[at] + pass * kPass, F::kPasses * kPass, panels[h], d, vectors,
                           pass == 0 ? fetch : nullptr, sums[pass][at]);
      }
    }
    for (int64_t r = 0; r < block.count(); ++r) {
      const int64_t number = (block.head + r / block.rows) * all.rows + block.first + r % block.rows;
      float* totals = all.partition.sums + number * all.padded_dim + d;
      for (int64_t i = 0; i < vectors * kLanes; i += kLanes) {
        Vec part = join_passes<F, typename F::ValueProduct>(sums[0][r] + i, sums[F::kPasses - 1][r] + i, 0);
        if (F::kPasses > 1) part = mul(part, broadcast(steps[r]));
        store(totals + i, fresh ? part : fma(load(totals + i), broadcast(decays[r]), part));
      }
    }
  }
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
#endif
