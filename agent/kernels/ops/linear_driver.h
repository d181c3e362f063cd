// Divides the work of a linear layer (linear.h) into tasks, pieces of the depth, and tiles of rows. linear_threads.h
// divides the tasks among threads.
//
// A task multiplies one panel by one block of rows. It processes the depth in pieces. The weights of a piece stay in
// the L2 cache while all tiles of rows use them. Between pieces the sums are kept in memory without rounding, so the
// results have the same bits as without pieces. While a piece is computed, the next piece is prefetched. It may belong
// to the next panel.
#pragma once
#include <cmath>

#include "../common/thread_pool.h"
#include "linear.h"
#include "linear_epilogue.h"
#include "linear_heights.h"
#include "linear_threads.h"
#include "linear_tiles.h"
#include "quantize_row.h"

namespace llmk::LLMK_ARCH {

constexpr int64_t kBlockRows = 256;
constexpr int64_t kPieceBytes = 384 << 10;
// Size of a piece if the rows form several tiles. A tile of several rows may pass through a piece several times. If
// pieces are short, the activations stay in the L1 cache meanwhile.
constexpr int64_t kTilesPieceBytes = 40 << 10;

// A part of the depth of one panel. `begin` and `end` count steps in PlainForm and groups in GroupedForm.
struct Piece {
  const uint8_t* weights;
  int64_t half_bytes;  // PlainForm: from the panel's first 32 columns to its last 32; GroupedForm: half of `bytes`
  int64_t begin, end, bytes;
  bool first;  // true: the first piece of the depth, so that no earlier sums exist
  const uint8_t* next;      // weights of the next piece, which is about as large as this piece
  int64_t next_half_bytes;  // `half_bytes` of the next piece
  AdapterFetch* adapters;   // prefetches the parts of adapters for this panel; null: no row has an adapter
  // Only for ExpandedGroups (linear_expanded_avx2.h) and PlainWords (linear_words_avx2.h): memory for the expanded
  // weights of the piece, and the first row of the tile that writes them. Null: there is only one tile.
  uint8_t* expanded;
  int64_t expanding_row;
};

// If rows have adapters, a tile prefetches kAdapterLines cache lines of adapters for every kAdapterSteps steps, or for
// every quantisation group. The lines for 8 adapters of rank 16 are then prefetched while the first half of a
// panel with 2048 depths is multiplied.
constexpr int64_t kAdapterSteps = 64, kAdapterLines = 16;

// Multiplies by weights without quantisation groups: float formats, and int8 with one scale per column. Adds up the
// products over the whole depth. The task functions below take this class or GroupedForm as a template argument.
template <class S, int64_t kTile = kTileSteps>
struct PlainForm {
  using Step = S;
  static constexpr int kTallRows = Step::kTallRows;
  static constexpr int64_t kWholeUnits = kTile;  // each piece begins at a multiple of this number of steps
  // A unit is the smallest range of the depth that a piece may have. It is a step here, and a quantisation group in
  // GroupedForm.
  // Returns the number of bytes that a piece should have. The argument is the number of rows of a task.
  static int64_t piece_bytes(int64_t rows) { return rows > Step::kMostRows ? kTilesPieceBytes : kPieceBytes; }
  // Sets the members of a piece that only some forms have. The arguments are the first row and the number of rows.
  static void prepare(const LinearJob&, int64_t, int64_t, Piece*) {}
  static int64_t units(const WeightShape& shape) { return shape.steps; }
  static int64_t unit_bytes(const WeightShape& shape) { return shape.step_bytes; }
  // Returns the distance in bytes between the weights of two consecutive steps, within half a panel (32 columns).
  static int64_t unit_stride(const WeightShape& shape) { return shape.step_bytes / 2; }
  // Returns the distance in bytes from the weights of a panel's first 32 columns to those of its last 32 columns.
  static int64_t half_bytes(const WeightShape& shape, int64_t) { return shape.steps * shape.step_bytes / 2; }

