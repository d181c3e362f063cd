// MatMul for a weight in the layout of checkpoints.
//
//  x [rows, depth]   w [columns, depth]   ->   out [rows, columns]
//
//  out[r][c] = round(sum over k of x[r][k] * w[c][k])
//
// Every tile adds up a dot product in the order of ops/dot.h, so the result of a row does not depend on other rows. A
// task is a rectangle of `out`. It computes each block of columns for all rows of the rectangle, so that it reads the
// weights from memory only once.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"
#include "dot.h"

namespace llmk {

struct MatMulArgs {
  const void* x;
  const void* w;
  void* out;
  int64_t rows, columns, depth;
  DType dtype;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

#ifdef LLMK_VEC_AVX512
constexpr int kTileRows = 4, kTileColumns = 6;
#else
constexpr int kTileRows = 2, kTileColumns = 2;
#endif
constexpr int64_t kMatMulRows = 64;
constexpr int64_t kPackSteps = 32;  // steps of a depth piece; kTileColumns columns of a piece fit into the L1 cache

// A range of depths. The kernel processes the depth range by range. Between two ranges it stores the vectors of partial
// sums, to which the next range adds.
struct DepthPiece {
  int64_t begin, end;
  bool first, last;
};

// Copies a piece of C columns to `out` in the layout PackedColumns, converted to the type P.
template <int C, class T, class P>
static inline void pack_columns(const MatMulArgs& args, const DepthPiece& piece, int64_t column, P* out) {
  constexpr int kStep = Dot<T, P>::kStep;
  const T* w = static_cast<const T*>(args.w) + column * args.depth;
  // Prefetches the weights that the kernel packs next. These are the next depths of the same columns or, after the last
  // piece of the depth, the next C columns.
  const int64_t ahead = piece.last ? C * args.depth - piece.begin : kPackSteps * kStep;
  for (int64_t k = piece.begin; k < piece.end; k += kStep) {
    for (int c = 0; c < C; ++c, out += kStep) {
      const T* from = w + c * args.depth + k;
      __builtin_prefetch(from + ahead, 0, 2);
      copy_step(out, from, smaller(kStep, piece.end - k));
    }
  }
}

// Adds up the lanes of each sum, rounds the results, and writes them to the output.
template <int R, int C, class T>
LLMK_INLINE void finish_tile(const MatMulArgs& args, const Vec (&total)[R][C], int64_t row, int64_t column) {
  constexpr int kCount = (R * C + kLanes - 1) / kLanes * kLanes;
  float values[kCount];
  T rounded[kCount];
  sum_tile(total, values);
  LLMK_UNROLL
  for (int i = 0; i < kCount; i += kLanes) store(rounded + i, load(values + i));
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    T* out = static_cast<T*>(args.out) + (row + r) * args.columns + column;
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) out[c] = rounded[r * C + c];
  }
}

// Multiplies R rows by C columns over a piece of the depth. Between two pieces, `lanes` holds the vectors of sums.
template <int R, int C, class T, class W>
static inline void matmul_tile(const MatMulArgs& args, const DepthPiece& piece, const W& w, int64_t row,
                               int64_t column, Vec* lanes) {
  const T* x[R];
  Vec total[R][C];
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(args.x) + (row + r) * args.depth + piece.begin;
  LLMK_UNROLL
  for (int i = 0; i < R * C; ++i) total[i / C][i % C] = piece.first ? zero() : lanes[i];
  dot_tile<R, C>(x, w, piece.end - piece.begin, total);
  if (piece.last) return finish_tile<R, C, T>(args, total, row, column);
  LLMK_UNROLL
  for (int i = 0; i < R * C; ++i) lanes[i] = total[i / C][i % C];
}

