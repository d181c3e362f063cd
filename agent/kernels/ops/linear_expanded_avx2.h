// Multiplies int8 and int4 weights with quantisation groups by several rows, for AVX2 without AVX-VNNI
// (linear_bytes.h).
//
// Weights must be expanded before they can be multiplied: bytes to 16-bit numbers (words), and nibbles to bytes. If
// the rows form several tiles, all of them multiply the same weights. So the first tile also stores the expanded
// weights of a piece. The other tiles read them from the L1 cache.
//
// A tile multiplies one group by all vectors of a panel, then the next group. So it reads the weights in the order of
// memory. The float totals stay in memory, because the integer sums of 6 rows take 12 of the 16 registers.
#pragma once
#include "linear_driver.h"

namespace llmk::LLMK_ARCH {

// The weights of a quantisation group for one vector of a panel (16 columns), and the activations of a tile.
template <class X>
struct VectorGroup {
  const uint8_t* weights;
  uint8_t* expanded;
  int64_t steps;
  const X* x;
  int64_t x_stride;
  // For each row: the start value of its sum, if all zero points are equal. Otherwise -1 times the sum of its
  // activations.
  const int32_t* starts;
  const uint8_t* zeros;  // the zero points of the columns; null: they are all equal
  const float* scales;
};

// `Own` adds the products of a group in integers, and passes the sums to add_scaled(). An integer n with |n| < 2^22,
// added to kMagicBits, has the bits of the float kMagic + n. So a subtraction makes n a float. It is exact, and can use
// other ports than the products.
template <class Own, class S>
struct ExpandedGroups : GroupedForm<S> {
  using Step = S;
  using X = typename Step::X;

  // Returns true if the sums of a group are less than 2^22. Activations are -127 to 127.
  static bool fits(const LinearJob& job) {
    return job.shape.group_steps * Step::kDepth * Own::kLargestProduct < (1 << 22);
  }

  // If there are several tiles, the expanded weights of a piece must fit the L1 cache. They are twice as large as the
  // weights.
  static int64_t piece_bytes(int64_t rows) { return rows > Step::kMostRows ? 10 << 10 : kPieceBytes; }

  static void prepare(const LinearJob& job, int64_t row, int64_t rows, Piece* piece) {
    if (rows <= Step::kMostRows) return;
    const int64_t steps = (piece->end - piece->begin) * job.shape.group_steps;
    piece->expanded = static_cast<uint8_t*>(thread_scratch(kScratchExpanded, 2 * steps * job.shape.step_bytes));
    piece->expanding_row = row;
  }

  template <int R, int kLines>
  LLMK_OUTLINE void tile(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    if constexpr (R == 1) {
      return GroupedForm<Step>::template tile<1, kLines>(job, piece, row, sums, next);
    } else if constexpr (kLines == 4) {
      add_piece<R, kLines, Weights::kPacked>(job, piece, row, sums, next);
    } else {
      if (kLines != 0 && row == piece.expanding_row) {
        add_piece<R, kLines, Weights::kStored>(job, piece, row, sums, next);
      } else {
        add_piece<R, kLines, Weights::kExpanded>(job, piece, row, sums, next);
      }
    }
  }

 protected:
  // Which weights a tile reads: packed; packed, and it stores them expanded; or expanded. The expanded weights of a
  // group are in the order [4 vectors][steps][2 parts][64 bytes].
  enum class Weights { kPacked, kStored, kExpanded };

  static constexpr int64_t kStepStride = 2 * Step::kVectorBytes;
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  static constexpr int32_t kMagicBits = 0x4B400000;

  // Adds the products of R rows and the next `steps` steps (at least one) to `total`, and moves `group` behind them.
  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_steps(int64_t steps, VectorGroup<X>* group, Ints (&total)[R]) {
    const uint8_t* weights = group->weights;
    uint8_t* expanded = group->expanded;
    const X* x = group->x;
    const int64_t x_stride = group->x_stride;
    do {
      if constexpr (kLines == 4) fetch_ahead(weights);
      LLMK_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint8_t* at = expanded + part * 64;
        const Ints weight = kWeights == Weights::kExpanded ? load_ints(at) : Step::weight(weights, part);
        if constexpr (kWeights == Weights::kStored) store_ints(at, weight);
        LLMK_UNROLL
        for (int r = 0; r < R; ++r) add_product(&total[r], weight, x + r * x_stride + part * Step::kPartDepth);
      }
      weights += kStepStride, expanded += kStepStride, x += Step::kDepth;
    } while (--steps != 0);
    group->weights = weights, group->expanded = expanded, group->x = x;
  }