  template <int R, int kLines>
  LLMK_OUTLINE void tile(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    // For a single row, reads the weights in the order of memory: the panel's first 32 columns, then its last 32
    // columns.
    constexpr int C = R == 1 && Step::columns(1) > 2 ? 2 : Step::columns(R);
    const typename Step::X* x =
        static_cast<const typename Step::X*>(job.x) + row * job.x_stride + piece.begin * Step::kDepth;
    const int64_t steps = piece.end - piece.begin;
    for (int v = 0; v < 4; v += C) {
      typename Step::Sum total[R][C];
      LLMK_UNROLL
      for (int i = 0; i < R * C; ++i) {
        float* sum = sums + i / C * kPanelColumns + (v + i % C) * kLanes;
        if (!piece.first) {
          load_sum(sum, &total[i / C][i % C]);
        } else {
          start(job, row + i / C, &total[i / C][i % C]);
        }
      }
      if (piece.adapters == nullptr) {
        sum_steps<Step, R, C, kLines, kTile>(piece.weights, piece.half_bytes, v, x, job.x_stride, steps, next, total);
      } else {
        for (int64_t s = 0; s < steps; s += kAdapterSteps) {
          piece.adapters->fetch(kAdapterLines);
          sum_steps<Step, R, C, kLines, kTile>(piece.weights + s * 2 * Step::kVectorBytes, piece.half_bytes, v,
                                               x + s * Step::kDepth, job.x_stride, smaller(kAdapterSteps, steps - s),
                                               next + s * kFetchBytes<Step, C, kLines>, total);
        }
      }
      LLMK_UNROLL
      for (int i = 0; i < R * C; ++i) {
        store_sum(sums + i / C * kPanelColumns + (v + i % C) * kLanes, total[i / C][i % C]);
      }
      next += steps * kFetchBytes<Step, C, kLines>;
    }
  }

  // Sets a sum to its start value. Integer products use w + kZero instead of the weight w. To correct this, an integer
  // sum starts at -kZero times the sum of the row's activations.
  LLMK_INLINE void start(const LinearJob&, int64_t, Vec* total) { *total = zero(); }
  LLMK_INLINE void start(const LinearJob& job, int64_t row, Ints* total) {
    *total = broadcast_int(-Step::kZero * job.rows.sums[row]);
  }
};

// Multiplies by weights with quantisation groups. Adds up the products of a group in integers, multiplies the sum by
// the group's scale, and adds the results of all groups as floats.
template <class S>
struct GroupedForm {
  using Step = S;
  static constexpr int kTallRows = Step::kMostRows;  // no tall tiles, because the float totals also need registers
  static constexpr int64_t kWholeUnits = 1;
  static int64_t piece_bytes(int64_t rows) { return rows > Step::kMostRows ? kTilesPieceBytes : kPieceBytes; }
  static void prepare(const LinearJob&, int64_t, int64_t, Piece*) {}
  static int64_t units(const WeightShape& shape) { return shape.groups; }
  static int64_t unit_bytes(const WeightShape& shape) {
    return shape.group_steps * shape.step_bytes + shape.scale_bytes;
  }
  static int64_t unit_stride(const WeightShape& shape) { return unit_bytes(shape); }
  static int64_t half_bytes(const WeightShape& shape, int64_t units) { return units * unit_bytes(shape) / 2; }

  template <int R, int kLines>
  LLMK_OUTLINE void tile(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    if constexpr (R == 1 && kStreamsRow) return stream_row(job, piece, row, sums);
    constexpr int kFull = Step::columns(R), C = R * kFull > 12 && kFull > 2 ? 2 : kFull;
    for (int v = 0; v < 4; v += C) {
      Vec total[R][C];
      start<R, C>(piece, v, sums, total);
      for (Group group(job, piece, row); group.number < piece.end; group.advance(job)) {
        if (piece.adapters != nullptr) piece.adapters->fetch(kAdapterLines);
        add_group<R, C, kLines>(job, group, v, next, total);
        next += group.steps * kFetchBytes<Step, C, kLines>;
      }
      finish<R, C>(v, total, sums);
    }
  }

 private:
#if defined(LLMK_VNNI) && defined(LLMK_VEC_AVX512) && !defined(LLMK_AMX)
  static constexpr bool kStreamsRow = true;
#else
  // stream_row() needs more registers than AVX2 and NEON have. On AMX it has not been measured yet.
  static constexpr bool kStreamsRow = false;
#endif

  // One quantisation group, which is a range of the depth: its weights, and its activations for the rows of the tile.
  struct Group {
    const uint8_t* weights;
    const typename Step::X* x;
    // The sum of the first row's activations over each group. The sums of the next row are shape.groups elements later.
    const int32_t* x_sums;
    int64_t number, steps;

    Group(const LinearJob& job, const Piece& piece, int64_t row)
        : weights(piece.weights),
          x(static_cast<const typename Step::X*>(job.x) + row * job.x_stride +
            piece.begin * job.shape.group_steps * Step::kDepth),
          x_sums(job.rows.sums + row * job.shape.groups + piece.begin),
          number(piece.begin) {
      count_steps(job);
    }
    void advance(const LinearJob& job) {
      weights += steps * job.shape.step_bytes + job.shape.scale_bytes;
      x += job.shape.group_steps * Step::kDepth;
      ++x_sums;
      ++number;
      count_steps(job);
    }
    void count_steps(const LinearJob& job) {
      steps = smaller(job.shape.group_steps, job.shape.steps - number * job.shape.group_steps);
    }
  };

