// What comes before the attention of a token: its rotated query heads, and its key and value into the cache.
#pragma once
#include <cmath>

#include "paged_panels.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

LLMK_INLINE void load_floats(DType dtype, const void* data, int64_t first, int64_t n, float* out) {
  for (int64_t d = 0; d < n; d += kLanes) {
    if (dtype == DType::kFloat32) store_n(out + d, load_n(static_cast<const float*>(data) + first + d, n - d), n - d);
    if (dtype == DType::kFloat16) store_n(out + d, load_n(static_cast<const half_t*>(data) + first + d, n - d), n - d);
    if (dtype == DType::kBFloat16) {
      store_n(out + d, load_n(static_cast<const bfloat_t*>(data) + first + d, n - d), n - d);
    }
  }
}

LLMK_INLINE void store_floats(DType dtype, const float* x, int64_t n, void* data) {
  for (int64_t d = 0; d < n; d += kLanes) {
    const Vec v = load_n(x + d, n - d);
    if (dtype == DType::kFloat32) store_n(static_cast<float*>(data) + d, v, n - d);
    if (dtype == DType::kFloat16) store_n(static_cast<half_t*>(data) + d, v, n - d);
    if (dtype == DType::kBFloat16) store_n(static_cast<bfloat_t*>(data) + d, v, n - d);
  }
}

// RMSNorm of one head in place: as rms_norm.h, not rounded.
static inline void norm_head(const RotaryAttentionArgs& args, const void* gamma, float* x) {
  Vec squares = zero();
  for (int64_t d = 0; d < args.dim; d += kLanes) squares = fma(load_n(x + d, args.dim - d), load_n(x + d, args.dim - d), squares);
  const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(args.dim) + args.epsilon));
  float weights[kLanes];
  for (int64_t d = 0; d < args.dim; d += kLanes) {
    const int64_t n = args.dim - d;
    load_floats(args.dtype, gamma, d, smaller(n, kLanes), weights);
    store_n(x + d, mul(mul(load_n(x + d, n), scale), load_n(weights, n)), n);
  }
}

// Head `head` of the token's row of qkv as floats; unless it is ready, normed where there are gammas, and rotated: each product and sum
// rounds on its own (see rotary.h).
static inline void load_rotated(const RotaryAttentionArgs& args, int64_t token, int64_t head, float* out) {
  if (args.ready) return load_floats(args.dtype, args.qkv, (token * args.heads + head) * args.dim, args.dim, out);
  const int64_t half = args.dim / 2, first = (token * (args.heads + 2 * args.kv_heads) + head) * args.dim;
  const float* cos = args.cos + args.positions[token] * args.dim;
  const float* sin = args.sin + args.positions[token] * args.dim;
  load_floats(args.dtype, args.qkv, first, args.dim, out);
  if (args.query_gamma != nullptr) norm_head(args, head < args.heads ? args.query_gamma : args.key_gamma, out);
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t n = half - d;
    const Vec low = load_n(out + d, n), high = load_n(out + half + d, n);
    store_n(out + d, sub(mul(low, load_n(cos + d, n)), mul(high, load_n(sin + d, n))), n);
    store_n(out + half + d, add(mul(high, load_n(cos + half + d, n)), mul(low, load_n(sin + half + d, n))), n);
  }
}

// Whole numbers to bytes.
LLMK_INLINE void store_int8(char* p, Vec v, int64_t n) {
#ifdef LLMK_VEC_AVX512
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v.v)));
#else
  float lanes[kLanes];
  int8_t bytes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<int8_t>(lanes[i]);
  std::memcpy(p, bytes, static_cast<size_t>(smaller(kLanes, n)));
#endif
}

