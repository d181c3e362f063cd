// The loops that measure the machine's limits. Each loop only multiplies and adds, or only reads memory.
//
// tools/kernel_build.py compiles this file once per instruction set. It sets LLMK_PART_FILE, so that
// agent/kernels/arch/part.h includes this file instead of a part of the kernels. main.cc picks the loops of the
// instruction set in use.
#pragma once
#include "../../../agent/kernels/common/types.h"

namespace llmk {

constexpr int kReadLoops = 3;

struct CeilingLoops {
  // Each loop repeats one step `steps` times and returns the number of operations; a multiply-add counts as two.
  int64_t (*fma)(int64_t steps);       // float32 multiply-adds
  int64_t (*dot_bf16)(int64_t steps);  // products of bfloat16 pairs, as ops/dot.h computes them
  int64_t (*dot_int8)(int64_t steps);  // products of groups of four int8, as ops/linear.h computes them
  // Each loop reads `bytes` (a multiple of 1024) from one, two or four places simultaneously and returns a sum of the
  // data. If `next` is not null, it also prefetches `bytes` bytes from `next` into the second-level cache.
  int32_t (*read[kReadLoops])(const void* data, int64_t bytes, const void* next);
};

}  // namespace llmk

#ifdef LLMK_ARCH
#include "../../../agent/kernels/arch/vec.h"
#include "../../../agent/kernels/ops/dot.h"
#ifdef LLMK_AMX
#include "../../../agent/kernels/ops/amx_tiles.h"
#endif
#ifdef LLMK_NEON_I8MM
#include "../../../agent/kernels/ops/linear_tiles.h"
#endif