  template <int R, int C>
  LLMK_INLINE void start(const Piece& piece, int v, const float* sums, Vec (&total)[R][C]) {
    LLMK_UNROLL
    for (int i = 0; i < R * C; ++i) {
      total[i / C][i % C] = piece.first ? zero() : load(sums + i / C * kPanelColumns + (v + i % C) * kLanes);
    }
  }
  template <int R, int C>
  LLMK_INLINE void finish(int v, const Vec (&total)[R][C], float* sums) {
    LLMK_UNROLL
    for (int i = 0; i < R * C; ++i) store(sums + i / C * kPanelColumns + (v + i % C) * kLanes, total[i / C][i % C]);
  }

  // Adds the scaled sums of one quantisation group to the totals. Zero points are not subtracted from the weights.
  // Instead, an integer sum starts at -zero times the sum of the row's activations in this group.
  template <int R, int C, int kLines>
  LLMK_INLINE void add_group(const LinearJob& job, const Group& group, int v, const uint8_t* next, Vec (&total)[R][C]) {
    const WeightShape& shape = job.shape;
    const float* scales = reinterpret_cast<const float*>(group.weights + group.steps * shape.step_bytes);
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(scales + kPanelColumns);
    Ints part[R][C];
    LLMK_UNROLL
    for (int i = 0; i < R * C; ++i) {
      const int32_t x_sum = group.x_sums[i / C * shape.groups];
      part[i / C][i % C] = job.header.asymmetric != 0
                               ? multiply(load_unsigned_bytes(zeros + (v + i % C) * kLanes), broadcast_int(-x_sum))
                               : broadcast_int(-Step::kZero * x_sum);
    }
    sum_steps<Step, R, C, kLines, kTileSteps>(group.weights, group.steps * shape.step_bytes / 2, v, group.x,
                                              job.x_stride, group.steps, next, part);
    LLMK_UNROLL
    for (int i = 0; i < R * C; ++i) {
      const Vec scale = load(scales + (v + i % C) * kLanes);
      total[i / C][i % C] = fused(to_floats(part[i / C][i % C]), scale, total[i / C][i % C]);
    }
  }

  // Multiplies a single row. Reads the weights of a quantisation group in the order of memory: first 32 of the columns,
  // then the other 32. The hardware prefetchers follow this single stream faster than software prefetches could.
  static void stream_row(const LinearJob& job, const Piece& piece, int64_t row, float* sums) {
    Vec total[2][1][2];
    start<1, 2>(piece, 0, sums, total[0]);
    start<1, 2>(piece, 2, sums, total[1]);
    for (Group group(job, piece, row); group.number < piece.end; group.advance(job)) {
      if (piece.adapters != nullptr) piece.adapters->fetch(kAdapterLines);
      add_group<1, 2, 0>(job, group, 0, nullptr, total[0]);
      add_group<1, 2, 0>(job, group, 2, nullptr, total[1]);
    }
    finish<1, 2>(0, total[0], sums);
    finish<1, 2>(2, total[1], sums);
  }
};

// Calls the tile function whose template argument R is `rows`, which is at least kLeast. Tiles of fewer rows are not
// compiled.
template <class Form, int kLines, int kLeast, int R>
static inline void any_tile(const LinearJob& job, const Piece& piece, int64_t row, int64_t rows, float* sums,
                            const uint8_t* next) {
  if constexpr (R > kLeast) {
    if (rows < R) return any_tile<Form, kLines, kLeast, R - 1>(job, piece, row, rows, sums, next);
  }
  Form::template tile<R, kLines>(job, piece, row, sums, next);
}

// Multiplies the weights of one piece (a range of the depth) by the rows of a task. Divides the rows into tiles of
// nearly the same height. If kFetches is true, the tiles prefetch weights.
template <class Form, bool kFetches, class Finish>
static inline void piece_rows(const LinearJob& job, const Piece& piece, int64_t row, int64_t rows, float* sums,
                              const Finish& finish) {
  using Heights = TileHeights<Form::Step::kMostRows, Form::kTallRows>;
  static_assert(Heights::fit(kBlockRows), "any_tile() has a tile of each height");
  constexpr int kMost = Heights::kMost, kTall = Heights::kTall;
  const bool tall = Heights::is_tall(rows);
  const int64_t tiles = ceil_div(rows, tall ? kTall : kMost);
  // Number of tiles that prefetch weights. If there are several, each of them prefetches an equal part of the next
  // piece.
  const int64_t fetching = tiles >= 4 ? 4 : tiles >= 2 ? 2 : 1;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = rows * t / tiles, count = rows * (t + 1) / tiles - begin, first = row + begin;
    float* tile_sums = sums + begin * kPanelColumns;
    if constexpr (!kFetches) {
      any_tile<Form, 0, 1, kTall>(job, piece, first, count, tile_sums, nullptr);
    } else if (tiles == 1) {
      any_tile<Form, 4, 1, kTall>(job, piece, first, count, tile_sums, nullptr);
    } else if (tall) {
      const uint8_t* next = piece.next + t * piece.next_half_bytes;
      if constexpr (kTall > kMost) {
        any_tile<Form, 2, Heights::kLeastOfTwoTall, kMostTallTilesRows / 2>(job, piece, first, count, tile_sums, next);
      }
    } else if (t >= fetching) {
      any_tile<Form, 0, Heights::kLeastOfThree, kMost>(job, piece, first, count, tile_sums, nullptr);
    } else if (fetching == 2) {
      const uint8_t* next = piece.next + t * piece.next_half_bytes;
      any_tile<Form, 2, Heights::kLeastOfTwo, kMost>(job, piece, first, count, tile_sums, next);
    } else {
      const uint8_t* next = piece.next + t / 2 * piece.next_half_bytes + t % 2 * (piece.bytes / 4);
      any_tile<Form, 1, Heights::kLeastOfFour, kMost>(job, piece, first, count, tile_sums, next);
    }
    finish(first, count, tile_sums);
  }
}

