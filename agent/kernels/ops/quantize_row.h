// Quantises activations to int8, row by row: scale = max|x| / 127, q = round(x * (127 / max|x|)).
//
// With static inputs (linear.h), scales and offsets come from the weight: q = round(x * inverse scale + offset). The
// row's scale is 1. The product is rounded to float32 before the offset is added.
//
// Sums of q are below 2^24 in magnitude, so adding them as floats is exact in any order. A row with a NaN or an
// infinity gets zeros and the scale NaN. All its results are NaN, and other rows are not affected.
#pragma once
#include <cmath>

#include "../common/types.h"
#include "linear.h"

namespace llmk {

static inline float quantize_inverse(float largest) {
  const float inverse = 127.0f / largest;
  // Returns 0 if the quotient overflows. Then all numbers of the row are so small that they are quantised to zero.
  return inverse <= 3.4e38f ? inverse : 0.0f;
}

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

// Writes the sum of the quantised values of each group to `sums`. Used if the length of a group is not a multiple of
// 16.
static void sum_groups(const int8_t* values, int64_t depth, int64_t group, int32_t* sums) {
  for (int64_t begin = 0; begin < depth; begin += group) {
    int32_t total = 0;
    for (int64_t k = begin; k < smaller(begin + group, depth); ++k) total += values[k];
    *sums++ = total;
  }
}

template <class T>
static void quantize_row_typed(const T* x, const QuantizedRows& rows, int64_t row, const PackedWeightHeader& header) {
  const int64_t depth = header.depth, whole = depth / kLanes * kLanes;
  int8_t* values = rows.values + row * rows.stride;
  int32_t* sums = rows.sums + row * rows.groups;
  Vec largest_lanes[2] = {zero(), zero()}, poison_lanes = zero();
  for (int64_t k = 0; k < depth; k += kLanes) {
    const Vec v = k < whole ? load(x + k) : load_n(x + k, depth - k);
    Vec& lanes = largest_lanes[k / kLanes % 2];
    lanes = maximum(lanes, maximum(v, sub(zero(), v)));
    poison_lanes = fma(v, zero(), poison_lanes);
  }
  const float poison = sum(poison_lanes);  // NaN if a number is not finite, because its product with zero is NaN
  const float most = largest(maximum(largest_lanes[0], largest_lanes[1]));
  const float inverse = poison != poison ? 0.0f : quantize_inverse(most);
  rows.scales[row] = poison != poison ? poison : most / 127.0f;
  if (inverse == 0) {
    std::memset(values, 0, static_cast<size_t>(rows.stride));
    for (int64_t g = 0; g < rows.groups; ++g) sums[g] = 0;
    return;
  }
  const bool by_vectors = header.group % kLanes == 0;
  const int64_t group = header.group == 0 ? rows.stride : header.group;
  const Vec factor = broadcast(inverse);
  Vec total = zero();
  for (int64_t k = 0; k < rows.stride; k += kLanes) {
    const Vec v = k < whole ? load(x + k) : k < depth ? load_n(x + k, depth - k) : zero();
    const Vec q = round_nearest(mul(v, factor));
    store_signed_bytes(values + k, to_ints(q));
    total = add(total, q);
    if (by_vectors && k < depth && ((k + kLanes) % group == 0 || k + kLanes >= depth)) {
      sums[k / group] = static_cast<int32_t>(sum(total));
      total = zero();
    }
  }
  if (!by_vectors) sum_groups(values, depth, header.group, sums);
}

#ifdef LLMK_VEC_AVX512
// Quantises a row of bfloat16, 32 numbers per vector. Finds the largest magnitude by comparing the bits as integers.
// Each 32-bit lane has an even and an odd number. A shift of the lane gives one of them as float32, and a mask of the
// lower half gives the other.
static void quantize_bfloats(const bfloat_t* x, const QuantizedRows& rows, int64_t row,
                             const PackedWeightHeader& header) {
  constexpr int64_t kStep = 2 * kLanes;
  constexpr uint32_t kInfinity = 0x7F80;
  const int64_t depth = header.depth, group = header.group == 0 ? depth : header.group;
  int8_t* values = rows.values + row * rows.stride;
  int32_t* sums = rows.sums + row * rows.groups;
  const auto numbers = [&](int64_t k) {
    if (k + kStep <= depth) return _mm512_loadu_si512(x + k);
    return _mm512_maskz_loadu_epi16(k < depth ? (1u << (depth - k)) - 1 : 0u, x + k);
  };
  __m512i most = _mm512_setzero_si512();
  for (int64_t k = 0; k < depth; k += kStep) {
    most = _mm512_max_epu16(most, _mm512_and_si512(numbers(k), _mm512_set1_epi16(0x7FFF)));
  }
  most = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(most, 16));
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  const float largest = bits_to_float(bits << 16), inverse = bits >= kInfinity ? 0.0f : quantize_inverse(largest);
  rows.scales[row] = bits >= kInfinity ? std::nanf("") : largest / 127.0f;
  if (inverse == 0) {
    std::memset(values, 0, static_cast<size_t>(rows.stride));
    for (int64_t g = 0; g < rows.groups; ++g) sums[g] = 0;
    return;
  }
  const __m512 factor = _mm512_set1_ps(inverse);
  int64_t k = 0;
  for (int64_t g = 0; k < depth; ++g) {
    __m512i total = _mm512_setzero_si512();
    for (const int64_t end = smaller(k + group, depth); k < end; k += kStep) {
      __builtin_prefetch(x + depth + k);  // prefetches the next row, which is probably quantised next
      const Ints pairs{numbers(k)};
      const __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps(low_bfloats(pairs).v, factor));
      const __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps(high_bfloats(pairs).v, factor));
      const __m512i joined = _mm512_mask_blend_epi16(0xAAAAAAAAu, even, _mm512_slli_epi32(odd, 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + k), _mm512_cvtepi16_epi8(joined));
      total = _mm512_add_epi32(total, _mm512_add_epi32(even, odd));
    }
    sums[g] = _mm512_reduce_add_epi32(total);
  }
  std::memset(values + k, 0, static_cast<size_t>(rows.stride - k));
}

