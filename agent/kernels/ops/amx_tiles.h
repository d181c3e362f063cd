// The tile registers of Intel AMX. Each holds a matrix of up to 16 rows of 64 bytes.
//
//   TDPBSUD, TDPBF16PS:   sums [rows][16 columns] += x [rows][16 steps][4 bytes] * w [16 steps][16 columns][4 bytes]
//
// Each instruction computes one tile product. It multiplies up to 16 rows of activations x by 16 columns of packed
// weights w, over 16 steps of the depth. A step has 4 bytes of each row and of each column: 4 int8 or 2 bfloat16
// numbers. In memory, packed weights (linear.h) already have the layout of a tile register. With bfloat16, the products
// of the 16 steps are added in order in float32 from zero, and the result is added to the sum. The result of a row has
// the same bits for any number of rows.
#pragma once
#include "../common/types.h"

namespace llmk::LLMK_ARCH {

constexpr int64_t kAmxRows = 16;
constexpr int64_t kAmxSteps = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Loads the tile configuration. Takes tens of cycles and clears all tiles.
static inline void load_config(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

// Configures the eight tile registers for products of up to two tiles of rows, with `upper` and `lower` rows. Tiles 0
// and 1 hold the sums of the upper rows, tiles 2 and 3 the sums of the lower rows. Tile 4 holds the activations of the
// upper rows, tile 5 those of the lower rows. Tiles 6 and 7 hold weights. If `lower` is 0, tiles 2, 3 and 5 have
// `upper` rows. A product covers `steps` steps of the depth.
static inline void configure_tiles(int64_t upper, int64_t lower, int64_t steps = kAmxSteps) {
  TileConfig config;
  const int64_t rows[8] = {upper, upper, lower > 0 ? lower : upper, lower > 0 ? lower : upper,
                           upper, lower > 0 ? lower : upper, steps, steps};
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * steps : 64);
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
  }
  load_config(config);
}

// Releases the tiles. If a thread keeps them, each context switch must save them, and its core cannot enter deep sleep
// states.
static inline void release_tiles() { __asm__ volatile("tilerelease"); }

// Loads a tile. This function is assembly, because the AMX macros of GCC 12 accept only digits and do not declare that
// they access memory.
template <int T>
LLMK_INLINE void load_tile(const void* from, int64_t row_stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(T) : "memory");
}
// Loads a tile that is used only once. The instruction has a non-temporal hint, so that other data stays in the L1
// cache.
template <int T>
LLMK_INLINE void load_tile_once(const void* from, int64_t row_stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(T) : "memory");
}
template <int T>
LLMK_INLINE void store_tile(void* to, int64_t row_stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride), "i"(T) : "memory");
}
template <int T>
LLMK_INLINE void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int S, int X, int W>  // S += X * W, where tile X has signed bytes and tile W unsigned bytes
LLMK_INLINE void multiply_bytes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
}
template <int S, int X, int W>  // S += X * W, where tile X has unsigned bytes and tile W signed bytes
LLMK_INLINE void multiply_unsigned_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
}
template <int S, int X, int W>
LLMK_INLINE void multiply_signed_bytes() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
}
template <int S, int X, int W>
LLMK_INLINE void multiply_bfloats() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(S), "i"(X), "i"(W));
}

// Prefetches the next piece of weights into the L2 cache, a few lines at a time. Many prefetches together would delay
// the loads of the tiles.
//
// The piece is divided into four equal parts, which are prefetched at the same time. They lie in different pages. The
// hardware prefetcher follows each page separately, at most 20 lines ahead, so one page alone does not use the whole
// memory bandwidth.
class Fetch {
 public:
  static constexpr int kStreams = 4;

  Fetch(const uint8_t* begin, int64_t bytes)
      : next_(begin), stream_bytes_(bytes / kStreams), left_(stream_bytes_ / 64) {}

  // Prefetches the next `count` cache lines of each of the kStreams parts.
  void lines(int64_t count) {
    count = smaller(count, left_);
    left_ -= count;
    for (int64_t i = 0; i < count; ++i, next_ += 64) {
      LLMK_UNROLL
      for (int stream = 0; stream < kStreams; ++stream) __builtin_prefetch(next_ + stream * stream_bytes_, 0, 2);
    }
  }

 private:
  const uint8_t* next_;
  int64_t stream_bytes_;
  int64_t left_;
};

}  // namespace llmk::LLMK_ARCH
