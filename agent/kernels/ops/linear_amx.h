// The inner loops of linear.h on AMX tiles. For int8 and int4, tiles give the same integers as every other instruction
// set. For bfloat16, tiles add in their own order (amx_tiles.h). Therefore every product with a bfloat16 weight uses
// tiles, even for a single row. So a row gets the same bits in a step with any number of rows.
//
// A tile product takes 16 cycles. Loading a tile takes 8 cycles from the L1 cache and 20 from the L2 cache. Therefore
// the weights of half a panel (32 columns) are divided into chunks. A chunk stays in the L1 cache while all blocks of
// 32 rows use it. Each loaded tile, of weights or of rows, is used for two products. Rows are loaded with a
// non-temporal hint, because otherwise they would evict the chunk. Tile products leave the vector units idle. Therefore
// the code runs other work between the tile products: scales, SwiGLU and arg-max of the previous block, and prefetches
// of the next chunk.
#pragma once
#include "amx_tiles.h"
#include "linear_epilogue.h"
#include "linear_tiles.h"
#include "lora_amx.h"

namespace llmk::LLMK_ARCH {

constexpr int64_t kTileBytes = kAmxSteps * 64;
static_assert(kTileSteps == kAmxSteps, "16 steps of a vector are a tile");

// A tile product of int8 activations and int8 weights. The template arguments S, A and W of multiply_tiles() are the
// tile registers of the sums, activations and weights.
struct ByteTiles16 {
  using X = int8_t;
  static constexpr int64_t kDepth = 4 * kAmxSteps;  // number of depths that one tile product covers
  static constexpr Scaling kScaling = Scaling::kUnsignedBoth;
  static constexpr bool kExpands = false;  // true: tiles also compute the products with B of adapters
  template <int S, int A, int W>
  LLMK_INLINE void multiply_tiles() {
    multiply_bytes<S, A, W>();
  }
};

// A tile product of bfloat16 activations and weights.
struct BFloatTiles16 {
  using X = bfloat_t;
  static constexpr int64_t kDepth = 2 * kAmxSteps;
  static constexpr Scaling kScaling = Scaling::kNone;
  static constexpr bool kExpands = true;
  template <int S, int A, int W>
  LLMK_INLINE void multiply_tiles() {
    multiply_bfloats<S, A, W>();
  }
};

// Minimum number of int8 rows that are multiplied with tiles. For fewer rows, vector registers are faster and give the
// same results.
constexpr int64_t kLeastTiledRows = 5;

// Returns true if the depth consists of whole tiles. A shorter last tile would read past the weights and the rows.
static inline bool fits_tiles(const LinearJob& job) {
  return job.header.depth % (kAmxSteps * job.shape.step_depth) == 0;
}

// Applies the epilogue (scales, bias, activation, store) to rows whose sums are complete. Each call processes a few
// rows of half a panel (32 columns), so that the caller can run tile products between two calls.
template <class Finish>
class Finishing {
 public:
  Finishing(const LinearJob& job, int64_t panel)
      : job_(job), halves_{{job, panel, 0, Finish::kStores}, {job, panel, 1, Finish::kStores}} {}

  // Sets the rows that the next calls of some() process. The caller must first process all rows of the previous block.
  // `products` has the products with B of adapters, or is null if the epilogue must compute them.
  void begin(int half, int64_t row, int64_t rows, const float* sums, const float* products) {
    half_ = &halves_[half];
    row_ = row;
    rows_ = rows;
    sums_ = sums;
    products_ = products;
  }

  // Applies the epilogue to the next `count` rows, or to all remaining rows if there are fewer. Not inlined, because
  // inlined code would use registers that the tile products around the call need.
  __attribute__((noinline)) void some(int64_t count) {
    if (rows_ == 0) return;
    count = smaller(count, rows_);
    Finish::finish_rows(job_, *half_, row_, count, sums_, products_);
    if (products_ != nullptr) products_ += count * 2 * kLanes;
    row_ += count;
    rows_ -= count;
    sums_ += count * kPanelColumns;
  }