// Quantises a row of float32. Gives the same bits as quantize_row_typed(), but its loop has no divisions and finds the
// largest magnitude by comparing the bits as integers.
static void quantize_floats(const float* x, const QuantizedRows& rows, int64_t row, const PackedWeightHeader& header) {
  constexpr uint32_t kInfinity = 0x7F800000;
  const int64_t depth = header.depth, group = header.group == 0 ? depth : header.group;
  int8_t* values = rows.values + row * rows.stride;
  int32_t* sums = rows.sums + row * rows.groups;
  const auto numbers = [&](int64_t k) {
    if (k + kLanes <= depth) return _mm512_loadu_ps(x + k);
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(k < depth ? (1u << (depth - k)) - 1 : 0u), x + k);
  };
  const auto magnitudes = [&](int64_t k) {
    return _mm512_and_si512(_mm512_castps_si512(numbers(k)), _mm512_set1_epi32(0x7FFFFFFF));
  };
  __m512i most = _mm512_setzero_si512(), second = most;
  for (int64_t k = 0; k < depth; k += 2 * kLanes) {
    most = _mm512_max_epu32(most, magnitudes(k));
    second = _mm512_max_epu32(second, magnitudes(k + kLanes));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(most, second));
  const float largest = bits_to_float(bits), inverse = bits >= kInfinity ? 0.0f : quantize_inverse(largest);
  if (inverse == 0) return quantize_row_typed(x, rows, row, header);
  rows.scales[row] = largest / 127.0f;
  const __m512 factor = _mm512_set1_ps(inverse);
  int64_t k = 0;
  for (int64_t g = 0; k < depth; ++g) {
    __m512i total = _mm512_setzero_si512();
    for (const int64_t end = smaller(k + group, depth); k < end; k += kLanes) {
      __builtin_prefetch(x + depth + k);  // prefetches the next row, which is probably quantised next
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(numbers(k), factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + k), _mm512_cvtepi32_epi8(q));
      total = _mm512_add_epi32(total, q);
    }
    sums[g] = _mm512_reduce_add_epi32(total);
  }
  std::memset(values + k, 0, static_cast<size_t>(rows.stride - k));
}
#endif

// Quantises a row by the static inputs of a weight.
template <class T>
static void quantize_static_row(const T* x, const QuantizedRows& rows, int64_t row, int64_t depth,
                                const StaticInputs& inputs) {
  int8_t* values = rows.values + row * rows.stride;
  const Vec lowest = broadcast(-128.0f), highest = broadcast(127.0f);
  Vec total = zero(), poison_lanes = zero();
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int64_t left = depth - k;
    const Vec v = left >= kLanes ? load(x + k) : load_n(x + k, left);
    poison_lanes = fma(v, zero(), poison_lanes);
    const Vec shifted = add(mul(v, load(inputs.inverses + k)), load(inputs.offsets + k));
    const Vec q = round_nearest(minimum(maximum(shifted, lowest), highest));
    store_signed_bytes(values + k, to_ints(q));
    total = add(total, q);
  }
  std::memset(values + depth, 0, static_cast<size_t>(rows.stride - depth));
  const float poison = sum(poison_lanes);
  const bool poisoned = poison != poison;
  if (poisoned) std::memset(values, 0, static_cast<size_t>(depth));
  rows.scales[row] = poisoned ? poison : 1.0f;
  rows.sums[row] = poisoned ? 0 : static_cast<int32_t>(sum(total));
}

static void quantize_row(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const void* blob) {
  const PackedWeightHeader& header = header_of(blob);
  if (header.static_inputs != 0) {
    const StaticInputs inputs = static_inputs_of(blob);
    if (dtype == DType::kFloat32) {
      quantize_static_row(static_cast<const float*>(x), rows, row, header.depth, inputs);
    } else if (dtype == DType::kFloat16) {
      quantize_static_row(static_cast<const half_t*>(x), rows, row, header.depth, inputs);
    } else if (dtype == DType::kBFloat16) {
      quantize_static_row(static_cast<const bfloat_t*>(x), rows, row, header.depth, inputs);
    }
    return;
  }
#ifdef LLMK_VEC_AVX512
  if (dtype == DType::kFloat32 && header.group % kLanes == 0) {
    return quantize_floats(static_cast<const float*>(x), rows, row, header);
  }
#endif
  if (dtype == DType::kFloat32) quantize_row_typed(static_cast<const float*>(x), rows, row, header);
  if (dtype == DType::kFloat16) quantize_row_typed(static_cast<const half_t*>(x), rows, row, header);
#ifdef LLMK_VEC_AVX512
  if (dtype == DType::kBFloat16 && header.group % (2 * kLanes) == 0) {
    return quantize_bfloats(static_cast<const bfloat_t*>(x), rows, row, header);
  }
#endif
  if (dtype == DType::kBFloat16) quantize_row_typed(static_cast<const bfloat_t*>(x), rows, row, header);
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
