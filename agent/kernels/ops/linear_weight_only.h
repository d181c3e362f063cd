// Multiplies integer weights by float activations. The kernel unpacks one block of the depth into the L1 cache, as
// float32 or bfloat16. Then it multiplies as for a float format. Unpacking is exact: bfloat16 can represent every int8,
// and every int4 minus its zero point.
#pragma once
#include "../common/types.h"
#include "linear_epilogue.h"
#include "linear_tiles.h"

namespace llmk::LLMK_ARCH {

// Unpacks one step of int8 weights: 16 columns at kDepth depths, in 64 bytes. The function floats() returns one vector
// of floats for each depth. The function pairs() returns one vector of bfloat16 pairs for every two depths. A weight is
// the stored number plus `shift`.
struct ByteWeights {
  static constexpr int kDepth = 4;
  LLMK_INLINE Ints shift(const uint8_t*) { return broadcast_int(-128); }
  LLMK_INLINE void floats(Ints step, Ints shift, Vec (&out)[kDepth]) {
    out[0] = to_floats(add(low_bits<8>(step), shift));
    out[1] = to_floats(add(low_bits<8>(shift_right<8>(step)), shift));
    out[2] = to_floats(add(low_bits<8>(shift_right<16>(step)), shift));
    out[3] = to_floats(add(shift_right<24>(step), shift));
  }
#ifdef LLMK_BF16_DOT
  LLMK_INLINE void pairs(Ints step, Ints shift, Ints (&out)[kDepth / 2]) {
    Vec numbers[kDepth];
    floats(step, shift, numbers);
    out[0] = pair_bfloats(numbers[0], numbers[1]);
    out[1] = pair_bfloats(numbers[2], numbers[3]);
  }
#endif
};

// Unpacks one step of int4 weights, with the same functions as ByteWeights. If kZeros, the weights have zero points
// from 0 to 16. Otherwise all zero points are 8.
template <bool kZeros>
struct NibbleWeights {
  static constexpr int kDepth = 8;
  LLMK_INLINE Ints shift(const uint8_t* zeros) {
    return kZeros ? multiply(load_unsigned_bytes(zeros), broadcast_int(-1)) : broadcast_int(-8);
  }
  LLMK_INLINE void floats(Ints step, Ints shift, Vec (&out)[kDepth]) {
    out[0] = to_floats(add(low_bits<4>(step), shift));
    out[4] = to_floats(add(low_bits<4>(shift_right<4>(step)), shift));
    out[1] = to_floats(add(low_bits<4>(shift_right<8>(step)), shift));
    out[5] = to_floats(add(low_bits<4>(shift_right<12>(step)), shift));
    out[2] = to_floats(add(low_bits<4>(shift_right<16>(step)), shift));
    out[6] = to_floats(add(low_bits<4>(shift_right<20>(step)), shift));
    out[3] = to_floats(add(low_bits<4>(shift_right<24>(step)), shift));
    out[7] = to_floats(add(shift_right<28>(step), shift));
  }
#ifdef LLMK_BF16_DOT
  // Unpacks one step of int4 weights to pairs of bfloat16. Each 32-bit lane has 8 depths of 4 bits. A shuffle moves the
  // even depths to the lower half of the lane, in the order 0 4 2 6. It moves the odd depths to the upper half, in the
  // order 1 5 3 7. Then choose() turns the lowest nibbles of both halves into a pair.
  LLMK_INLINE void pairs(Ints step, Ints shift, Ints (&out)[kDepth / 2]) {
    const __m512i order = _mm512_set4_epi32(0x0F0D0E0C, 0x0B090A08, 0x07050604, 0x03010200);
    const Ints halves = {_mm512_shuffle_epi8(step.v, order)};
    out[0] = choose(halves, shift);
    out[2] = choose(shift_right<4>(halves), shift);
    out[1] = choose(shift_right<8>(halves), shift);
    out[3] = choose(shift_right<12>(halves), shift);
  }

 private:
  // Converts the lowest nibble of each half of a lane to bfloat16 with a table. If kZeros, first adds `shift` to the
  // nibbles.
  LLMK_INLINE Ints choose(Ints halves, Ints shift) {
    if constexpr (!kZeros) return {_mm512_permutexvar_epi16(halves.v, _mm512_load_si512(kLessEight))};
    const __m512i shifts = _mm512_mask_blend_epi16(0xAAAAAAAA, shift.v, _mm512_slli_epi32(shift.v, 16));
    const __m512i numbers = _mm512_add_epi16(_mm512_and_si512(halves.v, _mm512_set1_epi16(15)), shifts);
    return {_mm512_permutexvar_epi16(numbers, _mm512_load_si512(kSigned))};
  }

