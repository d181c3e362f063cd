// The parts of LoRA (lora.h) that are compiled for each instruction set: the products with A, and the addition of the
// products with B.
#pragma once
#include "../common/thread_pool.h"
#include "lora.h"

namespace llmk::LLMK_ARCH {

// How far ahead of its loads shrink_group() prefetches A, in bytes. With one row per adapter, memory limits the speed.
// An iteration reads one cache line of A and prefetches one. If A has floats instead of 16-bit values, an iteration
// reads two lines and prefetches only one.
constexpr int64_t kShrinkAhead = 4096;

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
    __builtin_prefetch(reinterpret_cast<const char*>(a) + kShrinkAhead, 0, 2);
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

// Prefetches the parts of B for a panel. Without prefetches, the epilogue would wait for memory. The caller prefetches
// a few cache lines at a time. Many prefetches together would fill the miss buffers of the core, and the loads of
// weights would wait.
class AdapterFetch {
 public:
  AdapterFetch() = default;

  // Prepares to prefetch the parts of B for `panel`, for the adapters of rows [row, row_end). Immediately prefetches
  // the LoraVectors of the next panel, because the next task of this thread reads them first. The memory of an adapter
  // is prefetched only once, even if rows with other adapters are between its rows. Adapters beyond kMost are not
  // prefetched.
  AdapterFetch(const LoraRows& lora, int64_t panel, int64_t row, int64_t row_end) {
    constexpr int64_t kVectors = 4;  // vectors of a panel
    const LoraWeight* before = nullptr;
    for (; row < row_end && count_ < kMost; ++row) {
      const LoraWeight* weight = lora.weights[row];
      if (weight == nullptr || weight == before) continue;
      before = weight;
      const LoraVector* vectors = weight->vectors + panel * kVectors;
      const LoraVector& last = vectors[kVectors - 1];
      const int64_t size = size_of(static_cast<DType>(weight->dtype));
      const char* b = static_cast<const char*>(weight->b);
      const Part part{b + vectors->begin * size, b + (last.begin + last.num_ranks * kLanes) * size};
      if (has(part)) continue;
      __builtin_prefetch(vectors + kVectors, 0, 3);
      parts_[count_++] = part;
    }
  }

  // Prefetches the next `lines` cache lines of the parts of B.
  void fetch(int64_t lines) {
    for (; count_ > 0 && lines > 0; --lines) {
      Part& part = parts_[count_ - 1];
      if (part.at < part.end) __builtin_prefetch(part.at, 0, 2);
      part.at += 64;
      if (part.at >= part.end) --count_;
    }
  }

  // Prefetches all remaining cache lines of the parts of B.
  void fetch_all() {
    while (count_ > 0) fetch(kMost);
  }

 private:
  static constexpr int kMost = 64;
  struct Part {
    const char *at, *end;
  };

  bool has(const Part& part) const {
    for (int i = 0; i < count_; ++i) {
      if (parts_[i].at == part.at) return true;
    }
    return false;
  }

  Part parts_[kMost];
  int count_ = 0;  // number of parts that still have lines to prefetch
};

// Maximum number of rows with the same adapter whose products with B are computed together. Each part of B is then
// loaded and converted only once for these rows.
constexpr int kExpandRows = 6;

// Multiplies the part of B for vector number `vector` of a packed weight by R rows of A x, which are `stride` floats
// apart. Writes 16 products for each row. The products of successive rows are 2 * kLanes floats apart.
template <int R, class W>
static void expand(const LoraWeight& weight, int64_t vector, const float* shrunk, int64_t stride, float* products) {
  const LoraVector& part = weight.vectors[vector];
  const int64_t count = part.num_ranks;
  const W* b = static_cast<const W*>(weight.b) + part.begin;
  const float* t = shrunk + part.first_rank;
  Vec even[R], odd[R];
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  int64_t j = 0;
  for (; j + 1 < count; j += 2, b += 2 * kLanes) {
    const Vec first = load(b), second = load(b + kLanes);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = fma(broadcast(t[r * stride + j]), first, even[r]);
      odd[r] = fma(broadcast(t[r * stride + j + 1]), second, odd[r]);
    }
  }
  if (j < count) {
    const Vec last = load(b);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) even[r] = fma(broadcast(t[r * stride + j]), last, even[r]);
  }
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) store(products + r * 2 * kLanes, add(even[r], odd[r]));
}

// Calls expand() with the template argument R = `rows`.
template <class W, int R = kExpandRows>
static void expand_rows(const LoraWeight& weight, int64_t vector, int64_t rows, const float* shrunk, int64_t stride,
                        float* products) {
  if constexpr (R > 1) {
    if (rows < R) return expand_rows<W, R - 1>(weight, vector, rows, shrunk, stride, products);
  }
  expand<R, W>(weight, vector, shrunk, stride, products);
}

// Adds the products with B to the outputs of a tile's rows in two vectors of a packed weight. The caller must pass the
// rows in ascending order. Consecutive rows with the same adapter are computed together.
class AdapterAddition {
 public:
  AdapterAddition(const LoraRows* lora, int64_t vector, int64_t row)
      : lora_(lora), vector_(vector), begin_(row), end_(row) {}

  // Adds the products of `row` to its 32 outputs. `row_end` is the end of the tile's rows.
  void add_to(int64_t row, int64_t row_end, Vec (&values)[2]) {
    if (row == end_) compute(row, row_end);
    const LoraWeight* weight = lora_->weights[row];
    if (weight == nullptr) return;
    LLMK_UNROLL
    for (int v = 0; v < 2; ++v) {
      if (weight->vectors[vector_ + v].num_ranks == 0) continue;
      values[v] = add(values[v], load(products_[row - begin_] + v * kLanes));
    }
  }

 private:
  // Computes the products of `row` and of the rows after it that have the same adapter. The function is not inlined,
  // so that the epilogue of rows without adapters stays small.
  __attribute__((noinline)) void compute(int64_t row, int64_t row_end) {
    const LoraWeight* weight = lora_->weights[row];
    begin_ = row;
    end_ = row + 1;
    while (end_ < row_end && end_ < row + kExpandRows && lora_->weights[end_] == weight) ++end_;
    if (weight == nullptr) return;
    const DType dtype = static_cast<DType>(weight->dtype);
    if (dtype == DType::kFloat16) return compute_as<half_t>(*weight);
    if (dtype == DType::kBFloat16) return compute_as<bfloat_t>(*weight);
    compute_as<float>(*weight);
  }

  template <class W>
  void compute_as(const LoraWeight& weight) {
    const float* shrunk = lora_->shrunk + begin_ * lora_->stride;
    for (int v = 0; v < 2; ++v) {
      if (weight.vectors[vector_ + v].num_ranks == 0) continue;
      expand_rows<W>(weight, vector_ + v, end_ - begin_, shrunk, lora_->stride, products_[0] + v * kLanes);
    }
  }

  const LoraRows* lora_;
  int64_t vector_, begin_, end_;  // `products_` has the rows [begin_, end_)
  float products_[kExpandRows][2 * kLanes];
};

}  // namespace llmk::LLMK_ARCH
