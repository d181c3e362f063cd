// LoRA adapters of linear layers. A row of the input may have an adapter. Then the row's output of a packed weight
// (linear.h) gets an additional term, scale * B (A x). A is [rank, depth] and B [columns, rank].
//
// The products with A ("shrink") are computed before the linear layer, always from the float activations, even if the
// weight takes int8 activations. The epilogue of the linear layer adds the products with B, before bias, SwiGLU and
// rounding. Rows without an adapter, and layers that an adapter does not change, take no additional work.
//
// Arithmetic. It is the same for every batch, tile and thread count. All sums are float32. An element of A x is the sum
// over parts of kShrinkDepth depths, in order, times the scale. The sum of a part is the sum over even k plus the sum
// over odd k. The term of an output is the sum over even ranks plus the sum over odd ranks. Each sum begins with the
// lowest index. On AMX, bfloat16 adapters have the sums of tile products (lora_amx.h).
#pragma once
#include "../common/types.h"

namespace llmk {

// The elements of the operators' argument `counts` that describe adapters. They exist only if the server has adapters.
// Element kNumAdapted is the number of rows with an adapter. From element kRowAdapters on, there is one element for
// each row: its adapter slot, or -1 for no adapter.
constexpr int kNumAdapted = 4, kRowAdapters = 5;

constexpr int64_t kRankLanes = 16;

// The part of an adapter for one vector of 16 columns. One cache line describes the four vectors of a panel.
struct LoraVector {
  int64_t begin;       // index in `b` of the vector's first element
  int32_t first_rank;  // an even number
  int32_t num_ranks;   // an even number; the last rank may be zeros. 0: the adapter does not change these columns
};
static_assert(sizeof(LoraVector) == 16, "four vectors fit into a cache line");

// The adapter of one packed weight. A weight may join several layers, such as q, k and v. Then `a` has the rows of all
// their matrices A, one layer after another. The columns of a vector of 16 columns (linear.h) belong to one layer, and
// use only the ranks of this layer.
//
// Depths and ranks are stored in pairs. A pair has 32 numbers: for each of 16 lanes the numbers of both indices, if the
// type is bfloat16. Otherwise 16 numbers of the first index, then 16 of the second. If the depth is odd, zeros follow
// the last depth.
struct LoraWeight {
  int32_t dtype;        // DType of `a` and `b`
  int32_t rank_groups;  // number of groups of 16 rows of A; the last group is filled with zeros
  int64_t depth;
  const void* a;        // [rank_groups][pairs of depths][pair of 16 ranks]
  const float* scales;  // [rank_groups][16 ranks]
  const LoraVector* vectors;  // [vectors]
  const void* b;              // for each vector: [num_ranks / 2][pair of 16 columns]
};

// The adapters of the rows of a linear layer.
struct LoraRows {
  const LoraWeight* const* weights;  // [rows]; null: the row has no adapter of this weight
  const float* shrunk;               // [rows][stride]: scale * (A x)
  int64_t stride;
};

// The number of depths that a task of the products with A adds up.
constexpr int64_t kShrinkDepth = 1024;

// The products with A of all rows of a linear layer, before they are scaled.
struct ShrinkJob {
  const char* x;                // the activations, of the type of the adapters
  int64_t x_stride;             // distance between rows in bytes
  float* sums;                  // [parts of the depth][rows][stride]
  int64_t stride, part_stride;  // part_stride: distance between parts of the depth, in floats
};

// Up to kShrinkRows rows with the same adapter, whose products with A are computed together.
constexpr int kShrinkRows = 32;
struct ShrinkTile {
  const LoraWeight* weight;
  const int32_t* rows;  // the numbers of the rows
  int32_t count;
};

// A part of the depth of one rank group. A task multiplies it by the rows of a tile.
struct ShrinkPart {
  int64_t group, part;
  const void* a;     // the numbers of the part
  const void* next;  // the numbers that the next task reads, to prefetch them
  int64_t next_bytes;
};

// Sets the adapter of a packed weight for one adapter slot. If `adapter` is null, removes the adapter of this slot. The
// caller must keep the memory of the adapter, and must call this only while no linear layer runs.
void set_adapter(const void* packed_weight, int32_t slot, const LoraWeight* adapter);

// Computes the products with A for the rows of a linear layer. `slots` [rows] has the adapter slot of each row. Returns
// false if no row has an adapter of this weight. `out` is valid until the calling thread calls this function again.
bool shrink_rows(const void* packed_weight, const int32_t* slots, int64_t rows, DType dtype, const void* x,
                 int64_t x_stride, LoraRows* out);

}  // namespace llmk

#ifdef LLMK_ARCH
#include "lora_shrink.h"
#endif
