// Computes one partition of paged attention (paged_rows.h) for a block of rows: scores, softmax, sums of values.
#pragma once
#include "paged_amx.h"
#include "paged_products.h"
#include "paged_softmax.h"

namespace llmk::LLMK_ARCH::paged {

// Returns the number of groups of 16 keys that any row of the block sees. The function weight_groups() rounds this
// number up to a multiple of kWeightGroups.
LLMK_INLINE int64_t groups_seen(const TaskRows& all, const TilePanels& panels, const RowBlock& block) {
  return smaller(panels.groups, ceil_div(all.visible[block.first + block.rows - 1] - panels.begin, kGroupKeys));
}
template <class F>
LLMK_INLINE int64_t weight_groups(int64_t groups) {
  return ceil_div(groups, kWeightGroups<F>) * kWeightGroups<F>;
}

// Computes a partition for a block of rows: all scores, then all weights, then all weighted sums of values. `panels`
// has one entry per head of the block. If `tiles`, AMX computes the products.
//
// Calls source.begin(keys, groups) before each chunk, source.place_scales(keys, groups) before the scales are used, and
// source.place_values(h, groups) before the values of head h are read.
template <class F, class Source>
static inline void attend_block(const TaskRows& all, const TilePanels* panels, const RowBlock& block, bool tiles,
                                const BlockMemory& memory, TileFetch* fetch, const Source& source) {
  const int64_t groups = groups_seen(all, *panels, block);
  const int64_t chunk = chunk_groups(block.heads);
  const auto for_chunks = [&](bool keys, const auto& function) {
    for (int64_t g = 0; g < groups; g += chunk) {
      const GroupRange range{g, smaller(g + chunk, groups), g + chunk >= groups};
      source.begin(keys, range);
      for (int64_t h = 0; h < block.heads; ++h) function(range, h, h * block.rows);
    }
  };
  for_chunks(true, [&](GroupRange range, int64_t h, int64_t at) {
    if (h == 0) source.place_scales(true, range);
    const int64_t number = (block.head + h) * all.rows + block.first;
    float* scores = memory.scores + at * kScoreStride;
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles) return score_tiles<F>(all, panels[h], range, number, block.rows, fetch, scores);
    }
#endif
    score_rows<F>(all, panels[h], range, number, block.rows, fetch, scores);
  });
  source.place_scales(false, {0, kPartGroups, true});
  soften_block<F>(all, panels, block, weight_groups<F>(groups), memory, [] {});
  for_chunks(false, [&](GroupRange range, int64_t h, int64_t at) {
    source.place_values(h, range);
    const Unit* weights = memory.weights + at * kWeightStride<F>;
    float* sums = memory.part.sums + at * all.padded_dim;
#ifdef LLMK_AMX
    if constexpr (kHasTiles<F>) {
      if (tiles) {
        return value_tiles<F>(panels[h], range, block.rows, all.padded_dim, weights, memory.steps + at, fetch, sums);
      }
    }
#endif
    value_rows<F>(panels[h], range, block.rows, all.padded_dim, weights, memory.steps + at, fetch, sums);
  });
  static_cast<void>(tiles);
}

#ifdef LLMK_AMX
// Computes a partition for rows [skip, all.rows) of one head on tiles, block after block. The vector units convert the
// scores of one block to weights. At the same time, the tiles compute the scores of the next block and the sums of the
// previous block. So a block uses one of the two elements of `memory`, and the next block uses the other. Calls
// close(block, memory) when the sums of a block are complete.
template <class F, class Close>
static inline void attend_blocks(const TaskRows& all, const TilePanels& panels, int64_t head, int64_t skip,
                                 const BlockMemory (&memory)[2], const Close& close) {
  constexpr int64_t kRows = TileProducts<F>::kRows;
  const int64_t blocks = ceil_div(all.rows - skip, kRows);
  const auto block_at = [&](int64_t i) {
    const int64_t first = skip + i * kRows;
    return RowBlock{head, 1, first, smaller(kRows, all.rows - first)};
  };
  TileWork<F> work;
  const auto add_scores = [&](int64_t i) {
    const RowBlock block = block_at(i);
    work.add_scores(all, panels, groups_seen(all, panels, block), head * all.rows + block.first, block.rows,
                    memory[i % 2].scores);
  };
  add_scores(0);
  work.rest();
  for (int64_t i = 0; i <= blocks; ++i) {
    if (i + 1 < blocks) add_scores(i + 1);
    if (i > 0) {
      const RowBlock before = block_at(i - 1);
      const BlockMemory& made = memory[(i - 1) % 2];
      work.add_values(panels, groups_seen(all, panels, before), before.rows, all.padded_dim, made.weights, made.steps,
                      made.part.sums);
    }
    if (i < blocks) {
      const RowBlock block = block_at(i);
      const int64_t each = ceil_div(work.left(), block.rows);
      soften_block<F>(all, &panels, block, weight_groups<F>(groups_seen(all, panels, block)), memory[i % 2],
                      [&] { work.some(each); });
    }
    work.rest();
    if (i > 0) close(block_at(i - 1), memory[(i - 1) % 2]);
  }
}
#endif

}  // namespace llmk::LLMK_ARCH::paged
