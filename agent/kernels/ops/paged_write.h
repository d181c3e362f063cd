// Prepares the attention of a token: rotates its query heads, and writes its key and value into the cache.
#pragma once
#include <cmath>

#include "paged_panels.h"
#include "rotary.h"

namespace llmk::LLMK_ARCH::paged {

template <class T>
LLMK_INLINE void load_floats(const T* from, int64_t n, float* out) {
  for (int64_t d = 0; d < n; d += kLanes) store_part(out + d, load_part(from + d, n - d), n - d);
}
LLMK_INLINE void load_floats(DType dtype, const void* data, int64_t first, int64_t n, float* out) {
  if (dtype == DType::kFloat32) load_floats(static_cast<const float*>(data) + first, n, out);
  if (dtype == DType::kFloat16) load_floats(static_cast<const half_t*>(data) + first, n, out);
  if (dtype == DType::kBFloat16) load_floats(static_cast<const bfloat_t*>(data) + first, n, out);
}

template <class T>
LLMK_INLINE void store_floats(const float* x, int64_t n, T* out) {
  for (int64_t d = 0; d < n; d += kLanes) store_part(out + d, load_part(x + d, n - d), n - d);
}
LLMK_INLINE void store_floats(DType dtype, const float* x, int64_t n, void* data) {
  if (dtype == DType::kFloat32) store_floats(x, n, static_cast<float*>(data));
  if (dtype == DType::kFloat16) store_floats(x, n, static_cast<half_t*>(data));
  if (dtype == DType::kBFloat16) store_floats(x, n, static_cast<bfloat_t*>(data));
}

// Applies RMSNorm to one head in place. Unlike rms_norm.h, does not round the result.
static inline void norm_head(const RotaryAttentionArgs& args, const void* gamma, float* x) {
  Vec squares = zero();
  for (int64_t d = 0; d < args.dim; d += kLanes) {
    squares = fma(load_part(x + d, args.dim - d), load_part(x + d, args.dim - d), squares);
  }
  const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(args.dim) + args.epsilon));
  float weights[kLanes];
  for (int64_t d = 0; d < args.dim; d += kLanes) {
    const int64_t n = args.dim - d;
    load_floats(args.gamma_dtype, gamma, d, smaller(n, kLanes), weights);
    store_part(x + d, mul(mul(load_part(x + d, n), scale), load_part(weights, n)), n);
  }
}

// Number of tokens between the token that is processed and the token whose row is prefetched.
constexpr int64_t kLoadAhead = 8;

// Prefetches head `head` of a token's row of qkv. The rows are too far apart for the hardware prefetchers.
LLMK_INLINE void prefetch_head(const RotaryAttentionArgs& args, int64_t token, int64_t head) {
  const int64_t width = args.ready ? args.heads : args.heads + 2 * args.kv_heads,
                bytes = args.dim * size_of(args.dtype);
  const char* from = static_cast<const char*>(args.qkv) + (token * width + head) * bytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Loads head `head` of a token's row of qkv as floats. If args.ready is false, first applies the norm (if there are
// gammas) and then the rotation.
static inline void load_rotated(const RotaryAttentionArgs& args, int64_t token, int64_t head, float* out) {
  if (args.ready) return load_floats(args.dtype, args.qkv, (token * args.heads + head) * args.dim, args.dim, out);
  const int64_t first = (token * (args.heads + 2 * args.kv_heads) + head) * args.dim;
  const float* cos = args.cos + args.positions[token] * args.dim;
  const float* sin = args.sin + args.positions[token] * args.dim;
  if (args.query_gamma != nullptr) {
    load_floats(args.dtype, args.qkv, first, args.dim, out);
    norm_head(args, head < args.heads ? args.query_gamma : args.key_gamma, out);
    return rotate_half_head(out, out, cos, sin, args.dim);
  }
  with_element_type(args.dtype, [&](auto type) {
    rotate_half_head(static_cast<const decltype(type)*>(args.qkv) + first, out, cos, sin, args.dim);
  });
}

// Rounds the numbers of `v` to int8 and stores the first `n` of them. Flips the bits of each byte that are set in
// `bias`.
LLMK_INLINE void store_int8(char* p, Vec v, int64_t n, uint8_t bias) {
#ifdef LLMK_VEC_AVX512
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v.v));
  const __m128i flipped = _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(bias)));
  if (n >= kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), flipped);
  _mm_mask_storeu_epi8(p, first_lanes(n), flipped);
#elif defined(LLMK_VEC_AVX2)
  int8_t bytes[kLanes];
  store_signed_bytes(bytes, to_ints(v));
  for (int8_t& byte : bytes) byte = static_cast<int8_t>(byte ^ bias);
  std::memcpy(p, bytes, static_cast<size_t>(smaller(kLanes, n)));
#else
  float lanes[kLanes];
  int8_t bytes[kLanes];
  store(lanes, round_nearest(v));
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<int8_t>(static_cast<int8_t>(lanes[i]) ^ bias);
  std::memcpy(p, bytes, static_cast<size_t>(smaller(kLanes, n)));
#endif
}