  // Adds the scaled sums of a group to the float totals of R rows. `sums` have kMagicBits added.
  template <int R>
  LLMK_INLINE void add_scaled(const Ints (&sums)[R], const float* scales, float* totals) {
    const Vec scale = load(scales);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec moved{_mm256_castsi256_ps(sums[r].low), _mm256_castsi256_ps(sums[r].high)};
      float* to = totals + r * kPanelColumns;
      store(to, fused(sub(moved, broadcast(kMagic)), scale, load(to)));
    }
  }

  // Returns the number at `p` in each lane. The function uses an asm statement. Without it, GCC 12 loads all
  // numbers of a tile before the loop over the vectors, and keeps them in memory.
  LLMK_INLINE Ints load_everywhere(const int32_t* p) {
    __m256i all;
    asm volatile("vpbroadcastd %[p], %[all]" : [all] "=x"(all) : [p] "m"(*p));
    return {all, all};
  }

 private:
  // Adds the scaled products of the piece and R rows to `sums`.
  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_piece(const LinearJob& job, const Piece& piece, int64_t row, float* sums, const uint8_t* next) {
    const WeightShape shape = job.shape;  // a copy, because the stores below could change the original
    const int64_t x_stride = job.x_stride;
    const bool asymmetric = job.header.asymmetric != 0;
    const uint8_t* weights = piece.weights;
    uint8_t* expanded = piece.expanded;
    const X* x = static_cast<const X*>(job.x) + row * x_stride + piece.begin * shape.group_steps * Step::kDepth;
    const int32_t* x_sums = job.rows.sums + row * shape.groups;
    if (piece.first) std::memset(sums, 0, R * kPanelColumns * sizeof(float));
    for (int64_t group = piece.begin; group < piece.end; ++group) {
      if (piece.adapters != nullptr) piece.adapters->fetch(kAdapterLines);
      const int64_t steps = smaller(shape.group_steps, shape.steps - group * shape.group_steps);
      const int64_t half = steps * kStepStride, bytes = 2 * half + shape.scale_bytes;
      const float* scales = reinterpret_cast<const float*>(weights + 2 * half);
      const uint8_t* zeros = reinterpret_cast<const uint8_t*>(scales + kPanelColumns);
      int32_t starts[R];
      for (int r = 0; r < R; ++r) {
        const int32_t sum = x_sums[r * shape.groups + group];
        starts[r] = asymmetric ? -sum : kMagicBits - Step::kZero * sum;
      }
      for (int v = 0; v < 4; ++v) {
        if constexpr (kLines == 1 || kLines == 2) next = fetch_lines(next, bytes * kLines / 16);
        const VectorGroup<X> vector{weights + v / 2 * half + v % 2 * Step::kVectorBytes,
                                    expanded + v * half,
                                    steps,
                                    x,
                                    x_stride,
                                    starts,
                                    asymmetric ? zeros + v * kLanes : nullptr,
                                    scales + v * kLanes};
        Own::template add_group<R, kLines, kWeights>(vector, sums + v * kLanes);
      }
      weights += bytes;
      expanded += 4 * half;
      x += shape.group_steps * Step::kDepth;
    }
  }

  // Prefetches `bytes` bytes, and returns their end.
  LLMK_INLINE const uint8_t* fetch_lines(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, kFetchLocality);
    return from + bytes;
  }
};

// int8 weights, which VPMADDWD multiplies as words. They have no zero points.
struct GroupedWords : ExpandedGroups<GroupedWords, ByteStep> {
  static constexpr int64_t kLargestProduct = 128 * 127;

  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_group(VectorGroup<X> group, float* totals) {
    Ints sums[R];
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) sums[r] = load_everywhere(&group.starts[r]);
    add_steps<R, kLines, kWeights>(group.steps, &group, sums);
    add_scaled(sums, group.scales, totals);
  }
};

// int4 weights, which VPMADDUBSW multiplies as bytes. It makes 16-bit sums, which hold the products of
// NibbleStep::kSteps steps. Then they are added up as 32-bit sums.
struct GroupedNibbles : ExpandedGroups<GroupedNibbles, NibbleStep> {
  static constexpr int64_t kLargestProduct = 16 * 127;  // weights minus zero points are -16 to 15

  template <int R, int kLines, Weights kWeights>
  LLMK_INLINE void add_group(VectorGroup<X> group, float* totals) {
    Ints earlier[R], sums[R];
    bool first = true;
    for (int64_t left = group.steps;; first = false) {
      const int64_t steps = smaller(left, Step::kSteps);
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) sums[r] = broadcast_int(0);
      add_steps<R, kLines, kWeights>(steps, &group, sums);
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) sums[r] = first ? add_words(sums[r]) : add(add_words(sums[r]), earlier[r]);
      if ((left -= steps) == 0) break;
      LLMK_UNROLL
      for (int r = 0; r < R; ++r) earlier[r] = sums[r];
    }
    subtract_zeros(group, &sums);
    add_scaled(sums, group.scales, totals);
  }

 private:
  // Subtracts the products of zero points and activations from the sums, and adds kMagicBits.
  template <int R>
  LLMK_INLINE void subtract_zeros(const VectorGroup<X>& group, Ints (*sums)[R]) {
    const Ints zero = group.zeros == nullptr ? broadcast_int(0) : load_unsigned_bytes(group.zeros);
    LLMK_UNROLL
    for (int r = 0; r < R; ++r) {
      const Ints start = load_everywhere(&group.starts[r]);
      Ints& sum = (*sums)[r];
      sum = add(sum, group.zeros == nullptr ? start : add(multiply(zero, start), broadcast_int(kMagicBits)));
    }
  }
};

}  // namespace llmk::LLMK_ARCH
