// The parts of LoRA (lora.h) that are compiled for each instruction set: the products with A, and the addition of the
// products with B.
#pragma once
#include "../common/thread_pool.h"
#include "lora.h"

namespace llmk::LLMK_ARCH {

// Multiplies R rows by one rank group: 16 rows of A. `x` has the activations as floats, with `depth` floats per row.
template <int R, class W>
static void shrink_group(const ShrinkTile& tile, int64_t group, const float* x) {
  const int64_t depth = tile.weight->depth;
  const W* a = static_cast<const W*>(tile.weight->a) + group * depth * kRankLanes;
  Vec even[R], odd[R];
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  int64_t k = 0;
  for (; k + 1 < depth; k += 2, a += 2 * kRankLanes) {
    const Vec first = load(a), second = load(a + kRankLanes);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = fma(broadcast(x[r * depth + k]), first, even[r]);
      odd[r] = fma(broadcast(x[r * depth + k + 1]), second, odd[r]);
    }
  }
  if (k < depth) {
    const Vec last = load(a);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) even[r] = fma(broadcast(x[r * depth + k]), last, even[r]);
  }
  const Vec scale = load(tile.weight->scales + group * kRankLanes);
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) store(tile.out[r] + group * kRankLanes, mul(add(even[r], odd[r]), scale));
}

template <class W>
static void shrink_as(const ShrinkTile& tile, int64_t group) {
  const int64_t depth = tile.weight->depth;
  float* x = static_cast<float*>(thread_scratch(kScratchLoraRows, kShrinkRows * depth * 4));
  for (int32_t r = 0; r < tile.rows; ++r) {
    const W* from = static_cast<const W*>(tile.x[r]);
    for (int64_t k = 0; k < depth; k += kLanes) {
      store_part(x + r * depth + k, load_part(from + k, depth - k), depth - k);
    }
  }
  static_assert(kShrinkRows == 4, "a case for each number of rows");
  switch (tile.rows) {
    case 1: return shrink_group<1, W>(tile, group, x);
    case 2: return shrink_group<2, W>(tile, group, x);
    case 3: return shrink_group<3, W>(tile, group, x);
    default: return shrink_group<4, W>(tile, group, x);
  }
}

// Computes scale * (A x) for the rows of a tile and one rank group.
static void lora_shrink(const ShrinkTile& tile, int64_t group) {
  const DType dtype = static_cast<DType>(tile.weight->dtype);
  if (dtype == DType::kFloat16) return shrink_as<half_t>(tile, group);
  if (dtype == DType::kBFloat16) return shrink_as<bfloat_t>(tile, group);
  shrink_as<float>(tile, group);
}

// Prefetches the part of B for one panel, for the adapters of rows [row, row_end). Otherwise the epilogue would wait
// for memory. Consecutive rows often have the same adapter, whose part of B is prefetched only once.
static inline void fetch_adapters(const LoraRows& lora, int64_t panel, int64_t row, int64_t row_end) {
  constexpr int64_t kVectors = 4;  // vectors of a panel
  const LoraWeight* before = nullptr;
  for (; row < row_end; ++row) {
    const LoraWeight* weight = lora.weights[row];
    if (weight == nullptr || weight == before) continue;
    before = weight;
    const int64_t first = panel * kVectors, last = first + kVectors - 1;
    const int64_t size = size_of(static_cast<DType>(weight->dtype));
    const char* b = static_cast<const char*>(weight->b);
    const int64_t end = (weight->begin[last] + weight->num_ranks[last] * kLanes) * size;
    for (int64_t at = weight->begin[first] * size; at < end; at += 64) __builtin_prefetch(b + at, 0, 2);
  }
}

// LoRA: multiplies the matrix B by `shrunk`, which is A times a row of activations. Adds the result to the row's 16
// outputs in vector number `vector` of a packed weight.
template <class W>
LLMK_INLINE void expand(const LoraWeight& weight, int64_t vector, const float* shrunk, Vec* value) {
  const int64_t count = weight.num_ranks[vector];
  if (count == 0) return;
  const W* b = static_cast<const W*>(weight.b) + weight.begin[vector];
  const float* t = shrunk + weight.first_rank[vector];
  Vec even = zero(), odd = zero();
  int64_t j = 0;
  for (; j + 1 < count; j += 2) {
    even = fma(broadcast(t[j]), load(b + j * kLanes), even);
    odd = fma(broadcast(t[j + 1]), load(b + (j + 1) * kLanes), odd);
  }
  if (j < count) even = fma(broadcast(t[j]), load(b + j * kLanes), even);
  *value = add(*value, add(even, odd));
}

// Adds the adapter of row `row` to the 32 outputs of vectors `vector` and `vector` + 1. The function is not inlined, so
// that the epilogue of rows without adapters stays small.
__attribute__((noinline)) static void add_adapter(const LoraRows& lora, int64_t row, int64_t vector, Vec (&values)[2]) {
  const LoraWeight* weight = lora.weights[row];
  if (weight == nullptr) return;
  const float* shrunk = lora.shrunk + row * lora.stride;
  const DType dtype = static_cast<DType>(weight->dtype);
  for (int v = 0; v < 2; ++v) {
    if (dtype == DType::kFloat16) {
      expand<half_t>(*weight, vector + v, shrunk, &values[v]);
    } else if (dtype == DType::kBFloat16) {
      expand<bfloat_t>(*weight, vector + v, shrunk, &values[v]);
    } else {
      expand<float>(*weight, vector + v, shrunk, &values[v]);
    }
  }
}

}  // namespace llmk::LLMK_ARCH