  // Tables of bfloat16 values. The table kLessEight converts a nibble to its value minus 8, and ignores the fifth bit
  // of the index. The table kSigned converts a five-bit number in two's complement.
  alignas(64) static constexpr uint16_t kLessEight[32] = {
      0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
      0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
      0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
  alignas(64) static constexpr uint16_t kSigned[32] = {
      0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130,
      0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};
#endif
};

// Distance in bytes between two consecutive loads of the weights of one vector of 16 columns (layout: linear.h). If
// tiles have 16 steps, the loads of a vector are adjacent. If tiles have one step, the tiles of two vectors alternate.
constexpr int64_t kStepStride = kTileSteps == 1 ? 128 : 64;

// Prefetches the step that is kFetchAhead bytes after `from`. Int4 weights go into the L1 cache, because unpacking them
// takes longer. Int8 weights go into the cache that kFetchLocality names.
template <class Weights>
LLMK_INLINE void fetch_step(const uint8_t* from) {
  __builtin_prefetch(from + kFetchAhead, 0, Weights::kDepth == 8 ? 3 : kFetchLocality);
}

// Unpacks `steps` steps of a vector into consecutive steps of float32 or of pairs of bfloat16.
template <class Weights>
LLMK_INLINE void unpack_steps(const uint8_t* from, int64_t steps, Ints shift, float* to) {
  for (int64_t s = 0; s < steps; ++s, from += kStepStride) {
    fetch_step<Weights>(from);
    Vec numbers[Weights::kDepth];
    Weights::floats(load_ints(from), shift, numbers);
    LLMK_UNROLL
    for (int i = 0; i < Weights::kDepth; ++i, to += kLanes) store(to, numbers[i]);
  }
}
#ifdef LLMK_BF16_DOT
template <class Weights>
LLMK_INLINE void unpack_steps(const uint8_t* from, int64_t steps, Ints shift, bfloat_t* to) {
  for (int64_t s = 0; s < steps; ++s, from += kStepStride) {
    fetch_step<Weights>(from);
    Ints pairs[Weights::kDepth / 2];
    Weights::pairs(load_ints(from), shift, pairs);
    LLMK_UNROLL
    for (int i = 0; i < Weights::kDepth / 2; ++i, to += 2 * kLanes) store_ints(to, pairs[i]);
  }
}
#endif

// Number of depths of a block. The weights of a panel are unpacked in blocks.
constexpr int64_t kUnpackDepth = 64;  // 16 KB as float32, 8 KB as bfloat16

struct WeightBlock {
  const uint8_t* group;
  // The block has `count` steps of group number `number`, from its step `begin` on. The group has `steps` steps.
  // `first` is the number of the block's first step in the whole depth.
  int64_t number, steps, begin, count, first;

  bool starts_group() const { return begin == 0; }
  bool ends_group() const { return begin + count == steps; }
  const uint8_t* vector(int64_t step, int v) const {
    return group + step_offset(kTileSteps, steps, begin + step, v, 64);
  }
  const float* scales() const { return reinterpret_cast<const float*>(group + steps * 4 * 64); }
  const uint8_t* zeros(int v) const { return reinterpret_cast<const uint8_t*>(scales() + kPanelColumns) + v * kLanes; }
};

// The blocks of a panel, in the order of the depth. The last block of a quantisation group may be shorter.
template <class Weights>
struct WeightBlocks {
  static constexpr int64_t kSteps = kUnpackDepth / Weights::kDepth;

  WeightBlocks(const WeightShape& shape, const uint8_t* panel)
      : shape(shape), panel(panel), of_group(ceil_div(shape.group_steps, kSteps)) {}

  int64_t count() const {
    return (shape.groups - 1) * of_group + ceil_div(shape.steps - (shape.groups - 1) * shape.group_steps, kSteps);
  }
  WeightBlock operator[](int64_t i) const {
    const int64_t g = i / of_group, begin = i % of_group * kSteps, first = g * shape.group_steps;
    const int64_t steps = smaller(shape.group_steps, shape.steps - first);
    const uint8_t* group = panel + g * (shape.group_steps * shape.step_bytes + shape.scale_bytes);
    return {group, g, steps, begin, smaller(kSteps, steps - begin), first + begin};
  }

  const WeightShape& shape;
  const uint8_t* panel;
  const int64_t of_group;  // number of blocks in a full quantisation group
};

// Returns true if each group has its own scales. Otherwise each column has one scale, which is applied at the end.
static inline bool scales_groups(const LinearJob& job) {
  return job.header.group != 0 || has_nibbles(job.header.format);
}

// Adds the sums of a group, times its scales, to the totals: total = fma(sum, scale, total). There are `rows` rows and
// C vectors of a panel.
template <int C>
LLMK_INLINE void fold_group(const float* sums, const float* scales, int64_t rows, bool first, float* totals) {
  Vec scale[C];
  LLMK_UNROLL
  for (int c = 0; c < C; ++c) scale[c] = load(scales + c * kLanes);
  for (const float* end = sums + rows * kPanelColumns; sums < end; sums += kPanelColumns, totals += kPanelColumns) {
    LLMK_UNROLL
    for (int c = 0; c < C; ++c) {
      const Vec total = first ? zero() : load(totals + c * kLanes);
      store(totals + c * kLanes, fused(load(sums + c * kLanes), scale[c], total));
    }
  }
}

// Unpacks weights block by block, and multiplies each block in vector registers with the functions of Step
// (linear_tiles.h).
template <class Weights, class Step>
struct WeightOnlyForm {
  using X = typename Step::X;
  static constexpr int64_t kParts = Weights::kDepth / Step::kDepth;

