// What this machine can do at most: loops that only multiply-add, or only read. Benchmarks divide by them.
#pragma once
#include "../common/types.h"
#include "dot.h"
#if defined(LLMK_ARCH) && defined(LLMK_AMX)
#include "amx_tiles.h"
#endif

namespace llmk {

// Best of short rounds within about `seconds` seconds, all threads of the pool together.
double measure_fma(double seconds);             // float32 multiply-adds, 10^9 operations/s (two a multiply-add)
double measure_dot_bf16(double seconds);        // products of bfloat16 pairs as ops/dot.h does them
double measure_dot_int8(double seconds);        // products of four bytes as ops/linear.h does them
double measure_read(const void* data, int64_t bytes);  // once over `bytes`, 10^9 bytes/s
// The upper quartile of rounds over 256 MB of its own, in huge pages where the system has them, read in the way that is
// the fastest here: at one place, or at several by turns.
double measure_read_bandwidth(double seconds);
// The same in pieces of 12 KB in any order, as the blocks of a sequence lie (16 keys of 12 heads of 64 in int8), and
// with the next piece fetched meanwhile where that is faster.
double measure_paged_read_bandwidth(double seconds);

constexpr int kReadLoops = 3;

struct CeilingLoops {
  int64_t (*fma)(int64_t steps);  // returns the operations done
  int64_t (*dot_bf16)(int64_t steps);
  int64_t (*dot_int8)(int64_t steps);
  // At one, two and four places at once. bytes: a multiple of 1024; next: as many, fetched into the second-level cache
  // meanwhile; may be null.
  int32_t (*read[kReadLoops])(const void* data, int64_t bytes, const void* next);
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

#ifdef LLMK_VEC_AVX512
constexpr int kCeilingChains = 12;
#else
constexpr int kCeilingChains = 6;
#endif

template <class T>
static inline int64_t run_steps(int64_t steps) {
  using D = Dot<T, T>;
  alignas(64) T ones[64];
  for (T& one : ones) from_float(1.0f, &one);
  typename D::Operand x = D::get(ones), w = D::get(ones + kLanes);
  Vec total[kCeilingChains];
  for (Vec& chain : total) chain = zero();
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < kCeilingChains; ++c) total[c] = D::step(x, w, total[c]);
  }
  float result = 0;
  for (const Vec& chain : total) result += sum(chain);
  volatile float sink = result;
  static_cast<void>(sink);
  return steps * kCeilingChains * D::kStep * 2;
}

static int64_t ceiling_fma(int64_t steps) { return run_steps<float>(steps); }

#ifdef LLMK_AMX
// Four products of tiles a step, which do not wait for each other.
template <class Multiply>
static inline int64_t run_tiles(int64_t steps, const Multiply& multiply) {
  alignas(64) uint8_t ones[kAmxRows * 64];
  std::memset(ones, 1, sizeof(ones));
  configure_tiles(kAmxRows, kAmxRows);
  load_tile<4>(ones, 64);
  load_tile<5>(ones, 64);
  load_tile<6>(ones, 64);
  load_tile<7>(ones, 64);
  for (int64_t i = 0; i < steps; ++i) multiply();
  release_tiles();
  return steps * 4 * kAmxRows * 64 * kLanes * 2;
}
static int64_t ceiling_dot_bf16(int64_t steps) {
  return run_tiles(steps, [] {
    multiply_bfloats<0, 4, 6>();
    multiply_bfloats<1, 4, 7>();
    multiply_bfloats<2, 5, 6>();
    multiply_bfloats<3, 5, 7>();
  }) / 2;
}
static int64_t ceiling_dot_int8(int64_t steps) {
  return run_tiles(steps, [] {
    multiply_bytes<0, 4, 6>();
    multiply_bytes<1, 4, 7>();
    multiply_bytes<2, 5, 6>();
    multiply_bytes<3, 5, 7>();
  });
}
#else
static int64_t ceiling_dot_bf16(int64_t steps) { return run_steps<bfloat_t>(steps); }

static int64_t ceiling_dot_int8(int64_t steps) {
  alignas(64) int8_t ones[64];
  std::memset(ones, 1, sizeof(ones));
  const Quads w = quads(load_ints(ones));
  const BroadcastQuad x = broadcast_quad(ones);
  Ints total[kCeilingChains];
  for (Ints& chain : total) chain = broadcast_int(0);
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < kCeilingChains; ++c) total[c] = dot_quads(total[c], w, x);
  }
  int32_t result[kLanes];
  for (int c = 1; c < kCeilingChains; ++c) total[0] = add(total[0], total[c]);
  store_ints(result, total[0]);
  volatile int32_t sink = result[0];
  static_cast<void>(sink);
  return steps * kCeilingChains * 64 * 2;
}

#endif

template <int kPlaces, bool kFetch>
static inline int32_t read_places(const char* from, int64_t bytes, const char* next) {
  const int64_t piece = bytes / kPlaces;
  Ints total[kPlaces];
  for (int j = 0; j < kPlaces; ++j) total[j] = broadcast_int(0);
  for (int64_t i = 0; i < piece; i += 128) {
    LLMK_UNROLL
    for (int j = 0; j < kPlaces; ++j) {
      if (kFetch) {
        __builtin_prefetch(next + j * piece + i, 0, 2);
        __builtin_prefetch(next + j * piece + i + 64, 0, 2);
      }
      total[j] = add(total[j], load_ints(from + j * piece + i));
      total[j] = add(total[j], load_ints(from + j * piece + i + 64));
    }
  }
  for (int j = 1; j < kPlaces; ++j) total[0] = add(total[0], total[j]);
  int32_t result[kLanes];
  store_ints(result, total[0]);
  return result[0];
}

template <int kPlaces>
static int32_t ceiling_read(const void* data, int64_t bytes, const void* next) {
  const char* from = static_cast<const char*>(data);
  if (next == nullptr) return read_places<kPlaces, false>(from, bytes, nullptr);
  return read_places<kPlaces, true>(from, bytes, static_cast<const char*>(next));
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
