// Prepares the keys and values of one partition (at most 256 consecutive positions of a sequence) for the products of
// attention. Finds their addresses in the KV cache, and packs them into panels. A panel is the layout from which the
// products read keys or values (paged_units.h).
//
// Some caches already have this layout: they store two bfloat16 or four int8 elements as one unit of 4 bytes
// (cache_has_units in rotary_attention.h). Then nothing is packed, and the products read the cache itself. Only
// FloatForm, which multiplies floats, converts the elements of these units to floats in a panel.
#pragma once
#include "rotary_attention.h"

#include "paged_fetch.h"
#include "paged_units.h"

namespace llmk::LLMK_ARCH::paged {

// The places in the cache of the keys and values at positions [begin, begin + count) of a sequence. `values` has the
// byte offset of each key in the key cache, for kv head 0. The value of the same position has the same offset in the
// value cache.
struct PagedTile {
  int64_t begin, count;
  int64_t values[kPartition];
  int64_t scales[kPartition];  // byte offset of the scale of each key; only set for int8 caches
};

// Finds the places of the keys and values at positions [begin, end) of a sequence, at most one partition.
static inline void locate_tile(const RotaryAttentionArgs& args, int64_t seq, int64_t begin, int64_t end,
                               PagedTile* tile) {
  tile->begin = begin;
  tile->count = larger(0, smaller(kPartition, end - begin));
  const bool rows = lies_in_rows(args);
  for (int64_t i = 0; rows && i < tile->count; ++i) tile->values[i] = ready_place(args, seq, begin + i);
  if (rows) return;
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

// The keys and values of one kv head in a PagedTile.
struct HeadTile {
  const PagedTile* tile;
  const char* keys;  // address of this head in the key cache
  const char* values;
};

// Packs 16 units (32 bits each) of kLanes keys into a panel. Transposes them, because in the panel the same unit of all
// keys is adjacent. The first key is number `first` of the tile, and the first unit begins at dim `d`.
template <bool kWhole, class F, class C>
LLMK_INLINE void pack_key_square(const HeadTile& now, int64_t first, int64_t d, int64_t dim, Unit* panel) {
  const PagedTile& tile = *now.tile;
  Vec rows[kLanes];
  LLMK_UNROLL
  for (int j = 0; j < kLanes; ++j) {
    const C* key = reinterpret_cast<const C*>(now.keys + tile.values[first + j]) + d;
    rows[j] = kWhole || first + j < tile.count ? F::template load_key<kWhole>(key, dim - d) : zero();
  }
  store_transposed(rows, panel + d / F::kPerUnit * kGroupKeys, kGroupKeys);
}

// Packs all keys of a tile into `panel` [group of keys][query_units][kGroupKeys].
template <class F, class C>
static inline void pack_keys(const HeadTile& now, int64_t dim, int64_t query_units, Unit* panel) {
  constexpr int64_t kStep = kLanes * F::kPerUnit;
  for (int64_t first = 0; first < now.tile->count; first += kGroupKeys, panel += query_units * kGroupKeys) {
    for (int64_t d = 0; d < dim; d += kStep) {
      if (first + kLanes <= now.tile->count && d + kStep <= dim) {
        pack_key_square<true, F, C>(now, first, d, dim, panel);
      } else {
        pack_key_square<false, F, C>(now, first, d, dim, panel);
      }
    }
  }
}

// Packs the values of the kPerUnit keys from number `key` on, at the kDimStep dims from `d` on.
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

// Packs the values of a tile into `panel` [unit of keys][padded_dim]. Keys after the last key of the tile get zeros as
// values. Their weight is zero, but zero times uninitialised memory could be NaN.
template <class F, class C>
static inline void pack_values(const HeadTile& now, int64_t dim, int64_t padded_dim, int64_t product_groups,
                               Unit* panel) {
  constexpr int kPer = F::kPerUnit;
  const int64_t count = now.tile->count;
  for (int64_t key = 0; key < count; key += kPer) {
    Unit* out = panel + key / kPer * padded_dim;
    const int64_t whole = key + kPer <= count ? dim : 0;
    int64_t d = 0;
    for (; d + F::kDimStep <= whole; d += F::kDimStep) pack_value_unit<true, F, C>(now, key, d, dim - d, out + d);
    for (; d < dim; d += F::kDimStep) pack_value_unit<false, F, C>(now, key, d, dim - d, out + d);
  }
  const int64_t product = product_groups * kGroupKeys, units = ceil_div(count, kPer);
  const int64_t filled = ceil_div(count, product) * (product / kPer);
  std::memset(panel + units * padded_dim, 0, static_cast<size_t>((filled - units) * padded_dim) * sizeof(Unit));
}

// Returns element `i` of a 32-bit unit as a float. A unit of the cache has several elements of type C: two bfloat16 or
// four int8.
template <class C>
LLMK_INLINE float widen(Unit unit, int i) {
  if constexpr (sizeof(C) == 1) return static_cast<float>(static_cast<int32_t>(unit << (24 - 8 * i)) >> 24);
  if constexpr (sizeof(C) == 2) return bits_to_float(unit >> (16 * i) << 16);
  return bits_to_float(unit);
}

// Converts the keys of a cache with 4-byte units to floats in a panel [group][dim][kGroupKeys]. A unit of the cache has
// kPer dims of a key.
template <class C>
static inline void widen_keys(const HeadTile& now, int64_t dim, Unit* panel) {
  constexpr int kPer = 4 / sizeof(C);
  float* out = reinterpret_cast<float*>(panel);
  for (int64_t first = 0; first < now.tile->count; first += kGroupKeys) {
    const Unit* from = reinterpret_cast<const Unit*>(now.keys + now.tile->values[first]);
    for (int64_t u = 0; u < dim / kPer; ++u, from += kGroupKeys) {
      Unit unbiased[kGroupKeys];
      for (int64_t j = 0; j < kGroupKeys; ++j) unbiased[j] = from[j] ^ (sizeof(C) == 1 ? kKeyBias : 0);
      for (int i = 0; i < kPer; ++i, out += kGroupKeys) {
        for (int64_t j = 0; j < kGroupKeys; ++j) out[j] = widen<C>(unbiased[j], i);
      }
    }
  }
}

// Converts the values of a cache with 4-byte units to floats in a panel [key][padded_dim]. A unit of the cache has one
// dim of the values of kPer consecutive keys. Keys after the last key of the tile get zeros.
template <class C>
static inline void widen_values(const HeadTile& now, int64_t dim, int64_t padded_dim, Unit* panel) {
  constexpr int kPer = 4 / sizeof(C);
  for (int64_t first = 0; first < now.tile->count; first += kGroupKeys) {
    const Unit* from = reinterpret_cast<const Unit*>(now.values + now.tile->values[first]);
    for (int64_t key = first; key < first + kGroupKeys; key += kPer, from += dim) {
      for (int i = 0; i < kPer; ++i) {
        float* out = reinterpret_cast<float*>(panel) + (key + i) * padded_dim;
        const bool there = key + i < now.tile->count;
        for (int64_t d = 0; d < dim; ++d) out[d] = there ? widen<C>(from[d], i) : 0.0f;
      }
    }
  }
}

// Copies the scales of int8 keys or values to `out` [kPartition], for groups [begin, end) of 16 keys. Entries after the
// last key become 0.
static inline void gather_scales(const PagedTile& tile, const char* base, int64_t begin, int64_t end, float* out) {
  for (int64_t first = begin * kLanes; first < end * kLanes; first += kLanes) {
    const int64_t count = larger(0, smaller(kLanes, tile.count - first));
    if (count == 0) {
      store(out + first, zero());
      continue;
    }
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

// Returns the largest scale of a partition.
LLMK_INLINE float largest_of(const float* scales) {
  Vec top = zero();
  for (int64_t key = 0; key < kPartition; key += kLanes) top = maximum(top, load(scales + key));
  return largest(top);
}

// Points to the packed keys and values of one head in one partition. Each pointer in `keys` is for a group of 16 keys.
// Each pointer in `values` is for the values that one product reads. These are the values of one group of keys, or on
// AMX of all groups that fill a tile register.
struct TilePanels {
  int64_t begin, groups;            // first key, and number of groups of kGroupKeys keys
  int64_t value_stride;             // distance between units of values; between units of keys it is kGroupKeys
  // Each pointer is the address of an array [unit of dims][kGroupKeys]. Pointers from number `groups` on equal the
  // first pointer, so that a product over several panels can read them.
  const Unit* keys[kPartGroups];
  const Unit* values[kPartGroups];  // each pointer: address of an array [unit of keys][dim]
  float* key_scales;                // scales of the keys [kPartition] for int8 caches, or null
  float* value_scales;
  float largest_value_scale;        // largest value scale of the whole partition
};

// Returns true if the products can read the panels directly from the cache.
template <class F, class C>
static inline bool reads_cache(const RotaryAttentionArgs& args) {
  return F::kPerUnit > 1 && F::kPerUnit * sizeof(C) == 4 && cache_has_units(args);
}

// Returns the size of a head's panel of keys, in units. The function value_panel_units() returns the size of a head's
// panel of values.
static inline int64_t key_panel_units(int64_t query_units) { return query_units * kPartition; }
static inline int64_t value_panel_units(int64_t padded_dim) { return kPartition * padded_dim; }

static inline void point_at_keys(const HeadTile& now, TilePanels* panels) {
  for (int64_t g = 0; g < kPartGroups; ++g) {
    panels->keys[g] =
        reinterpret_cast<const Unit*>(now.keys + now.tile->values[g < panels->groups ? g * kGroupKeys : 0]);
  }
}

// Copies the values of the first `there` keys of a group. Sets the values of the other keys to zero, because the memory
// of these keys may be uninitialised and hold NaN.
template <class F>
static inline void copy_group(const Unit* from, int64_t there, int64_t dim, Unit* out) {
  constexpr int kPer = F::kPerUnit;
  const int64_t whole = smaller(there, kGroupKeys) / kPer;
  for (int64_t i = 0; i < whole * dim; i += kLanes) {
    store(reinterpret_cast<float*>(out) + i, load(reinterpret_cast<const float*>(from) + i));
  }
  for (int64_t key = whole * kPer; key < kGroupKeys; key += kPer) {
    const int64_t rest = larger(0, smaller(kPer, there - key));
    const Unit mask = (Unit{1} << (32 / kPer * rest)) - 1;  // keeps the first `rest` elements of a unit
    for (int64_t d = 0; d < dim; ++d) out[key / kPer * dim + d] = rest > 0 ? from[key / kPer * dim + d] & mask : 0;
  }
}

// Sets panels->values for groups [begin, end). Each pointer is the address of the values of `product_groups` groups. If
// these groups are complete and adjacent in the cache, this is an address in the cache. Otherwise the values are copied
// to `buffer`, and this is the address of the copy.
template <class F>
static inline void point_at_values(const HeadTile& now, int64_t begin, int64_t end, int64_t dim, int64_t product_groups,
                                   Unit* buffer, TilePanels* panels) {
  const PagedTile& tile = *now.tile;
  const int64_t units = kGroupKeys / F::kPerUnit * dim;
  for (int64_t g = begin; g < end; g += product_groups) {
    const int64_t there = tile.count - g * kGroupKeys, first = tile.values[g * kGroupKeys];
    bool lies = there >= product_groups * kGroupKeys;
    for (int64_t i = 1; i < product_groups && lies; ++i) {
      lies = tile.values[(g + i) * kGroupKeys] == first + i * units * static_cast<int64_t>(sizeof(Unit));
    }
    panels->values[g / product_groups] = lies ? reinterpret_cast<const Unit*>(now.values + first) : buffer;
    for (int64_t i = 0; i < product_groups && !lies; ++i, buffer += units) {
      const int64_t keys = there - i * kGroupKeys;
      const int64_t place = keys > 0 ? tile.values[(g + i) * kGroupKeys] : 0;
      copy_group<F>(reinterpret_cast<const Unit*>(now.values + place), larger(0, keys), dim, buffer);
    }
  }
}

}  // namespace llmk::LLMK_ARCH::paged