  static void task(const LinearJob& job, int64_t panel, int64_t row, int64_t row_end) {
    const int64_t rows = row_end - row, size = rows * kPanelColumns;
    alignas(64) X unpacked[kUnpackDepth * kPanelColumns];
    float* sums = static_cast<float*>(thread_scratch(kScratchLinearTile, 2 * size * 4));
    float* totals = sums + size;
    const WeightBlocks<Weights> blocks(job.shape, job.panels + panel * job.shape.panel_bytes);
    for (int64_t i = 0; i < blocks.count(); ++i) {
      const WeightBlock block = blocks[i];
      unpack(block, unpacked);
      multiply(job, block, unpacked, row, rows, sums);
      if (block.ends_group() && scales_groups(job)) {
        fold_group<4>(sums, block.scales(), rows, block.number == 0, totals);
      }
    }
    finish_tile(job, panel, row, rows, scales_groups(job) ? totals : sums);
  }

 private:
  static constexpr int64_t kUnpackedTile = 16;  // number of steps in a tile (T in linear.h)

  // Converts a block of packed integer weights to the type X of the products. The result has the layout of a float
  // format, which the comment at the start of linear.h describes.
  static void unpack(const WeightBlock& block, X* to) {
    constexpr int64_t kTile = kUnpackedTile / kParts;  // number of packed steps whose weights fill one unpacked tile
    for (int v = 0; v < 4; ++v) {
      const Ints shift = Weights::shift(block.zeros(v));
      for (int64_t s = 0; s < block.count; s += kTile) {
        X* tile = to + step_offset(kUnpackedTile, block.count * kParts, s * kParts, v, Step::kDepth * kLanes);
        unpack_steps<Weights>(block.vector(s, v), smaller(kTile, block.count - s), shift, tile);
      }
    }
  }

  static void multiply(const LinearJob& job, const WeightBlock& block, const X* weights, int64_t row, int64_t rows,
                       float* sums) {
    const auto nothing = [](int64_t, int64_t, const float*) {};
    const int64_t begin = block.first * kParts, steps = block.count * kParts;
    const Piece piece{reinterpret_cast<const uint8_t*>(weights),
                      steps * 2 * Step::kVectorBytes,
                      begin,
                      begin + steps,
                      0,
                      block.starts_group(),
                      nullptr,
                      0,
                      nullptr,
                      nullptr,
                      0};
    piece_rows<PlainForm<Step, kUnpackedTile>, false>(job, piece, row, rows, sums, nothing);
  }
};

}  // namespace llmk::LLMK_ARCH

#ifdef LLMK_AMX
#include "linear_weight_only_amx.h"
#include "linear_weight_only_row.h"
#endif

namespace llmk::LLMK_ARCH {

template <class Form>
static void run_form(const LinearJob& job) {
  constexpr int64_t kRows = 32;  // two threads unpack the weights of a panel that they share, which takes time
  for_panels(job, kRows, [&](int64_t panel, int64_t row, int64_t row_end) {
    fetch_adapters(job, panel, row, row_end);
    Form::task(job, panel, row, row_end);
  });
}

template <class Weights, class X>
static void run_weights(const LinearJob& job) {
#ifdef LLMK_BF16_DOT
  if constexpr (sizeof(X) == sizeof(bfloat_t)) {
#ifdef LLMK_AMX
    if (TiledWeightOnly<Weights>::fits(job)) {
      return job.args.rows == 1 ? SingleRow<Weights>::run(job) : run_form<TiledWeightOnly<Weights>>(job);
    }
#endif
    return run_form<WeightOnlyForm<Weights, BFloatDotStep>>(job);
  }
#endif
  run_form<WeightOnlyForm<Weights, FloatStep<float>>>(job);
}

// Multiplies integer weights by float activations of type X: bfloat_t if the processor multiplies pairs of bfloat16,
// otherwise float.
template <class X>
static void run_weight_only(const LinearJob& job) {
  if (!has_nibbles(job.header.format)) return run_weights<ByteWeights, X>(job);
  if (job.header.asymmetric != 0) return run_weights<NibbleWeights<true>, X>(job);
  run_weights<NibbleWeights<false>, X>(job);
}

}  // namespace llmk::LLMK_ARCH
