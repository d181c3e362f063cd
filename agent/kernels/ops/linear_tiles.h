// The inner loops of linear.h: multiply R rows of activations by C vectors (16 columns each) of a panel.
#pragma once
#include "../common/types.h"
#include "dot.h"

namespace llmk::LLMK_ARCH {

// Number of steps in a tile of packed weights (T in linear.h), for float32 and float16 weights and for all others.
constexpr int64_t kFloatTileSteps = 1;
#ifdef LLMK_AMX
constexpr int64_t kTileSteps = 16;
#else
constexpr int64_t kTileSteps = 1;
#endif

// WideTiles and NarrowTiles define the sizes of tiles. A tile multiplies R rows of activations by columns(R) vectors of
// a panel. The constant kMostRows is the maximum of R for which all sums stay in registers. If a task has at most
// kMostTallTilesRows rows (linear_heights.h), they form one or two tall tiles of up to kTallRows rows. A tall tile
// reads a panel in two passes, two vectors in each.
//
// A Step multiplies one step of a panel. It is derived from WideTiles or NarrowTiles. The constant kDepth is the number
// of depths in a step. The constant kVectorBytes is the size of the weights of 16 columns in a step. If kOwnLoop is
// true, the Step has a function sum() that replaces the loop of sum_steps(). If in_parts(R) is true, a tile multiplies
// kPartDepth depths of a step by all rows, then the next ones. Only their weights need registers meanwhile.
// kPartDepth is 1 in BFloatStep, and 2 in ByteStep, which multiplies pairs of depths.
struct WideTiles {
  static constexpr bool kOwnLoop = false;
  static constexpr bool in_parts(int) { return false; }
  static constexpr int kMostRows = 6;
#ifdef LLMK_VEC_AVX512
  static constexpr int kTallRows = 13;
  static constexpr int columns(int rows) { return rows <= kMostRows ? 4 : 2; }
#else
  static constexpr int kTallRows = kMostRows;
  static constexpr int columns(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
};
struct NarrowTiles {  // for steps of weights or activations that need two registers
  static constexpr bool kOwnLoop = false;
  static constexpr bool in_parts(int) { return false; }
  static constexpr int kMostRows = 4, kTallRows = kMostRows;
#ifdef LLMK_VEC_AVX512
  static constexpr int columns(int) { return 4; }
#else
  static constexpr int columns(int rows) { return rows == 1 ? 2 : 1; }
#endif
};

// Multiplies weights of type W, float32 or float16, by float32 activations.
template <class W>
struct FloatStep : WideTiles {
  using X = float;
  using Sum = Vec;
  using Weight = Vec;
  static constexpr int kDepth = 1, kVectorBytes = 16 * sizeof(W);
  LLMK_INLINE Weight weight(const uint8_t* p) { return load(reinterpret_cast<const W*>(p)); }
  LLMK_INLINE Vec activation(const X* p) { return broadcast(*p); }
  LLMK_INLINE Sum step(Sum total, Weight w, Vec x) { return fma(x, w, total); }
};

// Multiplies pairs of bfloat16 with float32 multiply-adds. The product at the even k of a pair is added first.
#ifdef LLMK_VEC_AVX2
// Widens and multiplies the even depths of a step, then its odd depths.
struct BFloatStep : WideTiles {
  static constexpr bool in_parts(int) { return true; }
  using X = float;
  using Sum = Vec;
  static constexpr int kDepth = 2, kVectorBytes = 64, kPartDepth = 1;
  LLMK_INLINE Vec weight(const uint8_t* p, int part) {
    const Ints pairs = load_ints(p);
    return part == 0 ? low_bfloats(pairs) : high_bfloats(pairs);
  }
};
#else
struct BFloatStep : NarrowTiles {
  using X = float;
  using Sum = Vec;
  struct Weight {
    Vec low, high;
  };
  static constexpr int kDepth = 2, kVectorBytes = 64;
  LLMK_INLINE Weight weight(const uint8_t* p) {
    const Ints pairs = load_ints(p);
    return {low_bfloats(pairs), high_bfloats(pairs)};
  }
  LLMK_INLINE Weight activation(const X* p) { return {broadcast(p[0]), broadcast(p[1])}; }
  LLMK_INLINE Sum step(Sum total, Weight w, Weight x) { return fma(x.high, w.high, fma(x.low, w.low, total)); }
};
#endif

#ifdef LLMK_BF16_DOT
// Multiplies pairs of bfloat16 with VDPBF16PS, which adds the two products of a pair to a lane.
struct BFloatDotStep : WideTiles {
  using X = bfloat_t;
  using Sum = Vec;
  using Weight = Ints;
  static constexpr int kDepth = 2, kVectorBytes = 64;
  LLMK_INLINE Weight weight(const uint8_t* p) { return load_ints(p); }
  LLMK_INLINE Ints activation(const X* p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return broadcast_int(bits);
  }
  LLMK_INLINE Sum step(Sum total, Weight w, Ints x) {
    return {_mm512_dpbf16_ps(total.v, reinterpret_cast<__m512bh>(x.v), reinterpret_cast<__m512bh>(w.v))};
  }
};
#endif

#ifdef LLMK_VNNI
using ByteTiles = WideTiles;
#else
using ByteTiles = NarrowTiles;
#endif

// Multiplies int8 weights by int8 activations. A lane adds up four depths. The weights that are multiplied are w +
// kZero, so the sums must be corrected by -kZero times the sum of the activations.
#if defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
// Weights and activations are multiplied as 16-bit numbers (VPMADDWD). VPMADDUBSW would multiply the bytes directly,
// but its sums saturate. The activations are widened before the products (rows_as_words() in linear_bytes.h). The
// weights are widened in registers: the depths 0 and 2 of a step are its first part, 1 and 3 its second part. A single
// row multiplies both parts at the same time, so that it loads the weights once.
struct ByteStep : WideTiles {
  static constexpr bool in_parts(int rows) { return rows > 1; }
  using X = int16_t;
  using Sum = Ints;
  struct Weight {
    Ints even, odd;
  };
  static constexpr int kDepth = 4, kVectorBytes = 64, kZero = kByteZero, kPartDepth = 2;
  LLMK_INLINE Ints weight(const uint8_t* p, int part) {
    const Ints bytes = load_ints(p);
    return part == 0 ? even_bytes(bytes) : odd_bytes(bytes);
  }
  LLMK_INLINE Weight weight(const uint8_t* p) { return {weight(p, 0), weight(p, 1)}; }
  LLMK_INLINE Weight activation(const X* p) { return {broadcast_words(p), broadcast_words(p + kPartDepth)}; }
  LLMK_INLINE Sum step(Sum total, Weight w, Weight x) {
    return add(total, add(multiply_words(w.even, x.even), multiply_words(w.odd, x.odd)));
  }
};
#elif !defined(LLMK_NEON_I8MM)
struct ByteStep : ByteTiles {
  using X = int8_t;
  using Sum = Ints;
  using Weight = Quads;
  static constexpr int kDepth = 4, kVectorBytes = 64, kZero = kByteZero;
  LLMK_INLINE Weight weight(const uint8_t* p) { return quads(load_ints(p)); }
  LLMK_INLINE BroadcastQuad activation(const X* p) { return broadcast_quad(p); }
  LLMK_INLINE Sum step(Sum total, Weight w, BroadcastQuad x) { return dot_quads(total, w, x); }
};

#endif

#if !defined(LLMK_VEC_AVX2) && !defined(LLMK_NEON_I8MM)
// Multiplies int4 weights by int8 activations. The low nibbles of a step are its depths 0 to 3, the high nibbles its
// depths 4 to 7. A stored nibble is w + kZero.
struct NibbleStep : ByteTiles {
  using X = int8_t;
  using Sum = Ints;
  struct Weight {
    Quads low, high;
  };
  struct Activation {
    BroadcastQuad low, high;
  };
  static constexpr int kDepth = 8, kVectorBytes = 64, kZero = 8;
  LLMK_INLINE Weight weight(const uint8_t* p) {
    const Ints bytes = load_ints(p);
    return {low_nibbles(bytes), high_nibbles(bytes)};
  }
  LLMK_INLINE Activation activation(const X* p) { return {broadcast_quad(p), broadcast_quad(p + 4)}; }
  LLMK_INLINE Sum step(Sum total, Weight w, Activation x) {
    return dot_quads(dot_quads(total, w.low, x.low), w.high, x.high);
  }
};
#endif

// How tiles prefetch weights. The template argument kLines is the number of cache lines that a tile prefetches per step
// of a panel, if a panel has 256 bytes per step. It depends on the number of tiles into which the rows of a task are
// divided. (linear_driver.h describes tasks and pieces.)
//
//  4: If there is one tile, it prefetches its own weights, kFetchAhead bytes ahead.
//  2: If there are two or three tiles, two of them each prefetch half of the next piece of the weights, at `next`.
//  1: If there are more tiles, four of them each prefetch a quarter of the next piece.
//  0: The tile does not prefetch.
constexpr int64_t kFetchAhead = 4096;

// Without AMX, prefetches go into the L2 cache, because the L1 cache has only a few miss buffers. On processors with
// AMX, prefetches into the L1 cache are faster.
#ifdef LLMK_AMX
constexpr int kFetchLocality = 3;
#else
constexpr int kFetchLocality = 2;
#endif
LLMK_INLINE void fetch_ahead(const uint8_t* p) { __builtin_prefetch(p + kFetchAhead, 0, kFetchLocality); }

// Number of bytes of the next piece that a tile of C vectors prefetches in each of its steps, if kLines is 1 or 2. The
// tile passes through a panel 4 / C times, and each pass prefetches an equal part. Requests at a constant rate wait
// less for memory. If the number is less than a cache line, consecutive steps prefetch the same line.
template <class Step, int C, int kLines>
constexpr int64_t kFetchBytes = Step::kVectorBytes * C * kLines / 4;

// Prefetches kBytes bytes, or their cache line if they are fewer than a line.
template <int64_t kBytes>
LLMK_INLINE void fetch_next(const uint8_t* next) {
  LLMK_UNROLL
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(next + at, 0, 2);
}

}  // namespace llmk::LLMK_ARCH

#ifdef LLMK_VEC_AVX2
#ifdef LLMK_VNNI
#include "linear_nibbles_avx2_vnni.h"
#else
#include "linear_nibbles_avx2.h"
#endif
#endif
#ifdef LLMK_NEON_I8MM
#include "linear_matrix_neon.h"
#endif

namespace llmk::LLMK_ARCH {

LLMK_INLINE void load_sum(const float* p, Vec* total) { *total = load(p); }
LLMK_INLINE void load_sum(const float* p, Ints* total) { *total = load_ints(p); }
LLMK_INLINE void store_sum(float* p, Vec total) { store(p, total); }
LLMK_INLINE void store_sum(float* p, Ints total) { store_ints(p, total); }

// Adds the products of R rows and one step of C vectors to the sums.
template <class Step, int R, int C, int kLines>
LLMK_INLINE void multiply_step(const uint8_t* const (&at)[C], const typename Step::X* x, int64_t x_stride,
                               typename Step::Sum (&total)[R][C]) {
  LLMK_UNROLL
  for (int c = 0; c < C && kLines == 4; ++c) fetch_ahead(at[c]);
#ifdef LLMK_VEC_AVX2
  if constexpr (Step::in_parts(R)) {
    constexpr int kParts = Step::kDepth / Step::kPartDepth;
    LLMK_UNROLL
    for (int i = 0; i < C * kParts; ++i) {
      const int c = i / kParts, part = i % kParts;
      const auto weight = Step::weight(at[c], part);
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto* activation = x + r * x_stride + part * Step::kPartDepth;
        if constexpr (R == 1) {
          total[r][c] = fma(broadcast(*activation), weight, total[r][c]);
        } else {
          add_product(&total[r][c], weight, activation);
        }
      }
    }
    return;
  } else
#endif
  {
    typename Step::Weight weight[C];
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) weight[c] = Step::weight(at[c]);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto activation = Step::activation(x + r * x_stride);
      LLMK_UNROLL
      for (int c = 0; c < C; ++c) total[r][c] = Step::step(total[r][c], weight[c], activation);
    }
  }
}

