// The parts of LoRA (lora.h) that are compiled for each instruction set: the products with A, and the addition of the
// products with B.
#pragma once
#include "../common/thread_pool.h"
#include "lora.h"

namespace llmk::LLMK_ARCH {

// How far ahead of its loads shrink_group() prefetches A, in bytes. With one row per adapter, memory limits the speed.
constexpr int64_t kShrinkAhead = 4096;

// Loads the numbers of two depths or two ranks (LoraWeight).
template <class W>
LLMK_INLINE void load_pair(const W* p, Vec* first, Vec* second) {
  *first = load(p);
  *second = load(p + kLanes);
}
LLMK_INLINE void load_pair(const bfloat_t* p, Vec* first, Vec* second) {
  const Ints pairs = load_ints(p);
  *first = low_bfloats(pairs);
  *second = high_bfloats(pairs);
}
constexpr int64_t kPair = 2 * kLanes;  // numbers of a pair

// Multiplies R rows by `depth` depths of one rank group: 16 rows of A. `x` has the activations as floats, with
// kShrinkDepth floats per row. out[r] receives the sums of row r.
template <int R, class W>
static void shrink_group(const W* a, const float* x, int64_t depth, float* const* out) {
  Vec even[R], odd[R], first, second;
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  int64_t k = 0;
  for (; k + 1 < depth; k += 2, a += kPair) {
    __builtin_prefetch(reinterpret_cast<const char*>(a) + kShrinkAhead, 0, 2);
    if (sizeof(W) == 4) __builtin_prefetch(reinterpret_cast<const char*>(a) + kShrinkAhead + 64, 0, 2);
    load_pair(a, &first, &second);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = fma(broadcast(x[r * kShrinkDepth + k]), first, even[r]);
      odd[r] = fma(broadcast(x[r * kShrinkDepth + k + 1]), second, odd[r]);
    }
  }
  if (k < depth) {
    load_pair(a, &first, &second);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) even[r] = fma(broadcast(x[r * kShrinkDepth + k]), first, even[r]);
  }
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) store(out[r], add(even[r], odd[r]));
}

// Computes sums of A x for the rows of a tile and one part of A.
template <class W>
static void lora_shrink(const ShrinkJob& job, const ShrinkTile& tile, const ShrinkPart& at) {
  constexpr int kRows = 4;  // rows that are computed together
  const int64_t begin = at.part * kShrinkDepth, depth = smaller(kShrinkDepth, tile.weight->depth - begin);
  const W* a = static_cast<const W*>(at.a);
  alignas(64) float x[kRows * kShrinkDepth];
  for (int32_t first = 0; first < tile.count; first += kRows) {
    const int rows = static_cast<int>(smaller(kRows, tile.count - first));
    float* out[kRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t row = tile.rows[first + r];
      const W* from = reinterpret_cast<const W*>(job.x + row * job.x_stride) + begin;
      float* to = x + r * kShrinkDepth;
      for (int64_t k = 0; k < depth; k += kLanes) store_part(to + k, load_part(from + k, depth - k), depth - k);
      out[r] = job.sums + at.part * job.part_stride + row * job.stride + at.group * kRankLanes;
    }
    switch (rows) {
      case 1: shrink_group<1>(a, x, depth, out); break;
      case 2: shrink_group<2>(a, x, depth, out); break;
      case 3: shrink_group<3>(a, x, depth, out); break;
      default: shrink_group<4>(a, x, depth, out);
    }
  }
}

// Products with A, each as the sum of a larger and a smaller bfloat16 number (lora_amx.h). For each rank group, a row
// has the 16 larger numbers, then the 16 smaller numbers.
struct SplitRows {
  const bfloat_t* values = nullptr;  // [rows][stride]; null: no row has an adapter
  const float* floats = nullptr;     // the same numbers as floats
  int64_t stride = 0;
};

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

  // Returns the number of cache lines to prefetch.
  int64_t lines() const {
    int64_t total = 0;
    for (int i = 0; i < count_; ++i) total += ceil_div(parts_[i].end - parts_[i].at, 64);
    return total;
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
  const W* b = static_cast<const W*>(weight.b) + part.begin;
  const float* t = shrunk + part.first_rank;
  Vec even[R], odd[R], first, second;
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
  for (int64_t j = 0; j < part.num_ranks; j += 2, b += kPair) {
    load_pair(b, &first, &second);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      even[r] = fma(broadcast(t[r * stride + j]), first, even[r]);
      odd[r] = fma(broadcast(t[r * stride + j + 1]), second, odd[r]);
    }
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
  // `products` [rows][32] has the products of the rows from `row` on. If it is null, this class computes them.
  AdapterAddition(const LoraRows* lora, int64_t vector, int64_t row, const float* products)
      : lora_(lora), given_(products), vector_(vector), first_(row), begin_(row), end_(row) {}

  // Adds the products of `row` to its 32 outputs. `row_end` is the end of the tile's rows.
  void add_to(int64_t row, int64_t row_end, Vec (&values)[2]) {
    if (given_ == nullptr && row == end_) compute(row, row_end);
    const LoraWeight* weight = lora_->weights[row];
    if (weight == nullptr) return;
    const float* products = given_ == nullptr ? products_[row - begin_] : given_ + (row - first_) * 2 * kLanes;
    LLMK_UNROLL
    for (int v = 0; v < 2; ++v) {
      if (weight->vectors[vector_ + v].num_ranks == 0) continue;
      values[v] = add(values[v], load(products + v * kLanes));
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
  const float* given_;
  int64_t vector_, first_, begin_, end_;  // `products_` has the rows [begin_, end_)
  float products_[kExpandRows][2 * kLanes];
};

}  // namespace llmk::LLMK_ARCH
