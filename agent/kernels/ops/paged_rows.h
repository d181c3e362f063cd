// The rows (query heads x tokens) of paged attention that share a kv head, and the canonical order of its additions.
// paged_blocks.h computes the rows partition by partition, in this order:
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
#include "paged_panels.h"

namespace llmk::LLMK_ARCH::paged {

constexpr int64_t kTaskRows = 192;
constexpr int64_t kTileRows = 16;   // rows of one head that are processed together
constexpr int64_t kBlockRows = 32;  // rows of a block: those of several heads, or two tiles of rows

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
  // WordForm has two words, one for each pair of elements. WidenedForm has one float for each element of the unit.
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

}  // namespace llmk::LLMK_ARCH::paged