// Symmetric int8: scale = max|x| / 127, values rounded to nearest even.
static inline void quantize_head(const float* x, int64_t dim, char* values, char* scale) {
  Vec top = zero();
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec v = load_n(x + d, dim - d);
    top = maximum(top, maximum(v, sub(zero(), v)));
  }
  const float most = largest(top), unit = most / 127.0f;
  const Vec inverse = broadcast(most > 0 ? 127.0f / most : 0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec scaled = mul(load_n(x + d, dim - d), inverse);
    store_int8(values + d, round_nearest(maximum(broadcast(-127.0f), minimum(broadcast(127.0f), scaled))), dim - d);
  }
  std::memcpy(scale, &unit, sizeof(unit));
}

// Spreads a token's row over the units it has a part in (rotary_attention.h).
static inline void scatter_key(const RotaryAttentionArgs& args, const char* row, int64_t index, char* chunk) {
  char* out = chunk + key_element(args, index, 0) * cache_element_bytes(args);
  const int64_t units = args.dim * cache_element_bytes(args) / 4;
  const uint32_t bias = args.int8_cache ? kKeyBias : 0;
  for (int64_t u = 0; u < units; ++u) {
    uint32_t unit;
    std::memcpy(&unit, row + u * 4, 4);
    unit ^= bias;
    std::memcpy(out + u * kGroupKeys * 4, &unit, 4);
  }
}
template <class C>
static inline void scatter_value(const RotaryAttentionArgs& args, const char* row, int64_t index, char* chunk) {
  C* out = reinterpret_cast<C*>(chunk) + value_element(args, index, 0);
  const C* in = reinterpret_cast<const C*>(row);
  for (int64_t d = 0; d < args.dim; ++d) out[d * static_cast<int64_t>(4 / sizeof(C))] = in[d];
}

// A key or value into row `index` of its chunk. `buffer`: dim floats.
static inline void write_head(const RotaryAttentionArgs& args, const float* x, char* chunk, int64_t index, bool is_key,
                              float* buffer) {
  const int64_t row_bytes = args.dim * cache_element_bytes(args);
  const bool units = cache_has_units(args);
  char* row = units ? reinterpret_cast<char*>(buffer) : chunk + index * row_bytes;
  if (args.int8_cache) {
    quantize_head(x, args.dim, row, chunk + args.block_size * row_bytes + index * 4);
  } else {
    store_floats(args.dtype, x, args.dim, row);
  }
  if (!units) return;
  if (is_key) return scatter_key(args, row, index, chunk);
  if (args.int8_cache) return scatter_value<int8_t>(args, row, index, chunk);
  scatter_value<uint16_t>(args, row, index, chunk);
}

// Floats a buffer for write_token has.
static inline int64_t write_buffer_floats(const RotaryAttentionArgs& args) { return 2 * (args.dim + kLanes); }

// Keys and values of kv heads [head, head + heads) of a token.
static inline void write_token(const RotaryAttentionArgs& args, int64_t token, int64_t head, int64_t heads,
                               float* buffer) {
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const int64_t index = slot % args.block_size, chunk = chunk_bytes(args);
  const int64_t row = token * (args.heads + 2 * args.kv_heads) + args.heads + args.kv_heads;
  float* second = buffer + args.dim + kLanes;
  for (int64_t h = head; h < head + heads; ++h) {
    const int64_t offset = (slot / args.block_size * args.kv_heads + h) * chunk;
    load_rotated(args, token, args.heads + h, buffer);
    write_head(args, buffer, static_cast<char*>(args.key_cache) + offset, index, true, second);
    load_floats(args.dtype, args.qkv, (row + h) * args.dim, args.dim, buffer);
    write_head(args, buffer, static_cast<char*>(args.value_cache) + offset, index, false, second);
  }
}

static inline void write_all_tokens(const RotaryAttentionArgs& args) {
  const int64_t per_task = larger(kGroupKeys, 8192 / (2 * args.kv_heads * args.dim));
  parallel_for(ceil_div(args.tokens, per_task), [&](int64_t task) {
    float* buffer = static_cast<float*>(thread_scratch(kScratchTile, write_buffer_floats(args) * 4));
    const int64_t end = smaller((task + 1) * per_task, args.tokens);
    for (int64_t token = task * per_task; token < end; ++token) write_token(args, token, 0, args.kv_heads, buffer);
  });
}

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
