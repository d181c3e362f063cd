// A tile of kKeyTile keys of one sequence: where they lie, and how they are packed into the panels of paged_units.h.
#pragma once
#include "rotary_attention.h"

#include "paged_fetch.h"
#include "paged_units.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

// Keys [begin, begin + count) of a sequence: offsets from the start of a cache, for kv head 0.
struct PagedTile {
  int64_t begin, count;
  int64_t values[kKeyTile];
  int64_t scales[kKeyTile];  // int8 caches only
};

static inline void locate_tile(const RotaryAttentionArgs& args, int64_t seq, int64_t begin, int64_t end,
                               PagedTile* tile) {
  tile->begin = begin;
  tile->count = larger(0, smaller(kKeyTile, end - begin));
  for (int64_t i = 0; args.ready && i < tile->count; ++i) tile->values[i] = ready_place(args, seq, begin + i);
  if (args.ready) return;
  const int32_t* table = args.block_tables + seq * args.table_width;
  const int64_t row_bytes = args.int8_cache ? args.dim : args.dim * size_of(args.dtype);
  int64_t index = begin / args.block_size, row = begin % args.block_size;
  for (int64_t i = 0; i < tile->count; row = 0, ++index) {
    CachePlace place = cache_place(args, table[index], row);
    for (const int64_t last = smaller(tile->count, i + args.block_size - row); i < last; ++i) {
      tile->values[i] = place.values;
      tile->scales[i] = place.scale;
      place.values += row_bytes;
      place.scale += 4;
    }
  }
}

// One head's keys and values of a tile.
struct HeadTile {
  const PagedTile* tile;
  const char* keys;  // start of the caches, for this head
  const char* values;
};

// kLanes keys from `first` on, 16 units of dim from `d` on.
template <bool kWhole, class F, class C>
LLMK_INLINE void pack_key_square(const HeadTile& now, int64_t first, int64_t d, int64_t dim, Unit* panel) {
  const PagedTile& tile = *now.tile;
  Vec rows[kLanes];
  LLMK_UNROLL
  for (int j = 0; j < kLanes; ++j) {
    const C* key = reinterpret_cast<const C*>(now.keys + tile.values[first + j]) + d;
    rows[j] = kWhole || first + j < tile.count ? F::template load_key<kWhole>(key, dim - d) : zero();
  }
  store_transposed(rows, panel + d / F::kPerUnit * kKeyTile + first, kKeyTile);
}

template <class F, class C>
static inline void pack_keys(const HeadTile& now, TileFetch* fetch, int64_t dim, Unit* panel) {
  constexpr int64_t kStep = kLanes * F::kPerUnit;
  for (int64_t first = 0; first < kKeyTile; first += kLanes) {
    fetch->some();
    if (first >= now.tile->count) continue;
    for (int64_t d = 0; d < dim; d += kStep) {
      if (first + kLanes <= now.tile->count && d + kStep <= dim) {
        pack_key_square<true, F, C>(now, first, d, dim, panel);
      } else {
        pack_key_square<false, F, C>(now, first, d, dim, panel);
      }
    }
  }
}

template <bool kWhole, class F, class C>
LLMK_INLINE void pack_value_unit(const HeadTile& now, int64_t key, int64_t d, int64_t n, Unit* out) {
  const C* rows[F::kPerUnit];
  LLMK_UNROLL
  for (int i = 0; i < F::kPerUnit; ++i) {
    const bool there = kWhole || key + i < now.tile->count;
    rows[i] = there ? reinterpret_cast<const C*>(now.values + now.tile->values[key + i]) + d : nullptr;
  }
  F::template pack_values<kWhole>(rows, n, out);
}

// Rows of units of keys; the last unit is filled up with zeros. Returns how many.
template <class F, class C>
static inline int64_t pack_values(const HeadTile& now, TileFetch* fetch, int64_t dim, int64_t padded_dim,
                                  Unit* panel) {
  constexpr int kPer = F::kPerUnit;
  for (int64_t first = 0; first < kKeyTile; first += kLanes) {
    fetch->some();
    const int64_t last = smaller(first + kLanes, now.tile->count);
    for (int64_t key = first; key < last; key += kPer) {
      Unit* out = panel + key / kPer * padded_dim;
      const int64_t whole = key + kPer <= last ? dim : 0;
      int64_t d = 0;
      for (; d + F::kDimStep <= whole; d += F::kDimStep) pack_value_unit<true, F, C>(now, key, d, dim - d, out + d);
      for (; d < dim; d += F::kDimStep) pack_value_unit<false, F, C>(now, key, d, dim - d, out + d);
    }
  }
  const int64_t units = ceil_div(now.tile->count, kPer);
#ifdef LLMK_AMX
  // Tiles take 16 units at a time; a weight of zero times what lay there may be NaN.
  const int64_t filled = ceil_div(units, kLanes) * kLanes;
  std::memset(panel + units * padded_dim, 0, static_cast<size_t>((filled - units) * padded_dim) * sizeof(Unit));
#endif
  return units;
}

// out[kKeyTile]; zeros past the tile's keys.
static inline void gather_scales(const PagedTile& tile, const char* base, float* out) {
  for (int64_t first = 0; first < kKeyTile; first += kLanes) {
    const int64_t count = larger(0, smaller(kLanes, tile.count - first));
    if (count == kLanes && tile.scales[first + kLanes - 1] == tile.scales[first] + 4 * (kLanes - 1)) {
      std::memcpy(out + first, base + tile.scales[first], kLanes * sizeof(float));
      continue;
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      out[first + j] = 0;
      if (j < count) std::memcpy(out + first + j, base + tile.scales[first + j], sizeof(float));
    }
  }
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