// Multiplies one panel by rows [row, row_end), piece after piece of the depth. The last piece applies the epilogue.
template <class Form>
static void panel_task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
  const int64_t units = Form::units(job.shape), unit_bytes = Form::unit_bytes(job.shape), rows = row_end - row;
  const int64_t pieces = larger(1, smaller(units, ceil_div(job.shape.panel_bytes, Form::piece_bytes(rows))));
  float* sums = static_cast<float*>(thread_scratch(kScratchLinearTile, rows * kPanelColumns * 4));
  const uint8_t* weights = job.panels + panel * job.shape.panel_bytes;
  const auto start = [&](int64_t p) {
    return p == pieces ? units : units * p / pieces / Form::kWholeUnits * Form::kWholeUnits;
  };
  const bool has_adapters = job.args.lora != nullptr;
  AdapterFetch adapters = has_adapters ? AdapterFetch(*job.args.lora, panel, row, row_end) : AdapterFetch();
  // Prefetches the scales of the columns, which follow the last piece.
  for (int64_t at = units * unit_bytes; at < job.shape.panel_bytes; at += 64) __builtin_prefetch(weights + at);
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t begin = start(p), end = start(p + 1);
    const bool last = p == pieces - 1;
    Piece piece{weights + begin * Form::unit_stride(job.shape),
                      Form::half_bytes(job.shape, end - begin),
                      begin,
                      end,
                      (end - begin) * unit_bytes,
                      p == 0,
                      weights + (last ? job.shape.panel_bytes : end * Form::unit_stride(job.shape)),
                      Form::half_bytes(job.shape, last ? start(1) : start(p + 2) - end),
                      has_adapters ? &adapters : nullptr,
                      nullptr,
                      0};
    Form::prepare(job, row, rows, &piece);
    piece_rows<Form, true>(job, piece, row, rows, sums, [&](int64_t first, int64_t count, const float* tile_sums) {
      if (last) finish_tile(job, panel, first, count, tile_sums);
    });
  }
}

// Calls task(panel, row, row_end) for each panel and each block of at most kBlockRows rows. If threads share a panel,
// they divide such a block at tiles of at most `tile_rows` rows.
template <class Task>
static inline void for_panels(const LinearJob& job, int64_t tile_rows, const Task& task) {
  const int64_t rows = job.args.rows, blocks = ceil_div(rows, kBlockRows);
  const auto rows_of = [&](int64_t i) {
    const int64_t block = i % blocks;
    return PanelRows{i / blocks, rows * block / blocks, rows * (block + 1) / blocks};
  };
  spread(job, job.shape.panels * blocks, tile_rows, rows_of, task);
}

// Prefetches all parts of adapters for a panel. Tasks that do not prefetch these parts between their steps call this
// function.
static inline void fetch_adapters(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
  if (job.args.lora != nullptr) AdapterFetch(*job.args.lora, panel, row, row_end).fetch_all();
}

template <class Form>
static void run_panels(const LinearJob& job) {
  const auto task = [&](int64_t panel, int64_t row, int64_t row_end) { panel_task<Form>(job, panel, row, row_end); };
  for_panels(job, Form::kTallRows, task);
}

}  // namespace llmk::LLMK_ARCH