// Does the work of sum_steps() below, if the Step has no loop of its own (kOwnLoop is false).
template <class Step, int R, int C, int kLines, int64_t kTile>
LLMK_INLINE void sum_in_order(const uint8_t* w, int64_t half_bytes, int v, const typename Step::X* x, int64_t x_stride,
                              int64_t steps, const uint8_t* next, typename Step::Sum (&total)[R][C]) {
  constexpr bool kOneStep = kTile == 1;  // true: a tile is one step, so the steps of a vector are equally far apart
  constexpr int64_t kStride = kOneStep ? 2 * Step::kVectorBytes : Step::kVectorBytes;
  const int64_t run = kOneStep ? steps : kTile;
  for (int64_t first = 0; first < steps; first += run) {
    const int64_t count = smaller(run, steps - first), tile = (kOneStep ? 1 : count) * Step::kVectorBytes;
    const uint8_t* at[C];
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) at[c] = w + (v + c) / 2 * half_bytes + (v + c) % 2 * tile;
    w += 2 * tile;
    for (int64_t s = 0; s < count; ++s, x += Step::kDepth) {
      if (kLines == 1 || kLines == 2) {
        fetch_next<kFetchBytes<Step, C, kLines>>(next);
        next += kFetchBytes<Step, C, kLines>;
      }
      multiply_step<Step, R, C, kLines>(at, x, x_stride, total);
      LLMK_UNROLL
      for (int c = 0; c < C; ++c) at[c] += kStride;
    }
  }
}

// Adds the products of activation row r and vector v + c of a panel to total[r][c]. `w` points to the first of `steps`
// steps, at the beginning of a tile of kTile steps. `half_bytes` is the distance from the weights of the panel's first
// 32 columns to those of its last 32 columns.
template <class Step, int R, int C, int kLines, int64_t kTile>
LLMK_INLINE void sum_steps(const uint8_t* w, int64_t half_bytes, int v, const typename Step::X* x, int64_t x_stride,
                           int64_t steps, const uint8_t* next, typename Step::Sum (&total)[R][C]) {
  if constexpr (Step::kOwnLoop) {
    return Step::template sum<R, C, kLines>(w, half_bytes, v, x, x_stride, steps, next, total);
  } else {
    return sum_in_order<Step, R, C, kLines, kTile>(w, half_bytes, v, x, x_stride, steps, next, total);
  }
}

}  // namespace llmk::LLMK_ARCH
