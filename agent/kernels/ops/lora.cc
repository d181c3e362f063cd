#include "lora.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

// Maps the address of a packed weight to its adapters. The adapters of a weight are indexed by adapter slot.
std::unordered_map<const void*, std::vector<const LoraWeight*>>& adapters() {
  static std::unordered_map<const void*, std::vector<const LoraWeight*>> all;
  return all;
}

// The memory that shrink_rows() needs for one linear layer. It is part of the scratch memory of the calling thread.
struct Memory {
  const LoraWeight* const* weights;  // [rows] the adapter of each row, or null
  float* shrunk;                     // [rows][stride]: products with A
  float* sums;                       // [parts of the depth][rows][stride]
  ShrinkTile* tiles;                 // at most one for each row
  int32_t* order;                    // [rows] rows with an adapter, grouped by adapter

  Memory(const LoraWeight* const* row_weights, int64_t rows, int64_t stride, int64_t parts) : weights(row_weights) {
    const int64_t floats = rows * stride;
    const int64_t bytes = rows * static_cast<int64_t>(sizeof(*tiles) + sizeof(*order)) + (1 + parts) * floats * 4;
    shrunk = static_cast<float*>(thread_scratch(kScratchLora, bytes));
    sums = shrunk + floats;
    tiles = reinterpret_cast<ShrinkTile*>(sums + parts * floats);
    order = reinterpret_cast<int32_t*>(tiles + rows);
  }
};

// Sets weights[row] to the adapter of each row, or to null if the row has none. Returns the largest `rank_groups` of
// these adapters, or 0 if no row has an adapter.
int64_t find_weights(const std::vector<const LoraWeight*>& by_slot, const int32_t* slots, int64_t rows,
                     const LoraWeight** weights) {
  int64_t most = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = slots[row];
    weights[row] = slot >= 0 && slot < static_cast<int64_t>(by_slot.size()) ? by_slot[slot] : nullptr;
    if (weights[row] != nullptr) most = std::max<int64_t>(most, weights[row]->rank_groups);
  }
  return most;
}

// Divides the rows that have an adapter into tiles. All rows of a tile have the same adapter. Returns the number of
// tiles.
int64_t make_tiles(const Memory& memory, int64_t rows) {
  int64_t count = 0, tiles = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (memory.weights[row] != nullptr) memory.order[count++] = static_cast<int32_t>(row);
  }
  std::stable_sort(memory.order, memory.order + count, [&](int32_t a, int32_t b) {
    return std::less<const void*>()(memory.weights[a], memory.weights[b]);
  });
  for (int64_t i = 0; i < count; ++i) {
    const LoraWeight* weight = memory.weights[memory.order[i]];
    ShrinkTile* tile = tiles == 0 ? nullptr : &memory.tiles[tiles - 1];
    if (tile == nullptr || tile->count == kShrinkRows || tile->weight != weight) {
      memory.tiles[tiles++] = {weight, memory.order + i, 1};
    } else {
      ++tile->count;
    }
  }
  return tiles;
}

// Returns a part of the depth of a rank group of A.
const char* part_of_a(const LoraWeight& weight, int64_t group, int64_t part) {
  const int64_t depths = group * (weight.depth + weight.depth % 2) + part * kShrinkDepth;
  return static_cast<const char*>(weight.a) + depths * kRankLanes * size_of(static_cast<DType>(weight.dtype));
}

// Sets the part of A that the task after `at` reads. `weight` is the adapter of this task. `next_weight` is the adapter
// of the next tile, or null.
void set_next(const LoraWeight& weight, const LoraWeight* next_weight, int64_t parts, ShrinkPart* at) {
  int64_t next = at->group * parts + at->part + 1;
  if (next == weight.rank_groups * parts) next = 0;
  const LoraWeight* from = next == 0 ? next_weight : &weight;
  if (from == nullptr) return;
  at->next = part_of_a(*from, next / parts, next % parts);
  const int64_t depth = smaller(kShrinkDepth, weight.depth - next % parts * kShrinkDepth);
  at->next_bytes = depth * kRankLanes * size_of(static_cast<DType>(weight.dtype));
}

// Adds the parts of the depth and multiplies the sums by the scales.
void join_parts(const Memory& memory, const ShrinkJob& job, int64_t rows, int64_t parts) {
  for (int64_t row = 0; row < rows; ++row) {
    if (memory.weights[row] == nullptr) continue;
    const float* scales = memory.weights[row]->scales;
    const int64_t ranks = memory.weights[row]->rank_groups * kRankLanes;
    const float* sums = job.sums + row * job.stride;
    float* out = memory.shrunk + row * job.stride;
    for (int64_t i = 0; i < ranks; ++i) {
      float total = sums[i];
      for (int64_t part = 1; part < parts; ++part) total += sums[part * job.part_stride + i];
      out[i] = total * scales[i];
    }
  }
}

}  // namespace

void set_adapter(const void* packed_weight, int32_t slot, const LoraWeight* adapter) {
  std::vector<const LoraWeight*>& by_slot = adapters()[packed_weight];
  if (static_cast<size_t>(slot) >= by_slot.size()) by_slot.resize(slot + 1, nullptr);
  by_slot[slot] = adapter;
}

bool shrink_rows(const void* packed_weight, const int32_t* slots, int64_t rows, DType dtype, const void* x,
                 int64_t x_stride, LoraRows* out) {
  const auto found = adapters().find(packed_weight);
  if (found == adapters().end()) return false;
  const LoraWeight** weights = static_cast<const LoraWeight**>(
      thread_scratch(kScratchLoraWeights, rows * static_cast<int64_t>(sizeof(const LoraWeight*))));
  const int64_t groups = find_weights(found->second, slots, rows, weights);
  if (groups == 0) return false;
  const int64_t stride = groups * kRankLanes, parts = ceil_div(header_of(packed_weight).depth, kShrinkDepth);
  const Memory memory(weights, rows, stride, parts);
  const int64_t tiles = make_tiles(memory, rows);
  const ShrinkJob job{static_cast<const char*>(x), x_stride * size_of(dtype), memory.sums, stride, rows * stride};
  // Consecutive tasks read consecutive memory of an adapter.
  parallel_stretches(tiles * groups * parts, [&](int64_t task) {
    const ShrinkTile* tile = &memory.tiles[task / (groups * parts)];
    ShrinkPart at{task / parts % groups, task % parts, nullptr, nullptr, 0};
    if (at.group >= tile->weight->rank_groups) return;
    at.a = part_of_a(*tile->weight, at.group, at.part);
    set_next(*tile->weight, tile + 1 < memory.tiles + tiles ? tile[1].weight : nullptr, parts, &at);
    kernels().lora_shrink(dtype, job, *tile, at);
  });
  join_parts(memory, job, rows, parts);
  *out = {weights, memory.shrunk, stride};
  return true;
}

}  // namespace llmk