 private:
  const LinearJob& job_;
  const HalfPanel halves_[2];
  const HalfPanel* half_ = nullptr;
  int64_t row_ = 0, rows_ = 0;
  const float *sums_ = nullptr, *products_ = nullptr;
};

// Prepares tile T for adding products. For the first chunk of the depth, clears the tile. For a later chunk, loads the
// sums of the earlier chunks from memory.
template <int T>
LLMK_INLINE void start_tile(bool first, const float* sums) {
  if (first) {
    clear_tile<T>();
  } else {
    load_tile_once<T>(sums, kPanelColumns * 4);
  }
}

// Multiplies weights without quantisation groups on tiles. `Kind` is ByteTiles16 or BFloatTiles16.
template <class Kind>
struct TiledForm {
  using X = typename Kind::X;

  static auto choose_task(const LinearJob& job) {
    return choose_finish<Kind::kScaling>(job, [](auto finish) { return &task<decltype(finish)>; });
  }

  template <class Finish>
  static void task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
    if (row_end - row <= kAmxRows) return one_block_task<Finish>(job, panel, row, row_end - row);
    const int64_t rows = row_end - row, units = job.shape.steps / kAmxSteps, chunks = ceil_div(units, kChunkUnits);
    // Number of rows whose sums must stay in memory. If the weights need several chunks, each chunk adds to the sums of
    // all rows. With a single chunk, only two blocks of rows are in progress at a time.
    const int64_t kept = chunks == 1 ? 2 * kBlockOfRows : rows;
    float* sums = static_cast<float*>(thread_scratch(kScratchLinearTile, kept * kPanelColumns * 4));
    const uint8_t* weights = job.panels + panel * job.shape.panel_bytes;
    Finishing<Finish> finishing(job, panel);
    Adapters adapters(job, panel, row, row_end, units * 2);
    for (int half = 0; half < 2; ++half) {
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t begin = units * c / chunks, end = units * (c + 1) / chunks;
        const uint8_t* from = weights + (half * units + begin) * 2 * kTileBytes;
        const Chunk chunk{from, panel, half, begin, end, c == 0, c == chunks - 1};
        multiply_chunk(job, chunk, row, rows, sums, chunks == 1, &finishing, &adapters);
      }
    }
    finishing.some(kBlockOfRows);
    release_tiles();
  }

 private:
  static constexpr int64_t kChunkUnits = 12;  // 24 KB; a unit is one tile of each of the two vectors of half a panel
  static constexpr int64_t kBlockOfRows = 2 * kAmxRows;
  // Number of lines of each stream of Fetch that are prefetched with the products with B of an adapter.
  static constexpr int64_t kLinesOfAdapter = 8;

  // The activations of up to 32 rows: rows 0 to 15 for the upper tile, rows 16 to 31 for the lower tile. `stride` is
  // the distance between rows in bytes.
  struct Rows {
    const X *upper, *lower;
    int64_t stride;
  };

  struct Chunk {
    const uint8_t* weights;  // tiles of the first and of the second vector of half a panel, in turn
    int64_t panel;
    int half;
    int64_t begin, end;  // range of units in the depth
    bool first, last;
  };

  // The adapters of the rows of a task.
  struct Adapters {
    AdapterFetch fetch;
    int64_t lines = 0;  // number of cache lines that are prefetched during each of the task's `units` units
    int64_t count = 0;  // number of different adapters of up to 16 rows, if `on_tiles`
    ExpandTiles expand;
    bool on_tiles;  // true: `expand` computes the products with B. Otherwise the epilogue computes them.

    Adapters(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end, int64_t units)
        : expand(job.args.lora, job.split), on_tiles(job.split.values != nullptr) {
      if (job.args.lora == nullptr) return;
      fetch = AdapterFetch(*job.args.lora, panel, row, row_end);
      lines = ceil_div(fetch.lines(), units);
      if (on_tiles && row_end - row <= kAmxRows) count = expand.count_adapters(row, row_end);
    }
  };

  static Rows rows_at(const LinearJob& job, int64_t row, int64_t upper, int64_t unit) {
    const X* x = static_cast<const X*>(job.x) + row * job.x_stride + unit * Kind::kDepth;
    return {x, x + upper * job.x_stride, job.x_stride * static_cast<int64_t>(sizeof(X))};
  }

  // Multiplies a chunk of weights by all rows of the task, in blocks of up to 32 rows. If `alternate`, `sums` has two
  // parts: a block uses one of them, and the next block uses the other. Otherwise `sums` has space for all rows.
  template <class Finishing>
  static void multiply_chunk(const LinearJob& job, const Chunk& chunk, int64_t row, int64_t rows, float* sums,
                             bool alternate, Finishing* finishing, Adapters* adapters) {
    const int64_t blocks = ceil_div(rows, kBlockOfRows), units = chunk.end - chunk.begin;
    Fetch fetch(chunk.weights + units * 2 * kTileBytes, units * 2 * kTileBytes);
    const int64_t lines = ceil_div(2 * kTileBytes / 64, blocks * Fetch::kStreams),
                  finished = ceil_div(kBlockOfRows, units);
    int64_t configured = -1;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
      const int64_t upper = count > kAmxRows ? ceil_div(count, 2) : count;
      if (count != configured) configure_tiles(upper, count - upper);
      configured = count;
      float* to = sums + (alternate ? b % 2 * kBlockOfRows : begin) * kPanelColumns + chunk.half * 2 * kLanes;
      const auto meanwhile = [&] {
        fetch.lines(lines);
        if (adapters->lines > 0) adapters->fetch.fetch(adapters->lines);
        finishing->some(finished);
      };
      if (count > upper) {
        multiply_block<true>(rows_at(job, row + begin, upper, chunk.begin), chunk.weights, units, chunk.first, to,
                             to + upper * kPanelColumns, meanwhile);
      } else {
        multiply_block<false>(rows_at(job, row + begin, upper, chunk.begin), chunk.weights, units, chunk.first, to,
                              nullptr, meanwhile);
      }
      if (!chunk.last) continue;
      finishing->some(kBlockOfRows);
      const float* products = nullptr;
      if constexpr (Kind::kExpands) {
        if (adapters->on_tiles) {
          const int64_t vector = chunk.panel * 4 + chunk.half * 2;
          adapters->expand.compute(vector, row + begin, upper, count - upper, [] {});
          products = adapters->expand.products();
        }
      }
      finishing->begin(chunk.half, row + begin, count, to, products);
    }
  }

  // Multiplies one or two tiles of rows by 32 columns, and calls meanwhile() between the tile products.
  template <bool kBoth, class Meanwhile>
  LLMK_INLINE void multiply_block(Rows x, const uint8_t* w, int64_t units, bool first, float* upper, float* lower,
                                  const Meanwhile& meanwhile) {
    start_tile<0>(first, upper);
    start_tile<1>(first, upper + kLanes);
    if constexpr (kBoth) {
      start_tile<2>(first, lower);
      start_tile<3>(first, lower + kLanes);
    }
    for (int64_t u = 0; u < units; ++u, x.upper += Kind::kDepth, x.lower += Kind::kDepth, w += 2 * kTileBytes) {
      load_tile_once<4>(x.upper, x.stride);
      load_tile<6>(w, 64);
      Kind::template multiply_tiles<0, 4, 6>();
      load_tile<7>(w + kTileBytes, 64);
      Kind::template multiply_tiles<1, 4, 7>();
      if constexpr (kBoth) {
        load_tile_once<5>(x.lower, x.stride);
        Kind::template multiply_tiles<2, 5, 6>();
      }
      meanwhile();
      if constexpr (kBoth) Kind::template multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(upper, kPanelColumns * 4);
    store_tile<1>(upper + kLanes, kPanelColumns * 4);
    if constexpr (kBoth) {
      store_tile<2>(lower, kPanelColumns * 4);
      store_tile<3>(lower + kLanes, kPanelColumns * 4);
    }
  }

  // Multiplies up to 16 rows by all 64 columns of a panel, so that the weights are read once.
  template <class Finish>
  static void one_block_task(const LinearJob& job, int64_t panel, int64_t row, int64_t rows) {
    alignas(64) float sums[kAmxRows * kPanelColumns];
    const int64_t units = job.shape.steps / kAmxSteps;
    const uint8_t* w = job.panels + panel * job.shape.panel_bytes;
    Fetch fetch(w, 0);
    configure_tiles(rows, 0);
    const Rows x = rows_at(job, row, 0, 0);
    Adapters adapters(job, panel, row, row + rows, units * 2);
    for (int half = 0; half < 2; ++half, w += units * 2 * kTileBytes) {
      fetch = Fetch(w + units * 2 * kTileBytes, units * 2 * kTileBytes);
      const int64_t kept = half == 1 ? kLinesOfAdapter * adapters.count : 0;
      const int64_t lines = ceil_div(larger(0, 2 * kTileBytes / 64 * units / Fetch::kStreams - kept), units);
      multiply_block<false>(x, w, units, true, sums + half * 2 * kLanes, nullptr, [&] {
        fetch.lines(lines);
        if (adapters.lines > 0) adapters.fetch.fetch(adapters.lines);
      });
    }
    for (int half = 0; half < 2; ++half) {
      const float* products = nullptr;
      if constexpr (Kind::kExpands) {
        if (adapters.on_tiles) {
          adapters.expand.compute(panel * 4 + half * 2, row, rows, 0, [&] { fetch.lines(kLinesOfAdapter / 2); });
          products = adapters.expand.products();
        }
      }
      const HalfPanel to(job, panel, half, Finish::kStores);
      Finish::finish_rows(job, to, row, rows, sums + half * 2 * kLanes, products);
    }
    release_tiles();
  }
};

