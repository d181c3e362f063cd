// Products of bfloat16 adapters (lora.h) on AMX tiles.
//
// A tile product (amx_tiles.h) of A covers 32 depths. The sum over a part of the depth is the sum of the tile products
// with even numbers plus the sum of those with odd numbers. Any number of rows uses tiles.
//
// B multiplies t = scale * (A x). Each element of t is rounded to the sum of two bfloat16 numbers. The error is at most
// 2^-18 of the element. A tile product of B covers a rank group. It first adds the products with the larger numbers,
// then those with the smaller numbers. The tile products of the rank groups are added in order. Few rows use vectors
// instead of tiles: they compute the even and the odd elements of a tile product as the tiles do, and have the same
// bits.
#pragma once
#include "../common/thread_pool.h"
#include "amx_tiles.h"
#include "linear.h"

namespace llmk::LLMK_ARCH {

// Products with A.
struct ShrinkTiles {
  static constexpr int64_t kDepth = 2 * kAmxSteps;  // depths of a tile product
  static_assert(kShrinkDepth % kDepth == 0 && kShrinkRows == 2 * kAmxRows, "a part has whole tiles");

  // Returns true if the depth consists of whole tiles. A shorter last tile would read past the rows.
  static bool fit(const ShrinkTile& tile) { return tile.weight->depth % kDepth == 0; }

  // Computes sums of A x for the rows of a tile, one rank group and one part of the depth.
  static void multiply(const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& at) {
    const int64_t begin = at.part * kShrinkDepth, depth = smaller(kShrinkDepth, tile.weight->depth - begin);
    const bfloat_t* a = static_cast<const bfloat_t*>(at.a);
    Fetch fetch(static_cast<const uint8_t*>(at.next), at.next_bytes);
    const int64_t lines = ceil_div(at.next_bytes, 64 * Fetch::kStreams * (depth / kDepth));  // for each tile product
    const Rows x = rows_of(job, tile, begin, depth);
    const int64_t upper = smaller(kAmxRows, tile.count), lower = tile.count - upper;
    alignas(64) float sums[4][kAmxRows][kLanes];
    configure_tiles(upper, lower);
    lower > 0 ? multiply_rows<true>(x, upper, a, depth, &fetch, lines, sums)
              : multiply_rows<false>(x, upper, a, depth, &fetch, lines, sums);
    release_tiles();
    float* out = job.sums + at.part * job.part_stride + at.group * kRankLanes;
    for (int32_t r = 0; r < tile.count; ++r) {
      const int64_t block = r / kAmxRows * 2, i = r % kAmxRows;
      store(out + tile.rows[r] * job.stride, add(load(sums[block][i]), load(sums[block + 1][i])));
    }
  }

 private:
  struct Rows {
    const char* x;
    int64_t stride;  // in bytes
  };

  // Returns the activations of a tile's rows. If the rows are not equally far apart, copies them.
  static Rows rows_of(const ShrinkJob& job, const ShrinkTile& tile, int64_t begin, int64_t depth) {
    const int64_t distance = tile.count > 1 ? tile.rows[1] - tile.rows[0] : 1;
    bool regular = true;
    for (int32_t r = 2; r < tile.count; ++r) regular &= tile.rows[r] - tile.rows[r - 1] == distance;
    const char* first = job.x + begin * static_cast<int64_t>(sizeof(bfloat_t));
    if (regular) return {first + tile.rows[0] * job.x_stride, distance * job.x_stride};
    const int64_t bytes = depth * static_cast<int64_t>(sizeof(bfloat_t)), stride = bytes + 64;
    char* copy = static_cast<char*>(thread_scratch(kScratchLoraRows, kShrinkRows * stride));
    for (int32_t r = 0; r < tile.count; ++r) std::memcpy(copy + r * stride, first + tile.rows[r] * job.x_stride, bytes);
    return {copy, stride};
  }

