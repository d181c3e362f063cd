// What this machine can do at most: loops that only multiply-add, or only read. bench_kernels.py divides by them.
#pragma once
#include "../common/types.h"
#include "dot.h"

namespace llmk {

struct CeilingLoops {
  int64_t (*fma)(int64_t steps);       // float32; returns the floating-point operations done
  int64_t (*dot_bf16)(int64_t steps);  // products of bfloat16 pairs as ops/dot.h does them
  int64_t (*dot_int8)(int64_t steps);  // products of four bytes as the int8 and int4 linear layers do them
  float (*read)(const float* data, int64_t size);
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
  constexpr int kChains = kCeilingChains;
  alignas(64) T ones[64];
  for (T& one : ones) from_float(1.0f, &one);
  typename D::Operand x = D::get(ones), w = D::get(ones + kLanes);
  Vec total[kChains];
  for (Vec& chain : total) chain = zero();
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < kChains; ++c) total[c] = D::step(x, w, total[c]);
  }
  float result = 0;
  for (const Vec& chain : total) result += sum(chain);
  volatile float sink = result;
  static_cast<void>(sink);
  return steps * kChains * D::kStep * 2;
}

static int64_t ceiling_fma(int64_t steps) { return run_steps<float>(steps); }
static int64_t ceiling_dot_bf16(int64_t steps) { return run_steps<bfloat_t>(steps); }

static int64_t ceiling_dot_int8(int64_t steps) {
  constexpr int kIntLanes = 16;
  alignas(64) int32_t numbers[kIntLanes] = {};
  const Quads weights = quads(load_ints(numbers));
  const BroadcastQuad x = broadcast_quad(reinterpret_cast<const int8_t*>(numbers));
  Ints total[kCeilingChains];
  for (int c = 0; c < kCeilingChains; ++c) total[c] = broadcast_int(c);
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < kCeilingChains; ++c) total[c] = dot_quads(total[c], weights, x);
  }
  for (int c = 1; c < kCeilingChains; ++c) total[0] = add(total[0], total[c]);
  store_ints(numbers, total[0]);
  volatile int32_t sink = numbers[0];
  static_cast<void>(sink);
  return steps * kCeilingChains * kIntLanes * 4 * 2;
}

// Several places at once, as a weight matrix is read.
static float ceiling_read(const float* data, int64_t size) {
  constexpr int kStreams = 6;
  const int64_t stream = size / kStreams / kLanes * kLanes;
  Vec total[kStreams];
  for (int j = 0; j < kStreams; ++j) total[j] = zero();
  for (int64_t i = 0; i < stream; i += kLanes) {
    for (int j = 0; j < kStreams; ++j) total[j] = add(total[j], load(data + j * stream + i));
  }
  float result = 0;
  for (int j = 0; j < kStreams; ++j) result += sum(total[j]);
  return result;
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
