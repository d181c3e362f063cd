// The heights of the tiles of a linear layer, and a check that each height is compiled (for linear_driver.h).
#pragma once
#include "../common/types.h"

namespace llmk::LLMK_ARCH {

// Up to this number of rows, the rows form at most two tall tiles, each with up to kTallRows rows. More rows form three
// or more tiles of up to kMostRows rows, which are then at least as fast.
constexpr int kMostTallTilesRows = 16;

// The heights of the tiles into which piece_rows() divides the rows of a task.
template <int kMostRows, int kTallRows>
struct TileHeights {
  static constexpr int kMost = kMostRows, kTall = kTallRows;
  // The minimum height when rows are divided into two tall tiles; into two, three, and four or more other tiles.
  static constexpr int kLeastOfTwoTall = (kTall + 1) / 2, kLeastOfTwo = (kMost + 1) / 2;
  static constexpr int kLeastOfThree = (2 * kMost + 1) / 3, kLeastOfFour = (3 * kMost + 1) / 4;

  static constexpr bool is_tall(int64_t rows) { return kTall > kMost && rows > kMost && rows <= kMostTallTilesRows; }

  // Returns true if piece_rows() gives any_tile() only heights for which it has a tile, for 1 to most_rows rows.
  static constexpr bool fit(int64_t most_rows) {
    for (int64_t rows = 1; rows <= most_rows; ++rows) {
      const bool tall = is_tall(rows);
      const int64_t most = tall ? kTall : kMost, tiles = (rows + most - 1) / most;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t height = rows * (t + 1) / tiles - rows * t / tiles;
        int64_t least = 1, last = kTall;
        if (tiles > 1 && tall) {
          least = kLeastOfTwoTall, last = kMostTallTilesRows / 2;
        } else if (tiles > 1) {
          const int64_t fetching = tiles >= 4 ? 4 : 2;
          least = t >= fetching ? kLeastOfThree : fetching == 2 ? kLeastOfTwo : kLeastOfFour;
          last = kMost;
        }
        if (height < least || height > last) return false;
      }
    }
    return true;
  }
};

}  // namespace llmk::LLMK_ARCH