  // Multiplies `upper` rows, and up to 16 more rows if kBoth. Tiles 0 and 2 have the even tile products of the upper
  // and lower rows, tiles 1 and 3 the odd ones.
  template <bool kBoth>
  static void multiply_rows(const Rows& x, int64_t upper, const bfloat_t* a, int64_t depth, Fetch* fetch,
                            int64_t lines, float (&sums)[4][kAmxRows][kLanes]) {
    const char *high = x.x, *low = x.x + upper * x.stride;
    constexpr int64_t kBytes = kDepth * sizeof(bfloat_t), kTile = kDepth * kRankLanes;
    clear_tile<0>();
    clear_tile<1>();
    if constexpr (kBoth) clear_tile<2>();
    if constexpr (kBoth) clear_tile<3>();
    for (int64_t k = 0; k < depth; k += 2 * kDepth) {
      step<kBoth, 0>(high, low, x.stride, a);
      fetch->lines(lines);
      high += kBytes, low += kBytes, a += kTile;
      if (k + kDepth == depth) break;
      step<kBoth, 1>(high, low, x.stride, a);
      fetch->lines(lines);
      high += kBytes, low += kBytes, a += kTile;
    }
    store_tile<0>(sums[0], kLanes * 4);
    store_tile<1>(sums[1], kLanes * 4);
    if constexpr (kBoth) store_tile<2>(sums[2], kLanes * 4);
    if constexpr (kBoth) store_tile<3>(sums[3], kLanes * 4);
  }

  template <bool kBoth, int kOdd>
  LLMK_INLINE void step(const char* high, const char* low, int64_t stride, const bfloat_t* a) {
    LLMK_UNROLL
    for (int line = 0; line < 16; ++line) {
      __builtin_prefetch(reinterpret_cast<const char*>(a) + kShrinkAhead + line * 64, 0, 2);
    }
    load_tile<6 + kOdd>(a, 64);
    load_tile<4>(high, stride);
    multiply_bfloats<kOdd, 4, 6 + kOdd>();
    if constexpr (kBoth) load_tile<5>(low, stride);
    if constexpr (kBoth) multiply_bfloats<2 + kOdd, 5, 6 + kOdd>();
  }
};

// Numbers of a rank group in SplitRows.
constexpr int64_t kSplitGroup = 2 * kRankLanes;

// Rounds a vector to bfloat16. Writes the result as bfloat16 and as floats.
LLMK_INLINE void split(Vec t, bfloat_t* values, float* floats) {
  const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(t.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), rounded);
  store(floats, {widen(rounded, values)});
}

// Writes the products with A of all rows as pairs of bfloat16 numbers into memory of the calling thread.
static inline SplitRows split_rows(const LoraRows& lora, int64_t rows) {
  const int64_t stride = 2 * lora.stride;
  float* floats = static_cast<float*>(thread_scratch(kScratchLoraSplit, rows * stride * 6));
  bfloat_t* values = reinterpret_cast<bfloat_t*>(floats + rows * stride);
  for (int64_t row = 0; row < rows; ++row) {
    if (lora.weights[row] == nullptr) continue;
    const float* from = lora.shrunk + row * lora.stride;
    for (int64_t i = 0; i < lora.weights[row]->rank_groups * kRankLanes; i += kRankLanes) {
      const Vec t = load(from + i);
      const int64_t at = row * stride + 2 * i;
      split(t, values + at, floats + at);
      split(sub(t, load(floats + at)), values + at + kRankLanes, floats + at + kRankLanes);
    }
  }
  return {values, floats, stride};
}

// Products with B for up to 32 rows and the 32 columns of half a panel.
class ExpandTiles {
 public:
  ExpandTiles(const LoraRows* lora, const SplitRows& split) : lora_(lora), split_(split) {}