// Multiplies weights that have one scale per group of depths.
//
// First unpacks a panel to signed bytes: the stored numbers minus their zero points. Then tiles compute the integer
// sums of a group for 16 rows by 16 columns. At the same time, vector registers scale and add the sums of earlier
// groups.
//
// A tile product covers 64 depths. It covers 32 depths if a group is not a multiple of 64. This product takes nearly
// the same time.
template <class Step>
struct GroupedTiles {
  using X = int8_t;

  static bool fits(const LinearJob& job) {
    const int64_t group = job.header.group;
    if (group == 0 || group % kShortTile != 0 || job.header.depth % group != 0) return false;
    return job.args.rows >= (tile_depth(job) == kShortTile ? kLeastShortRows : kLeastRows);
  }

  static auto choose_task(const LinearJob&) { return &task; }

  static void task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
    const int64_t rows = row_end - row, blocks = ceil_div(rows, kAmxRows), groups = job.shape.groups;
    const uint8_t* weights = job.panels + panel * job.shape.panel_bytes;
    Fetch fetch(weights + job.shape.panel_bytes, job.shape.panel_bytes);
    // The products of the task prefetch the whole next panel. add_groups() prefetches some lines for every kTogether
    // groups.
    const int64_t lines = ceil_div(job.shape.panel_bytes / 64, blocks * groups * 4 / kTogether * Fetch::kStreams);
    uint8_t* bytes = static_cast<uint8_t*>(thread_scratch(kScratchTile, job.header.depth * kPanelColumns));
    const int64_t chunks = ceil_div(job.header.depth, kChunkDepth);
    alignas(64) float sums[kAmxRows * kPanelColumns];
    int64_t configured = -1;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
      if (count != configured) configure_tiles(count, 0, tile_depth(job) / 4);
      configured = count;
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t first = groups * c / chunks, last = groups * (c + 1) / chunks;
        for (int v = 0; v < 4; ++v) {
          const Vector vector{weights, bytes + v * job.header.depth * kLanes, v, first, last};
          if (b == 0) unpack(job, vector);
          add_groups(job, vector, row + begin, &fetch, lines, sums + v * kLanes);
        }
      }
      finish_tile(job, panel, row + begin, count, sums);
    }
    release_tiles();
  }

 private:
  // Numbers of depths that a tile product covers.
  static constexpr int64_t kWholeTile = 4 * kAmxSteps, kShortTile = kWholeTile / 2;
  // Minimum number of rows, with products of kWholeTile and of kShortTile depths. For fewer rows, vector registers are
  // faster and give the same results.
  static constexpr int64_t kLeastRows = 8, kLeastShortRows = 16;
  // Number of depths whose unpacked weights for 16 columns, and whose 16 rows, stay in the L1 cache.
  static constexpr int64_t kChunkDepth = 1024;

  static int64_t tile_depth(const LinearJob& job) {
    return job.header.group % kWholeTile == 0 ? kWholeTile : kShortTile;
  }

  // The groups from `first` to `last` - 1 of one vector of columns of a panel.
  struct Vector {
    const uint8_t* panel;
    uint8_t* bytes;  // the unpacked vector: [depth / 4][16 columns][4 depths]
    int v;
    int64_t first, last;
  };

  static int64_t group_bytes(const LinearJob& job) {
    return job.shape.group_steps * job.shape.step_bytes + job.shape.scale_bytes;
  }
  // Returns the scales of the first group of a vector. Those of the next group are group_bytes() later.
  static const uint8_t* scales_of(const LinearJob& job, const Vector& vector) {
    return vector.panel + vector.first * group_bytes(job) + job.shape.group_steps * job.shape.step_bytes +
           vector.v * kLanes * 4;
  }

  // Number of steps that are unpacked without a test.
  static constexpr int kStepsTogether = kShortTile / Step::kDepth;

  // Unpacks groups of a vector into signed bytes.
  static void unpack(const LinearJob& job, const Vector& vector) {
    const int64_t steps = job.shape.group_steps, zeros_offset = steps * job.shape.step_bytes + kPanelColumns * 4;
    // Distance to later weights of the same vector. They are in the same half of a long group, or in a later group.
    const bool in_group = steps * 2 * 64 > kFetchAhead;
    const int64_t ahead = in_group ? kFetchAhead : ceil_div(kFetchAhead, group_bytes(job)) * group_bytes(job);
    const uint8_t* group = vector.panel + vector.first * group_bytes(job);
    uint8_t* to = vector.bytes + vector.first * job.header.group * kLanes;
    for (int64_t g = vector.first; g < vector.last; ++g, group += group_bytes(job)) {
      const Ints column_zeros = job.header.asymmetric != 0
                                    ? load_unsigned_bytes(group + zeros_offset + vector.v * kLanes)
                                    : broadcast_int(Step::kZero);
      const Ints zero_points = multiply(column_zeros, broadcast_int(0x01010101));
      for (int64_t first = 0; first < steps; first += kTileSteps) {
        const uint8_t* from = group + step_offset(kTileSteps, steps, first, vector.v, 64);
        const int64_t count = smaller(kTileSteps, steps - first);
        for (int64_t s = 0; s < count; s += kStepsTogether) {
          LLMK_UNROLL
          for (int i = 0; i < kStepsTogether; ++i, from += 64, to += Step::kDepth * kLanes) {
            __builtin_prefetch(from + ahead, 0, 3);
            unpack_step(load_ints(from), zero_points, to);
          }
        }
      }
    }
  }

  LLMK_INLINE void unpack_step(Ints step, Ints zeros, uint8_t* to) {
    if constexpr (Step::kDepth == 4) {
      store_ints(to, {_mm512_sub_epi8(step.v, zeros.v)});
    } else {
      const __m512i nibble = _mm512_set1_epi8(15);
      store_ints(to, {_mm512_sub_epi8(_mm512_and_si512(step.v, nibble), zeros.v)});
      store_ints(to + 64, {_mm512_sub_epi8(_mm512_and_si512(shift_right<4>(step).v, nibble), zeros.v)});
    }
  }

  using Products = int32_t[kAmxRows][kLanes];

  static constexpr int kTogether = 4, kStoreLag = 2, kAddLag = 3;

  // The groups of a vector for one block of rows. `x` and `w` point to the next tile product, `scales` to the scales of
  // the next group whose sums are added.
  struct Groups {
    const int8_t* x;
    const uint8_t *w, *scales;
    int64_t x_stride, tile_depth, scales_stride;
    int64_t count, tiles;  // number of groups, and tile products of a group
  };

  // Computes total = fma(float(sum of a group), scale, total) in the order of the groups. If the first group is not
  // that of the whole depth, `sums` has the totals of the groups before it.
  //
  // The loop is a pipeline. While the tiles multiply group n, it stores the sums of group n - 2, and adds the sums of
  // group n - 3. So four groups are in work, and each has its own tile and its own memory. A store right after its tile
  // product would wait for the product, and would block all later stores.
  static void add_groups(const LinearJob& job, const Vector& vector, int64_t row, Fetch* fetch, int64_t lines,
                         float* sums) {
    const int64_t begin = vector.first * job.header.group, depth = tile_depth(job);
    Groups groups{static_cast<const int8_t*>(job.x) + row * job.x_stride + begin,
                  vector.bytes + begin * kLanes,
                  scales_of(job, vector),
                  job.x_stride,
                  depth,
                  group_bytes(job),
                  vector.last - vector.first,
                  job.header.group / depth};
    alignas(64) Products products[kTogether];
    Vec total[kAmxRows];
    LLMK_UNROLL
    for (int r = 0; r < kAmxRows; ++r) total[r] = vector.first == 0 ? zero() : load(sums + r * kPanelColumns);
    for (int64_t g = 0; g < groups.count + kAddLag; g += kTogether) {
      fetch->lines(lines);
      advance<0>(g, &groups, products, total);
      advance<1>(g + 1, &groups, products, total);
      advance<2>(g + 2, &groups, products, total);
      advance<3>(g + 3, &groups, products, total);
    }
    LLMK_UNROLL
    for (int r = 0; r < kAmxRows; ++r) store(sums + r * kPanelColumns, total[r]);
  }

  // Multiplies group `g` into tile S. Then stores the sums of group g - kStoreLag, and adds those of group g - kAddLag.
  template <int S>
  LLMK_INLINE void advance(int64_t g, Groups* groups, Products (&products)[kTogether], Vec (&total)[kAmxRows]) {
    constexpr int kStored = (S + kTogether - kStoreLag) % kTogether, kAdded = (S + kTogether - kAddLag) % kTogether;
    if (g < groups->count) multiply_group<S>(groups);
    if (g >= kStoreLag && g - kStoreLag < groups->count) {
      store_tile<kStored>(products[kStored], sizeof(products[kStored][0]));
    }
    if (g < kAddLag || g - kAddLag >= groups->count) return;
    const Vec scale = load(reinterpret_cast<const float*>(groups->scales));
    groups->scales += groups->scales_stride;
    LLMK_UNROLL
    for (int r = 0; r < kAmxRows; ++r) total[r] = fused(to_floats(load_ints(products[kAdded][r])), scale, total[r]);
  }

  // Multiplies 16 rows by the next group of weights and leaves the sums in tile S. The rows stay in the L1 cache. The
  // weights are loaded with a non-temporal hint, because a panel is larger than this cache.
  template <int S>
  LLMK_INLINE void multiply_group(Groups* groups) {
    clear_tile<S>();
    for (int64_t i = 0; i < groups->tiles; ++i) {
      load_tile<4 + S % 2>(groups->x, groups->x_stride);
      load_tile_once<6 + S % 2>(groups->w, 64);
      multiply_signed_bytes<S, 4 + S % 2, 6 + S % 2>();
      groups->x += groups->tile_depth;
      groups->w += groups->tile_depth * kLanes;
    }
  }
};

// Multiplies one block of rows by all panels before the next block. A block is small enough to stay in the L2 cache.
template <class Form>
static void run_tiles(const LinearJob& job) {
  constexpr int64_t kBlockBytes = 3 << 18, kMostBlockRows = 256, kLeastBlockRows = 64;
  const int64_t row_bytes = job.x_stride * static_cast<int64_t>(sizeof(typename Form::X)), rows = job.args.rows;
  const int64_t block_rows = larger(kLeastBlockRows, smaller(kMostBlockRows, kBlockBytes / row_bytes));
  const int64_t blocks = ceil_div(rows, block_rows);
  const auto task = Form::choose_task(job);
  const auto rows_of = [&](int64_t i) {
    const int64_t block = i / job.shape.panels;
    return PanelRows{i % job.shape.panels, rows * block / blocks, rows * (block + 1) / blocks};
  };
  spread(job, job.shape.panels * blocks, kAmxRows, rows_of,
         [&](int64_t panel, int64_t row, int64_t row_end) { task(job, panel, row, row_end); });
}

}  // namespace llmk::LLMK_ARCH