template <int C, class T, class W>
static inline void matmul_rows(const MatMulArgs& args, const DepthPiece& piece, const W& w, int64_t row,
                               int64_t row_end, int64_t column, Vec* lanes) {
  for (; row + kTileRows <= row_end; row += kTileRows, lanes += kTileRows * C) {
    matmul_tile<kTileRows, C, T>(args, piece, w, row, column, lanes);
  }
  if (kTileRows > 3 && row_end - row == 3) matmul_tile<3, C, T>(args, piece, w, row, column, lanes);
  if (kTileRows > 2 && row_end - row == 2) matmul_tile<2, C, T>(args, piece, w, row, column, lanes);
  if (row_end - row == 1) matmul_tile<1, C, T>(args, piece, w, row, column, lanes);
}

// Multiplies many rows by C columns. Packs the columns piece by piece into the L1 cache, where all rows use them.
template <int C, class T>
static inline void matmul_packed(const MatMulArgs& args, int64_t row, int64_t row_end, int64_t column) {
  using P = typename Packed<T>::Type;
  constexpr int64_t kDepth = kPackSteps * Dot<T, P>::kStep;
  alignas(64) P packed[kDepth * C];
  Vec* lanes = static_cast<Vec*>(thread_scratch(kScratchTile, kMatMulRows * C * static_cast<int64_t>(sizeof(Vec))));
  DepthPiece piece{0, 0, true, false};
  do {
    piece = {piece.end, smaller(piece.end + kDepth, args.depth), piece.end == 0, piece.end + kDepth >= args.depth};
    pack_columns<C, T>(args, piece, column, packed);
    matmul_rows<C, T>(args, piece, PackedColumns<C, P>{packed}, row, row_end, column, lanes);
  } while (!piece.last);
}

// Multiplies rows [row, row_end) by C columns. For at most kTileRows rows, it reads the columns without packing them.
template <int C, class T>
static inline void matmul_columns(const MatMulArgs& args, int64_t row, int64_t row_end, int64_t column) {
  if (row_end - row > kTileRows) return matmul_packed<C, T>(args, row, row_end, column);
  ColumnPointers<C, T> w;
  for (int c = 0; c < C; ++c) w.column[c] = static_cast<const T*>(args.w) + (column + c) * args.depth;
  matmul_rows<C, T>(args, {0, args.depth, true, true}, w, row, row_end, column, nullptr);
}

template <class T>
static inline void matmul_task(const MatMulArgs& args, int64_t row, int64_t row_end, int64_t column, int64_t end) {
  for (; column + kTileColumns <= end; column += kTileColumns) {
    matmul_columns<kTileColumns, T>(args, row, row_end, column);
  }
  for (; kTileColumns > 4 && column + 4 <= end; column += 4) matmul_columns<4, T>(args, row, row_end, column);
  for (; kTileColumns > 2 && column + 2 <= end; column += 2) matmul_columns<2, T>(args, row, row_end, column);
  for (; column < end; ++column) matmul_columns<1, T>(args, row, row_end, column);
}

template <class T>
static inline void matmul_typed(const MatMulArgs& args) {
  const int64_t weight_bytes = args.columns * args.depth * static_cast<int64_t>(sizeof(T));
  if (weight_bytes < (64 << 10) && args.rows * args.columns * args.depth < (1 << 17)) {  // one thread is faster
    for (int64_t row = 0; row < args.rows; row += kMatMulRows) {
      matmul_task<T>(args, row, smaller(row + kMatMulRows, args.rows), 0, args.columns);
    }
    return;
  }
  const int64_t task_rows = smaller(args.rows, kMatMulRows);
  const int64_t task_columns = kTileColumns * larger(1, smaller(16, 262144 / (args.depth * kTileColumns + 1)));
  const int64_t row_tasks = ceil_div(args.rows, task_rows), column_tasks = ceil_div(args.columns, task_columns);
  parallel_for(row_tasks * column_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * task_rows, column = task / row_tasks * task_columns;
    matmul_task<T>(args, row, smaller(row + task_rows, args.rows), column,
                   smaller(column + task_columns, args.columns));
  });
}

static void matmul(const MatMulArgs& args) {
  with_element_type(args.dtype, [&](auto type) { matmul_typed<decltype(type)>(args); });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