  // Computes the products for rows [row, row + upper + lower) and two vectors of a packed weight. The tiles must be
  // configured for `upper` and `lower` rows, and must not hold sums that are still needed. Calls meanwhile() for each
  // adapter.
  template <class Meanwhile>
  void compute(int64_t vector, int64_t row, int64_t upper, int64_t lower, const Meanwhile& meanwhile) {
    const int64_t end = row + upper + lower;
    const uint64_t all = (uint64_t{1} << (end - row)) - 1;
    if (end - row >= kLeastRows && lora_->weights[row] != nullptr && rows_like(row, row, end) == all) {
      meanwhile();
      return lower > 0 ? multiply<true>(vector, row, upper) : multiply<false>(vector, row, upper);
    }
    // Tiles treat subnormal numbers as zeros.
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode | kZeroSubnormals);
    for_adapters(row, end, [&](uint64_t rows) {
      meanwhile();
      multiply_rows(vector, row, rows);
    });
    _mm_setcsr(mode);
  }

  // Returns the number of different adapters of up to 32 rows.
  int64_t count_adapters(int64_t row, int64_t end) const {
    int64_t count = 0;
    for_adapters(row, end, [&](uint64_t) { ++count; });
    return count;
  }

  // Returns the products of the last call of compute(): [rows][32].
  const float* products() const { return products_; }

 private:
  // Minimum number of rows that are multiplied on tiles. Fewer rows, and rows with different adapters, are multiplied
  // in vector registers, with the same bits.
  static constexpr int64_t kLeastRows = 5;
  static constexpr int kPairs = kRankLanes / 2;
  static constexpr unsigned int kZeroSubnormals = 0x8040;  // the bits FTZ and DAZ of MXCSR

  // Returns the rows of [begin, end) that have the adapter of `row`. Bit i is row begin + i.
  uint64_t rows_like(int64_t row, int64_t begin, int64_t end) const {
    uint64_t rows = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      rows |= static_cast<uint64_t>(lora_->weights[begin + i] == lora_->weights[row]) << i;
    }
    return rows;
  }

  // Calls visit(rows) for each adapter of rows [row, end), with the bits of rows_like().
  template <class Visit>
  void for_adapters(int64_t row, int64_t end, const Visit& visit) const {
    uint64_t done = 0;
    for (int64_t i = 0; i < end - row; ++i) {
      if ((done >> i & 1) != 0 || lora_->weights[row + i] == nullptr) continue;
      const uint64_t rows = rows_like(row + i, row, end);
      done |= rows;
      visit(rows);
    }
  }

  template <bool kBoth>
  void multiply(int64_t vector, int64_t row, int64_t upper) {
    const LoraVector* parts = lora_->weights[row]->vectors + vector;
    const bfloat_t* t = split_.values + row * split_.stride;
    multiply_vector<kBoth, 0>(*lora_->weights[row], parts[0], t, upper, products_);
    multiply_vector<kBoth, 1>(*lora_->weights[row], parts[1], t, upper, products_ + kLanes);
  }

  template <bool kBoth, int kVector>
  void multiply_vector(const LoraWeight& weight, const LoraVector& part, const bfloat_t* t, int64_t upper,
                       float* products) {
    if (part.num_ranks == 0) return;
    const int64_t row_bytes = split_.stride * static_cast<int64_t>(sizeof(bfloat_t));
    clear_tile<kVector>();
    if constexpr (kBoth) clear_tile<2 + kVector>();
    for (int64_t group = part.first_rank / kRankLanes; group <= last_group(part); ++group) {
      const bfloat_t* from = t + group * kSplitGroup;
      load_tile<4>(from, row_bytes);
      load_tile<6 + kVector>(tile_of(weight, part, group, kVector), 64);
      multiply_bfloats<kVector, 4, 6 + kVector>();
      if constexpr (kBoth) load_tile<5>(from + upper * split_.stride, row_bytes);
      if constexpr (kBoth) multiply_bfloats<2 + kVector, 5, 6 + kVector>();
    }
    store_tile<kVector>(products, 2 * kLanes * 4);
    if constexpr (kBoth) store_tile<2 + kVector>(products + upper * 2 * kLanes, 2 * kLanes * 4);
  }

  static int64_t last_group(const LoraVector& part) { return (part.first_rank + part.num_ranks - 1) / kRankLanes; }

  // Returns pair number `i` of a rank group of B. Ranks outside of the vector's part are zeros.
  LLMK_INLINE Ints pair_of(const bfloat_t* b, const LoraVector& part, int64_t group, int i) {
    const int64_t pair = (group * kRankLanes - part.first_rank) / 2 + i;
    return pair >= 0 && pair < part.num_ranks / 2 ? load_ints(b + pair * kPair) : broadcast_int(0);
  }

  // Returns the weights of a tile product: the part of B for one rank group, twice, because the larger and the smaller
  // parts of t are multiplied by it.
  const uint8_t* tile_of(const LoraWeight& weight, const LoraVector& part, int64_t group, int vector) {
    const bfloat_t* b = static_cast<const bfloat_t*>(weight.b) + part.begin;
    Tile& tile = tiles_[vector];
    if (tile.b == b && tile.group == group) return tile.bytes;
    tile.b = b;
    tile.group = group;
    LLMK_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const Ints pair = pair_of(b, part, group, i);
      store_ints(tile.bytes + i * 64, pair);
      store_ints(tile.bytes + (kPairs + i) * 64, pair);
    }
    return tile.bytes;
  }

  // Computes the products of rows with the same adapter in vector registers. `rows` has the bits of rows_like(), and
  // `row` is the first row of the range. Not inlined, because the compiler could move its arithmetic to before the
  // change of the rounding mode.
  __attribute__((noinline)) void multiply_rows(int64_t vector, int64_t row, uint64_t rows) {
    const LoraWeight& weight = *lora_->weights[row + __builtin_ctzll(rows)];
    const float* t = split_.floats + row * split_.stride;
    for (int v = 0; v < 2; ++v) {
      const LoraVector& part = weight.vectors[vector + v];
      const bfloat_t* b = static_cast<const bfloat_t*>(weight.b) + part.begin;
      const int64_t first = part.first_rank / kRankLanes;
      for (int64_t group = first; part.num_ranks > 0 && group <= last_group(part); ++group) {
        multiply_group(b, part, group, t + group * kSplitGroup, rows, group == first, products_ + v * kLanes);
      }
    }
  }

  // Adds up the products in the order of a tile product: even ranks and odd ranks, then the sum of both.
  inline void multiply_group(const bfloat_t* b, const LoraVector& part, int64_t group, const float* t,
                             uint64_t rows, bool first, float* out) {
    Vec even_b[kPairs], odd_b[kPairs];
    LLMK_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const Ints pair = pair_of(b, part, group, i);
      even_b[i] = low_bfloats(pair);
      odd_b[i] = high_bfloats(pair);
    }
    for (; rows != 0; rows &= rows - 1) {
      const int64_t r = __builtin_ctzll(rows);
      const float* from = t + r * split_.stride;
      float* products = out + r * 2 * kLanes;
      Vec even = zero(), odd = zero();
      LLMK_UNROLL
      for (int i = 0; i < 2 * kPairs; ++i) {
        even = fma(broadcast(from[2 * i]), even_b[i % kPairs], even);
        odd = fma(broadcast(from[2 * i + 1]), odd_b[i % kPairs], odd);
      }
      store(products, add(first ? zero() : load(products), add(even, odd)));
    }
  }

  struct Tile {
    alignas(64) uint8_t bytes[kAmxSteps * 64];
    const bfloat_t* b = nullptr;  // the vector's part of B, and the rank group, that `bytes` has
    int64_t group = 0;
  };

  const LoraRows* lora_;
  const SplitRows& split_;
  Tile tiles_[2];
  alignas(64) float products_[2 * kAmxRows * 2 * kLanes];
};

}  // namespace llmk::LLMK_ARCH