namespace llmk::LLMK_ARCH {

// Number of independent sums to which a loop adds in rotation. With fewer sums, an addition would wait for the previous
// addition to the same sum. With more, sums and operands would not fit into the registers. kByteChains is the number
// for products of bytes. It is lower on the portable set, because these products need more temporary registers there.
#if defined(LLMK_VEC_AVX512)
constexpr int kChains = 12, kByteChains = 12;
#elif defined(LLMK_VNNI)
constexpr int kChains = 6, kByteChains = 6;
#elif defined(LLMK_VEC_AVX2)
constexpr int kChains = 6;
#else
constexpr int kChains = 6, kByteChains = 2;
#endif

// Makes the compiler assume that a value may have changed, without generating an instruction. Without this, the
// compiler would see that the operands are constant, and would move the products out of the loop.
#if defined(LLMK_VEC_AVX512)
LLMK_INLINE void hide(__m512& a) { __asm__ volatile("" : "+v"(a)); }
LLMK_INLINE void hide(__m512i& a) { __asm__ volatile("" : "+v"(a)); }
LLMK_INLINE void hide(Vec& a) { hide(a.v); }
LLMK_INLINE void hide(Ints& a) { hide(a.v); }
#ifdef LLMK_BF16_DOT
LLMK_INLINE void hide(__m512bh& a) { __asm__ volatile("" : "+v"(a)); }
#endif
#ifndef LLMK_VNNI
LLMK_INLINE void hide(BroadcastQuad& a) {
  hide(a.even);
  hide(a.odd);
}
#endif
#elif defined(LLMK_VEC_AVX2)
LLMK_INLINE void hide(Vec& a) { __asm__ volatile("" : "+x"(a.low), "+x"(a.high)); }
LLMK_INLINE void hide(Ints& a) { __asm__ volatile("" : "+x"(a.low), "+x"(a.high)); }
#ifdef LLMK_VNNI
LLMK_INLINE void hide(BroadcastQuad& a) { __asm__ volatile("" : "+x"(a)); }
#endif
#else
// On other instruction sets, a vector type consists of several registers. So the empty assembler code names the vector
// as memory ("m") and not as a register.
template <class T>
LLMK_INLINE void hide(T& a) {
  __asm__ volatile("" : "+m"(a));
}
#endif
template <class T>
LLMK_INLINE void hide_memory(T& a) {
  __asm__ volatile("" : "+m"(a));
}

// Writes the total of all sums to memory, so that the compiler cannot remove a product. It is not inlined, so that the
// function of a measured loop contains only this loop.
static __attribute__((noinline)) void keep(const Vec* totals, int count) {
  float result = 0;
  for (int i = 0; i < count; ++i) result += sum(totals[i]);
  volatile float sink = result;
  static_cast<void>(sink);
}
static __attribute__((noinline)) void keep(const Ints* totals, int count) {
  uint32_t result = 0, lanes[kLanes];
  for (int i = 0; i < count; ++i) {
    store_ints(lanes, totals[i]);
    for (const uint32_t lane : lanes) result += lane;
  }
  volatile uint32_t sink = result;
  static_cast<void>(sink);
}

template <class T>
LLMK_INLINE int64_t run_steps(int64_t steps) {
  using D = Dot<T, T>;
  alignas(64) T ones[64];
  for (T& one : ones) from_float(1.0f, &one);
  hide_memory(ones);
  typename D::Operand x = D::get(ones), w = D::get(ones + kLanes);
  Vec total[kChains];
  for (Vec& chain : total) {
    chain = zero();
    hide(chain);
  }
  for (int64_t i = 0; i < steps; ++i) {
    LLMK_UNROLL
    for (int c = 0; c < kChains; ++c) {
      hide(x);
      total[c] = D::step(x, w, total[c]);
    }
  }
  keep(total, kChains);
  return steps * kChains * D::kStep * 2;
}

static int64_t ceiling_fma(int64_t steps) { return run_steps<float>(steps); }

#ifdef LLMK_AMX
// Runs `steps` steps of four AMX tile products and returns the number of operations. The four products are independent,
// so no product waits for another one. The instructions are volatile, so the compiler cannot move them out of the loop.
template <class Multiply>
LLMK_INLINE int64_t run_tiles(int64_t steps, const Multiply& multiply) {
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
#ifdef LLMK_NEON_I8MM
// The matrix products of int8 on Arm (I8MM): each step adds kMatrixChains products of two columns and two rows, with a
// depth of 8 bytes.
constexpr int kMatrixChains = 12;

template <class Products>
LLMK_INLINE int64_t run_matrix_products(int64_t steps) {
  int32x4_t ones = vdupq_n_s32(0x01010101);
  typename Products::Sums total[kMatrixChains];
  for (auto& sums : total) sums = Products::from(vdupq_n_s32(0));
  for (int64_t i = 0; i < steps; ++i) {
    LLMK_UNROLL
    for (int c = 0; c < kMatrixChains; ++c) {
      __asm__ volatile("" : "+w"(ones));
      total[c] = Products::add(total[c], ones, ones);
    }
  }
  Ints sums;
  for (int c = 0; c < kMatrixChains; c += 4) {
    std::memcpy(&sums, &total[c], sizeof(sums));
    keep(&sums, 1);
  }
  return steps * kMatrixChains * 4 * static_cast<int64_t>(8 / sizeof(typename Products::X)) * 2;
}
#endif

#ifdef LLMK_NEON_BF16
static int64_t ceiling_dot_bf16(int64_t steps) { return run_matrix_products<BFloatProducts>(steps); }
#else
static int64_t ceiling_dot_bf16(int64_t steps) { return run_steps<bfloat_t>(steps); }
#endif

#ifdef LLMK_NEON_I8MM
static int64_t ceiling_dot_int8(int64_t steps) { return run_matrix_products<ByteProducts>(steps); }
#elif defined(LLMK_VEC_AVX2) && !defined(LLMK_VNNI)
// Multiplies pairs of 16-bit numbers, as the linear layers do. Each sum is a variable, because GCC 12 would keep the
// sums of an array in memory.
static int64_t ceiling_dot_int8(int64_t steps) {
  alignas(64) int16_t ones[32];
  for (int16_t& one : ones) one = 1;
  hide_memory(ones);
  const Ints w = load_ints(ones), none = broadcast_int(0);
  Ints a = none, b = none, c = none, d = none, e = none, f = none;
  for (int64_t i = 0; i < steps; ++i) {
    hide_memory(ones);
    add_product(&a, w, ones);
    add_product(&b, w, ones);
    add_product(&c, w, ones);
    add_product(&d, w, ones);
    add_product(&e, w, ones);
    add_product(&f, w, ones);
  }
  Ints total[] = {a, b, c, d, e, f};
  keep(total, 6);
  return steps * 6 * 32 * 2;
}
#else
static int64_t ceiling_dot_int8(int64_t steps) {
  alignas(64) int8_t ones[64];
  std::memset(ones, 1, sizeof(ones));
  hide_memory(ones);
  const Quads w = quads(load_ints(ones));
  BroadcastQuad x = broadcast_quad(ones);
  Ints total[kByteChains];
  for (Ints& chain : total) {
    chain = broadcast_int(0);
    hide(chain);
  }
  for (int64_t i = 0; i < steps; ++i) {
    LLMK_UNROLL
    for (int c = 0; c < kByteChains; ++c) {
      hide(x);
      total[c] = dot_quads(total[c], w, x);
    }
  }
  keep(total, kByteChains);
  return steps * kByteChains * 64 * 2;
}
#endif
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

extern const CeilingLoops kCeilingLoops;
const CeilingLoops kCeilingLoops = {
    ceiling_fma, ceiling_dot_bf16, ceiling_dot_int8, {ceiling_read<1>, ceiling_read<2>, ceiling_read<4>}};

}  // namespace llmk::LLMK_ARCH
#endif
