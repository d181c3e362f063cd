// Linear layers with integer weights and int8 activations.
#pragma once
#include "linear_rows.h"
#ifdef LLMK_AMX
#include "linear_amx.h"
#endif
#if defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
#include "linear_expanded_avx2.h"
#include "linear_words_avx2.h"
#endif

namespace llmk::LLMK_ARCH {

// Sets the activations of the job to int8 rows. These are the rows that the caller has quantised. If there are none,
// this function quantises the rows.
static void rows_as_bytes(LinearJob* job) {
  const LinearArgs& args = job->args;
  if (args.quantized != nullptr) {
    job->rows = *args.quantized;
  } else {
    void* memory = thread_scratch(kScratchLinearRows, quantized_rows_bytes(args.weight, args.rows));
    job->rows = quantized_rows(args.weight, args.rows, memory);
    for_rows(args.rows, job->header.depth, [&](int64_t row) {
      const char* x = static_cast<const char*>(args.x) + row * args.x_stride * size_of(args.dtype);
      quantize_row(args.dtype, x, job->rows, row, args.weight);
    });
  }
  job->x = job->rows.values;
  job->x_stride = job->rows.stride;
}

#if defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
// Widens the int8 rows of the job to 16 bits, in the order in which ByteStep multiplies them: of each four depths, 0
// and 2 come before 1 and 3.
static void rows_as_words(LinearJob* job) {
  const int64_t stride = job->rows.stride;
  int16_t* to = static_cast<int16_t*>(thread_scratch(kScratchLinearWords, job->args.rows * stride * 2));
  for_rows(job->args.rows, stride, [&](int64_t row) {
    const int8_t* from = job->rows.values + row * stride;
    for (int64_t k = 0; k < stride; k += kLanes) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
      const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8), odd = _mm_srai_epi16(bytes, 8);
      __m128i* words = reinterpret_cast<__m128i*>(to + row * stride + k);
      _mm_storeu_si128(words, _mm_unpacklo_epi32(even, odd));
      _mm_storeu_si128(words + 1, _mm_unpackhi_epi32(even, odd));
    }
  });
  job->x = to;
}
#endif

static void run_bytes(LinearJob* job) {
  const bool nibbles = has_nibbles(job->header.format), grouped = job->header.group != 0 || nibbles;
  rows_as_bytes(job);
  grouped ? set_finish<Scaling::kRow>(job) : set_finish<Scaling::kIntegerBoth>(job);
#if defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
  if (nibbles && GroupedNibbles::fits(*job)) return run_panels<GroupedNibbles>(*job);
  if (!nibbles) rows_as_words(job);
  if (!nibbles && grouped && GroupedWords::fits(*job)) return run_panels<GroupedWords>(*job);
  if (!nibbles && !grouped && PlainWords::fits(*job)) return run_panels<PlainWords>(*job);
#endif
#ifdef LLMK_AMX
  if (nibbles && GroupedTiles<NibbleStep>::fits(*job)) return run_tiles<GroupedTiles<NibbleStep>>(*job);
  if (!nibbles && grouped && GroupedTiles<ByteStep>::fits(*job)) return run_tiles<GroupedTiles<ByteStep>>(*job);
#endif
  if (nibbles) return run_panels<GroupedForm<NibbleStep>>(*job);
  if (grouped) return run_panels<GroupedForm<ByteStep>>(*job);
#ifdef LLMK_AMX
  if (job->args.rows >= kLeastTiledRows && fits_tiles(*job)) return run_tiles<TiledForm<ByteTiles16>>(*job);
#endif
  run_panels<PlainForm<ByteStep>>(*job);
}

static void linear_bytes(const LinearArgs& args) { run_linear(args, run_bytes); }

}  // namespace llmk::LLMK_ARCH
