// Dot products of R rows with C columns: the inner loop of MatMul.
//
// The order of additions is fixed, so that results do not depend on R and C. Element k of a row is multiplied by
// element k of a column. Lane l of the 16 lanes adds up the products at k = l, l + 16, l + 32, ... with one fused
// multiply-add each. With VDPBF16PS, lane l adds up pairs of bfloat16: k = 2l and 2l + 1, then 2l + 32 and 2l + 33, and
// so on. Then the lanes are added in the order of sum() (arch/vec.h). Elements past `depth` count as 0.
#pragma once
#include "../common/types.h"

#ifdef LLMK_ARCH

namespace llmk::LLMK_ARCH {

template <class X, class W>
struct Dot {
  using Operand = Vec;
  static constexpr int kStep = kLanes;
  template <class T>
  static inline Operand get(const T* p) {
    return load(p);
  }
  template <class T>
  static inline Operand get_n(const T* p, int64_t n) {
    return load_n(p, n);
  }
  static inline Vec step(Operand x, Operand w, Vec total) { return fma(x, w, total); }
};

#ifdef LLMK_BF16_DOT
template <>
struct Dot<bfloat_t, bfloat_t> {
  using Operand = __m512bh;
  static constexpr int kStep = 2 * kLanes;
  static inline Operand get(const bfloat_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static inline Operand get_n(const bfloat_t* p, int64_t n) {
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p));
  }
  static inline Vec step(Operand x, Operand w, Vec total) { return {_mm512_dpbf16_ps(total.v, x, w)}; }
};
#endif

// The type in which columns of T are packed, so that the dot product needs no conversion.
template <class T>
struct Packed {
  using Type = float;
};
#ifdef LLMK_BF16_DOT
template <>
struct Packed<bfloat_t> {
  using Type = bfloat_t;
};
#endif

// Copies kStep elements of a column and converts them to the packed type. If only `n` elements are left, zeros fill the
// rest of the step.
LLMK_INLINE void copy_step(float* to, const float* from, int64_t n) { store(to, load_n(from, n)); }
LLMK_INLINE void copy_step(float* to, const half_t* from, int64_t n) { store(to, load_n(from, n)); }
LLMK_INLINE void copy_step(float* to, const bfloat_t* from, int64_t n) { store(to, load_n(from, n)); }
#ifdef LLMK_BF16_DOT
LLMK_INLINE void copy_step(bfloat_t* to, const bfloat_t* from, int64_t n) {
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, from));
}
#endif

// The two layouts from which dot_tile() can read columns. In both, at() returns the address of element k of column c.
//
// ColumnPointers: each column is an array of its own. PackedColumns: kStep elements of each column follow each other,
// then the next kStep elements of each column, and so on. Zeros fill the last kStep elements.
template <int C, class W>
struct ColumnPointers {
  const W* column[C];
  template <int kStep>
  const W* at(int c, int64_t k) const {
    return column[c] + k;
  }
};
template <int C, class W>
struct PackedColumns {
  const W* base;
  template <int kStep>
  const W* at(int c, int64_t k) const {
    return base + k * C + c * kStep;
  }
};

// Adds the products of row r and column c at k = 0 to depth - 1 to the 16 lanes of total[r][c]. sum_tile() adds the
// lanes.
template <int R, int C, class X, class W, template <int, class> class Columns>
LLMK_INLINE void dot_tile(const X* const (&x)[R], const Columns<C, W>& w, int64_t depth, Vec (&total)[R][C]) {
  using D = Dot<X, W>;
  constexpr int kStep = D::kStep;
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    typename D::Operand rows[R];
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) rows[r] = D::get(x[r] + k);
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) {
      const typename D::Operand column = D::get(w.template at<kStep>(c, k));
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) total[r][c] = D::step(rows[r], column, total[r][c]);
    }
  }
  if (k == depth) return;
  LLMK_UNROLL
  for (int c = 0; c < C; ++c) {
    const typename D::Operand column = D::get_n(w.template at<kStep>(c, k), depth - k);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) total[r][c] = D::step(D::get_n(x[r] + k, depth - k), column, total[r][c]);
  }
}

template <int R, int C>
LLMK_INLINE void clear(Vec (&total)[R][C]) {
  LLMK_UNROLL
  for (int r = 0; r < R; ++r) {
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) total[r][c] = zero();
  }
}

// Writes out[r * C + c] = sum(total[r][c]).
template <int R, int C>
LLMK_INLINE void sum_tile(const Vec (&total)[R][C], float* out) {
  constexpr int kCount = R * C;
  int i = 0;
  LLMK_UNROLL
  for (; i + 16 <= kCount; i += 16) {
    Vec part[16];
    LLMK_UNROLL
    for (int j = 0; j < 16; ++j) part[j] = total[(i + j) / C][(i + j) % C];
    sums(part, out + i);
  }
  LLMK_UNROLL
  for (; i + 4 <= kCount; i += 4) {
    Vec part[4];
    LLMK_UNROLL
    for (int j = 0; j < 4; ++j) part[j] = total[(i + j) / C][(i + j) % C];
    sums(part, out + i);
  }
  LLMK_UNROLL
  for (; i < kCount; ++i) out[i] = sum(total[i / C][i % C]);
}

}  // namespace llmk::LLMK_ARCH
#endif