// Quantises a head to symmetric int8: scale = max|x| / 127, rounded to nearest even. Stores each byte XOR `bias`. (A
// bias of 0x80 adds 128, so that the stored byte is unsigned.)
static inline void quantize_head(const float* x, int64_t dim, uint8_t bias, char* values, char* scale) {
  Vec top = zero();
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec v = load_part(x + d, dim - d);
    top = maximum(top, maximum(v, sub(zero(), v)));
  }
  const float most = largest(top), unit = most / 127.0f;
  const Vec inverse = broadcast(most > 0 ? 127.0f / most : 0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec scaled = mul(load_part(x + d, dim - d), inverse);
    store_int8(values + d, maximum(broadcast(-127.0f), minimum(broadcast(127.0f), scaled)), dim - d, bias);
  }
  std::memcpy(scale, &unit, sizeof(unit));
}

// Writes the key of one token to a cache of 4-byte units. In this layout, the units of 16 tokens are interleaved, so
// the units of one key are not adjacent (rotary_attention.h).
static inline void scatter_key(const RotaryAttentionArgs& args, const char* row, int64_t index, char* chunk) {
  char* out = chunk + key_element(args, index, 0) * cache_element_bytes(args);
  const int64_t units = args.dim * cache_element_bytes(args) / 4;
  for (int64_t u = 0; u < units; ++u) std::memcpy(out + u * kGroupKeys * 4, row + u * 4, 4);
}
// Writes the value of one token to a cache of 4-byte units. Each element of the value belongs to a different unit.
template <class C>
static inline void scatter_value(const RotaryAttentionArgs& args, const char* row, int64_t index, char* chunk) {
  C* out = reinterpret_cast<C*>(chunk) + value_element(args, index, 0);
  const C* in = reinterpret_cast<const C*>(row);
#ifdef LLMK_VEC_AVX512
  // Each int8 element of a value is one byte of a 4-byte unit: byte number `index` % 4. Writes the bytes of 16 units at
  // a time. In this layout, dim is a multiple of 16.
  if constexpr (sizeof(C) == 1) {
    const int64_t byte = index % 4;
    for (int64_t d = 0; d < args.dim; d += kLanes) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + d)));
      const __m512i moved = _mm512_sll_epi32(bytes, _mm_cvtsi64_si128(8 * byte));
      _mm512_mask_storeu_epi8(out + 4 * d - byte, __mmask64{0x1111111111111111} << byte, moved);
    }
    return;
  }
#endif
  for (int64_t d = 0; d < args.dim; ++d) out[d * static_cast<int64_t>(4 / sizeof(C))] = in[d];
}

// Converts a key or value to the type of the cache. For int8, also stores its scale.
static inline void narrow_head(const RotaryAttentionArgs& args, const float* x, bool is_key, char* row, char* scale) {
  if (!args.int8_cache) return store_floats(args.dtype, x, args.dim, row);
  quantize_head(x, args.dim, is_key && cache_has_units(args) ? kKeyBias & 0xFF : 0, row, scale);
}

// Loads head `head` of a token's keys or values as floats.
static inline void load_head(const RotaryAttentionArgs& args, int64_t token, int64_t head, bool is_key, float* out) {
  if (is_key) return load_rotated(args, token, args.heads + head, out);
  const int64_t width = args.heads + 2 * args.kv_heads;
  load_floats(args.dtype, args.qkv, (token * width + args.heads + args.kv_heads + head) * args.dim, args.dim, out);
}

// Memory for writing to the cache: one head as floats, and some rows in the type of the cache.
struct WriteBuffer {
  float* head;  // [dim]
  char* rows;   // rows of the cache: [kGroupKeys][dim] in the type of the cache
};
static inline int64_t write_buffer_floats(const RotaryAttentionArgs& args) {
  return args.dim + kLanes + kGroupKeys * args.dim;
}
static inline WriteBuffer write_buffer(const RotaryAttentionArgs& args, float* memory) {
  return {memory, reinterpret_cast<char*>(memory + args.dim + kLanes)};
}

// Writes the key or value of a token, for one head, into row `index` of a chunk of the cache.
static inline void write_head(const RotaryAttentionArgs& args, int64_t token, int64_t head, bool is_key, int64_t index,
                              const WriteBuffer& buffer, char* chunk) {
  const int64_t row_bytes = args.dim * cache_element_bytes(args);
  const bool units = cache_has_units(args);
  char* row = units ? buffer.rows : chunk + index * row_bytes;
  load_head(args, token, head, is_key, buffer.head);
  narrow_head(args, buffer.head, is_key, row, chunk + args.block_size * row_bytes + index * 4);
  if (!units) return;
  if (is_key) return scatter_key(args, row, index, chunk);
  if (args.int8_cache) return scatter_value<int8_t>(args, row, index, chunk);
  scatter_value<uint16_t>(args, row, index, chunk);
}

// Packs the keys of 16 tokens into `out` [unit][kGroupKeys].
static inline void place_key_group(const char* rows, int64_t row_bytes, Unit* out) {
  const int64_t units = row_bytes / 4;
  for (int64_t u = 0; u < units; u += kLanes) {
    Vec square[kLanes];
    LLMK_UNROLL
    for (int j = 0; j < kLanes; ++j) square[j] = load(reinterpret_cast<const float*>(rows + j * row_bytes) + u);
    store_transposed(square, out + u * kGroupKeys, kGroupKeys);
  }
}

