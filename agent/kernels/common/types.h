// Element types of tensors and their exact conversions to and from float32. Every other file includes this one.
//
// Headers that arch/ includes are compiled once for each instruction set. A function in them must be `static` or in the
// namespace of its instruction set, and must not use std containers. Otherwise the linker keeps only one copy of the
// function for all instruction sets, and this copy may need AVX-512.
#pragma once
#include <cstdint>
#include <cstring>

// Exports a function from the library. All other functions are hidden (-fvisibility=hidden).
#define LLMK_ENTRY __attribute__((visibility("default")))

// Forces the compiler to inline a function. A call of the function would pass the contents of vector registers through
// memory.
#define LLMK_INLINE static inline __attribute__((always_inline))

// Prevents the compiler from inlining a function. If it inlined several tiles into one function, they would compete for
// the registers. Whether it does depends on the other code of the file.
#define LLMK_OUTLINE static __attribute__((noinline))

// Unrolls a loop over a tile completely. Otherwise the compiler keeps the tile in memory instead of registers.
#define LLMK_UNROLL _Pragma("GCC unroll 64")

namespace llmk {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kUnsupported = -1 };

static inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float to_float(float value) { return value; }

static inline float to_float(bfloat_t value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

static inline float to_float(half_t value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1Fu;
  const uint32_t mantissa = value.bits & 0x3FFu;
  if (exponent == 0x1Fu) return bits_to_float(sign | 0x7F800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u));
  if (exponent != 0) return bits_to_float(sign | (exponent + 112u) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24, exact
  return bits_to_float(sign | float_to_bits(magnitude));
}

// Converts to bfloat16, rounding to nearest even. A NaN stays a NaN.
static inline bfloat_t to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

static inline half_t to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu))};
  if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};  // 65520 and above become infinity
  if (magnitude < 0x38800000u) {
    // The result is subnormal. The sum of the magnitude and 0.5 has a last bit of 2^-24, which is also the last bit of
    // a subnormal float16. So the addition rounds to nearest even.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

static inline void from_float(float value, float* out) { *out = value; }
static inline void from_float(float value, half_t* out) { *out = to_half(value); }
static inline void from_float(float value, bfloat_t* out) { *out = to_bfloat(value); }

// Calls function(T{}), where T is the C++ type of the elements of `dtype`.
template <class Function>
LLMK_INLINE void with_element_type(DType dtype, const Function& function) {
  if (dtype == DType::kFloat32) function(float{});
  if (dtype == DType::kFloat16) function(half_t{});
  if (dtype == DType::kBFloat16) function(bfloat_t{});
}

// Returns element `index` of an array of `dtype` as float32.
static inline float load_element(DType dtype, const void* x, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(x)[index];
  if (dtype == DType::kFloat16) return to_float(static_cast<const half_t*>(x)[index]);
  return to_float(static_cast<const bfloat_t*>(x)[index]);
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace llmk
