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
  ShrinkTile* tiles;                 // at most one for each row
  int32_t* order;                    // [rows] rows with an adapter, grouped by adapter

  Memory(const LoraWeight* const* row_weights, int64_t rows, int64_t stride) : weights(row_weights) {
    const int64_t row_bytes = static_cast<int64_t>(sizeof(*tiles) + sizeof(*order)) + stride * 4;
    shrunk = static_cast<float*>(thread_scratch(kScratchLora, rows * row_bytes));
    tiles = reinterpret_cast<ShrinkTile*>(shrunk + rows * stride);
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
int64_t make_tiles(const Memory& memory, int64_t rows, int64_t stride, const char* x, int64_t row_bytes) {
  int64_t count = 0, tiles = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (memory.weights[row] != nullptr) memory.order[count++] = static_cast<int32_t>(row);
  }
  std::stable_sort(memory.order, memory.order + count, [&](int32_t a, int32_t b) {
    return std::less<const void*>()(memory.weights[a], memory.weights[b]);
  });
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = memory.order[i];
    ShrinkTile* tile = tiles == 0 ? nullptr : &memory.tiles[tiles - 1];
    if (tile == nullptr || tile->rows == kShrinkRows || tile->weight != memory.weights[row]) {
      tile = &memory.tiles[tiles++];
      tile->weight = memory.weights[row];
      tile->rows = 0;
    }
    tile->x[tile->rows] = x + row * row_bytes;
    tile->out[tile->rows++] = memory.shrunk + row * stride;
  }
  return tiles;
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
  const int64_t stride = groups * kRankLanes;
  const Memory memory(weights, rows, stride);
  const int64_t tiles = make_tiles(memory, rows, stride, static_cast<const char*>(x), x_stride * size_of(dtype));
  parallel_for(tiles * groups, [&](int64_t task) {
    const ShrinkTile& tile = memory.tiles[task / groups];
    if (task % groups < tile.weight->rank_groups) kernels().lora_shrink(tile, task % groups);
  });
  *out = {weights, memory.shrunk, stride};
  return true;
}

}  // namespace llmk