// Packs the values of 16 tokens into `out` [16 / kPer][dim]. A unit of 4 bytes has the same dim of kPer consecutive
// tokens.
template <class C>
static inline void place_value_group(const char* rows, int64_t dim, Unit* out) {
  constexpr int kPer = 4 / sizeof(C);
  const C* in = reinterpret_cast<const C*>(rows);
  for (int64_t key = 0; key < kGroupKeys; key += kPer, in += kPer * dim, out += dim) {
    for (int64_t d = 0; d < dim; ++d) {
      Unit unit = 0;
      LLMK_UNROLL
      for (int i = 0; i < kPer; ++i) unit |= Unit{in[i * dim + d]} << (32 / kPer * i);
      out[d] = unit;
    }
  }
}

// Returns true if the 16 tokens from `token` on fill a whole group of the cache, so that write_group() can write them
// together.
static inline bool fills_group(const RotaryAttentionArgs& args, int64_t token, int64_t end) {
  const int64_t slot = args.slots[token];
  if (!cache_has_units(args) || args.dim * cache_element_bytes(args) % (kLanes * 4) != 0) return false;
  if (slot < 0 || slot % kGroupKeys != 0 || token + kGroupKeys > end) return false;
  for (int64_t i = 1; i < kGroupKeys; ++i) {
    if (args.slots[token + i] != slot + i) return false;
  }
  return true;
}

// Writes the keys or the values of 16 consecutive tokens of one head as whole units of the cache.
static inline void write_group(const RotaryAttentionArgs& args, int64_t token, int64_t head, bool is_key, int64_t index,
                               const WriteBuffer& buffer, char* chunk) {
  const int64_t row_bytes = args.dim * cache_element_bytes(args);
  for (int64_t i = 0; i < kGroupKeys; ++i) {
    // A row of qkv has the keys of all heads, then the values of all heads.
    if (head + 1 < args.kv_heads) prefetch_head(args, token + i, args.heads + (is_key ? 0 : args.kv_heads) + head + 1);
    load_head(args, token + i, head, is_key, buffer.head);
    narrow_head(args, buffer.head, is_key, buffer.rows + i * row_bytes,
                chunk + args.block_size * row_bytes + (index + i) * 4);
  }
  Unit* out = reinterpret_cast<Unit*>(chunk + index * row_bytes);
  if (is_key) return place_key_group(buffer.rows, row_bytes, out);
  if (args.int8_cache) return place_value_group<uint8_t>(buffer.rows, args.dim, out);
  place_value_group<uint16_t>(buffer.rows, args.dim, out);
}

// Prefetches the cache lines that write_head() will write. In a cache of 4-byte units, a key is spread over many lines.
LLMK_INLINE void fetch_written(const RotaryAttentionArgs& args, bool is_key, int64_t index, char* chunk) {
  const int64_t element = cache_element_bytes(args);
  char* first = chunk + (is_key ? key_element(args, index, 0) : value_element(args, index, 0)) * element;
  const int64_t bytes = cache_has_units(args) ? args.dim * (is_key ? kGroupKeys : 4 / element) * element
                                              : args.dim * element;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i, 1, 3);
}

// Writes the keys and values of kv heads [head, head + heads) of tokens [token, end).
static inline void write_tokens(const RotaryAttentionArgs& args, int64_t token, int64_t end, int64_t head,
                                int64_t heads, const WriteBuffer& buffer) {
  void* const caches[] = {args.key_cache, args.value_cache};
  for (int64_t count = 1; token < end; token += count) {
    const int64_t slot = args.slots[token], index = slot % args.block_size;
    const bool whole = fills_group(args, token, end);
    count = whole ? kGroupKeys : 1;
    if (slot < 0) continue;
    for (int64_t h = head; h < head + heads; ++h) {
      for (void* cache : caches) {
        const bool is_key = cache == args.key_cache;
        char* chunk = static_cast<char*>(cache) + (slot / args.block_size * args.kv_heads + h) * chunk_bytes(args);
        if (!whole && h + 1 < head + heads) fetch_written(args, is_key, index, chunk + chunk_bytes(args));
        (whole ? write_group : write_head)(args, token, h, is_key, index, buffer, chunk);
      }
    }
  }
}

static inline void write_all_tokens(const RotaryAttentionArgs& args) {
  const int64_t per_task = larger(kGroupKeys, 8192 / (2 * args.kv_heads * args.dim) / kGroupKeys * kGroupKeys);
  parallel_for(ceil_div(args.tokens, per_task), [&](int64_t task) {
    float* memory = static_cast<float*>(thread_scratch(kScratchTile, write_buffer_floats(args) * 4));
    const int64_t first = task * per_task, end = smaller(first + per_task, args.tokens);
    write_tokens(args, first, end, 0, args.kv_heads, write_buffer(args, memory));
  });
}

}  // namespace llmk::LLMK_ARCH::paged
