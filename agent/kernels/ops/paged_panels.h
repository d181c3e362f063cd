// A tile of kKeyTile keys of one sequence: where they lie, and how they become the panels of paged_units.h. Where the
// cache holds units (rotary_attention.h) of the form's products, the cache itself is the panel; FloatForm widens them.
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
static inline void pack_keys(const HeadTile& now, int64_t dim, Unit* panel) {
  constexpr int64_t kStep = kLanes * F::kPerUnit;
  for (int64_t first = 0; first < kKeyTile; first += kLanes) {
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

// Rows of units of keys; the last group is filled up with zeros: a weight of zero times what lay there may be NaN.
template <class F, class C>
static inline void pack_values(const HeadTile& now, int64_t dim, int64_t padded_dim, Unit* panel) {
  constexpr int kPer = F::kPerUnit;
  const int64_t count = now.tile->count;
  for (int64_t key = 0; key < count; key += kPer) {
    Unit* out = panel + key / kPer * padded_dim;
    const int64_t whole = key + kPer <= count ? dim : 0;
    int64_t d = 0;
    for (; d + F::kDimStep <= whole; d += F::kDimStep) pack_value_unit<true, F, C>(now, key, d, dim - d, out + d);
    for (; d < dim; d += F::kDimStep) pack_value_unit<false, F, C>(now, key, d, dim - d, out + d);
  }
  const int64_t units = ceil_div(count, kPer), filled = ceil_div(count, kGroupKeys) * (kGroupKeys / kPer);
  std::memset(panel + units * padded_dim, 0, static_cast<size_t>((filled - units) * padded_dim) * sizeof(Unit));
}

// Element `i` of a unit of the cache.
template <class C>
LLMK_INLINE float widen(Unit unit, int i) {
  if constexpr (sizeof(C) == 1) return static_cast<float>(static_cast<int32_t>(unit << (24 - 8 * i)) >> 24);
  if constexpr (sizeof(C) == 2) return bits_to_float(unit >> (16 * i) << 16);
  return bits_to_float(unit);
}

template <class C>
static inline void widen_units(const HeadTile& now, int64_t dim, int64_t padded_dim, Unit* keys, Unit* values) {
  constexpr int kPer = 4 / sizeof(C);
  for (int64_t first = 0; first < now.tile->count; first += kGroupKeys) {
    const Unit* from = reinterpret_cast<const Unit*>(now.keys + now.tile->values[first]);
    for (int64_t u = 0; u < dim / kPer; ++u, from += kGroupKeys) {
      Unit unbiased[kGroupKeys];
      for (int64_t j = 0; j < kGroupKeys; ++j) unbiased[j] = from[j] ^ (sizeof(C) == 1 ? kKeyBias : 0);
      for (int i = 0; i < kPer; ++i) {
        float* out = reinterpret_cast<float*>(keys) + (u * kPer + i) * kKeyTile + first;
        for (int64_t j = 0; j < kGroupKeys; ++j) out[j] = widen<C>(unbiased[j], i);
      }
    }
    from = reinterpret_cast<const Unit*>(now.values + now.tile->values[first]);
    for (int64_t key = first; key < first + kGroupKeys; key += kPer, from += dim) {
      for (int i = 0; i < kPer; ++i) {
        float* out = reinterpret_cast<float*>(values) + (key + i) * padded_dim;
        const bool there = key + i < now.tile->count;
        for (int64_t d = 0; d < dim; ++d) out[d] = there ? widen<C>(from[d], i) : 0.0f;
      }
    }
  }
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

// What the products of a tile and a head read.
struct TilePanels {
  int64_t begin, groups;             // of kGroupKeys keys that exist
  int64_t key_stride, value_stride;  // from a unit to the next
  const Unit* keys[kTileGroups];     // [unit of dims][kGroupKeys]; past `groups` the first
  const Unit* values[kTileGroups];   // [unit of keys][dim]
  const float* key_scales;           // int8 caches; null otherwise
  const float* value_scales;
};

// True where the products read the cache itself.
template <class F, class C>
static inline bool reads_cache(const RotaryAttentionArgs& args) {
  return F::kPerUnit > 1 && F::kPerUnit * sizeof(C) == 4 && cache_has_units(args);
}

// Units of the memory for a head's panels.
static inline int64_t key_panel_units(int64_t query_units, int64_t per_unit) { return query_units * per_unit * kKeyTile; }
static inline int64_t value_panel_units(int64_t padded_dim) { return kKeyTile * padded_dim; }

// The cache as panels. The end of the last group may hold anything, even NaN: it is copied without that to `tail`.
template <class F>
static inline void point_at_cache(const HeadTile& now, int64_t dim, Unit* tail, TilePanels* panels) {
  constexpr int kPer = F::kPerUnit;
  for (int64_t g = 0; g < kTileGroups; ++g) {
    const int64_t place = now.tile->values[g < panels->groups ? g * kGroupKeys : 0];
    panels->keys[g] = reinterpret_cast<const Unit*>(now.keys + place);
    panels->values[g] = reinterpret_cast<const Unit*>(now.values + place);
  }
  panels->key_stride = kGroupKeys;
  panels->value_stride = dim;
  const int64_t last = now.tile->count % kGroupKeys;  // (zero times a byte is zero)
  if (!F::kFloatUnits || last == 0) return;
  const Unit* from = panels->values[panels->groups - 1];
  for (int64_t key = 0; key < kGroupKeys; key += kPer) {
    const int64_t there = larger(0, smaller(kPer, last - key));
    const Unit mask = there == kPer ? ~Unit{0} : (Unit{1} << (32 / kPer * there)) - 1;
    for (int64_t d = 0; d < dim; ++d) tail[key / kPer * dim + d] = from[key / kPer * dim + d] & mask;
  }
  panels->values[panels->groups - 1] = tail;
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
