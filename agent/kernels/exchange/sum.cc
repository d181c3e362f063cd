#include "sum.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmk {
namespace {

template <class In, class Out>
void add_scalar(const void* const* parts, int num_parts, void* out, int64_t begin, int64_t count) {
  for (int64_t i = begin; i < count; ++i) {
    float total = to_float(static_cast<const In*>(parts[0])[i]);
    for (int r = 1; r < num_parts; ++r) total += to_float(static_cast<const In*>(parts[r])[i]);
    from_float(total, static_cast<Out*>(out) + i);
  }
}

#if defined(__x86_64__)
#define LLMK_AVX2 __attribute__((target("avx2,f16c")))

LLMK_AVX2 inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
LLMK_AVX2 inline __m256 load8(const half_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
LLMK_AVX2 inline __m256 load8(const bfloat_t* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

LLMK_AVX2 inline void store8(__m256 value, float* to) { _mm256_storeu_ps(to, value); }
LLMK_AVX2 inline void store8(__m256 value, half_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
LLMK_AVX2 inline void store8(__m256 value, bfloat_t* to) {  // rounds like to_bfloat
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

template <class In, class Out>
LLMK_AVX2 void add_avx2(const void* const* parts, int num_parts, void* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 total = load8(static_cast<const In*>(parts[0]) + i);
    for (int r = 1; r < num_parts; ++r) total = _mm256_add_ps(total, load8(static_cast<const In*>(parts[r]) + i));
    store8(total, static_cast<Out*>(out) + i);
  }
  add_scalar<In, Out>(parts, num_parts, out, i, count);
}
#endif

template <class In, class Out>
void add(const void* const* parts, int num_parts, void* out, int64_t count) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (has_avx2) return add_avx2<In, Out>(parts, num_parts, out, count);
#endif
  add_scalar<In, Out>(parts, num_parts, out, 0, count);
}

}  // namespace

void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count) {
  const auto run = [&](auto function) { function(parts, num_parts, out, count); };
  if (dtype == DType::kFloat16) return run(add<half_t, half_t>);
  if (dtype == DType::kBFloat16) return run(add<bfloat_t, bfloat_t>);
  if (out_dtype == DType::kFloat16) return run(add<float, half_t>);
  if (out_dtype == DType::kBFloat16) return run(add<float, bfloat_t>);
  run(add<float, float>);
}

}  // namespace llmk
