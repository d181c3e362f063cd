// RotaryAttention: rotary embedding, the write into the paged cache, and causal attention over the cache. One call
// handles all sequences of a step: prefill, chunks and decode.
//
// Inputs. qkv is [tokens, (heads + 2 * kv_heads) * dim], out is [tokens, heads * dim]. Sequence s owns query_lens[s]
// rows from query_starts[s]. They are the last of its context_lens[s] positions. A row sees the keys of positions 0 to
// its own. Query head h uses kv head h / (heads / kv_heads).
//
// Cache. It is [num_blocks][kv_heads] chunks. Position j of sequence s is row j % block_size of block block_tables[s *
// table_width + j / block_size]. The keys and values of the step are first written to `slots` and then read from the
// cache. A float chunk has block_size * dim values of the type of qkv. An int8 chunk has block_size * dim int8, then
// [block_size] float32 scales: value = scale * int8, with scale = max|x| / 127 of the token and head. If block_size and
// dim are multiples of 16, bfloat16 and int8 have the layout of the products. It has units of 4 bytes in groups of 16
// tokens. Keys of int8 are unsigned bytes with 128 added.
//     keys    [block_size / 16][dim / per][16 tokens][per dims]        per = 2 bfloat16 or 4 int8
//     values  [block_size / 16][16 / per][dim][per tokens]
// Other shapes, float32 and float16 are [block_size][dim].
//
// Options. With gammas, every query and key head passes RMSNorm before the rotation, in float32 (Qwen3). With a window,
// a row sees only the last `window` keys, including its own (Mistral). With first_keys, a token sees no key before
// position first_keys[token]. With `ready`, only the attention runs, for the native primitives: qkv is the rotated
// query [tokens, heads * dim], and keys and values are already stored. The heads of a token are then adjacent: the
// cache is [num_blocks][block_size][kv_heads][dim]. Without block_tables, keys and values are matrix rows
// [kv_heads][dim], and the rows of sequence s begin at key_starts[s].
//
// Checks are in rotary_attention_checks.cc, the split into tasks in paged_attention.h, the arithmetic and its order in
// paged_rows.h.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct RotaryAttentionArgs {
  const void* qkv;
  void* out;
  void* key_cache;
  void* value_cache;
  const float* cos;  // [table_rows, dim]
  const float* sin;
  const int32_t* positions;     // [tokens], rows of cos and sin
  const int32_t* slots;         // [tokens]; a negative slot: do not write the token's key and value
  const int32_t* block_tables;  // [num_seqs, table_width]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* query_lens;    // [num_seqs]
  const int64_t* query_starts;  // [num_seqs], filled by the checks
  const void* query_gamma;      // [dim] of dtype, or null: no norm
  const void* key_gamma;
  int64_t tokens, num_seqs, table_width, table_rows;
  int64_t num_blocks, block_size, heads, kv_heads, dim;
  int64_t window;     // maximum number of keys that a row sees; 0: all
  float epsilon;      // epsilon of the norm
  float scale;        // factor of the scores
  DType dtype;        // type of qkv and out
  bool int8_cache;    // otherwise the cache holds dtype
  // filled by the checks; true: a sequence may read a block that another sequence writes in this step
  bool write_first;
  bool ready;
  // used only if `ready`; true: the blocks of the cache have this operator's layout; false: that of the primitives
  bool laid_out;
  const int64_t* key_starts;  // only with `ready`, [num_seqs]
  const int64_t* first_keys;  // only with `ready`, [tokens]; null: 0
};

// Return the limits of the positions [first_key, visible_keys) whose keys a row sees. Row token * group + head of a
// sequence is a query; a group is the query heads of a kv head.
static inline int64_t visible_keys(const RotaryAttentionArgs& args, int64_t seq, int64_t row) {
  return args.context_lens[seq] - args.query_lens[seq] + row / (args.heads / args.kv_heads) + 1;
}
static inline int64_t first_key(const RotaryAttentionArgs& args, int64_t seq, int64_t row) {
  if (args.first_keys != nullptr) return args.first_keys[args.query_starts[seq] + row / (args.heads / args.kv_heads)];
  return args.window == 0 ? 0 : larger(0, visible_keys(args, seq, row) - args.window);
}

// Returns true if keys and values are matrix rows, as in the native primitives, instead of the chunks of this
// operator's cache.
static inline bool lies_in_rows(const RotaryAttentionArgs& args) { return args.ready && !args.laid_out; }

// Returns the bytes of a chunk: one block of one kv head.
static inline int64_t chunk_bytes(const RotaryAttentionArgs& args) {
  return args.block_size * (args.int8_cache ? args.dim + 4 : args.dim * size_of(args.dtype));
}

// Returns the bytes from one kv head to the next.
static inline int64_t head_bytes(const RotaryAttentionArgs& args) {
  return lies_in_rows(args) ? args.dim * size_of(args.dtype) : chunk_bytes(args);
}

// Returns the byte offset of the keys (or values) of all heads at a position of a sequence. For lies_in_rows() only.
static inline int64_t ready_place(const RotaryAttentionArgs& args, int64_t seq, int64_t position) {
  int64_t row = position;
  if (args.block_tables == nullptr) {
    row += args.key_starts[seq];
  } else {
    const int64_t block = args.block_tables[seq * args.table_width + position / args.block_size];
    row = block * args.block_size + position % args.block_size;
  }
  return row * args.kv_heads * args.dim * size_of(args.dtype);
}

constexpr int64_t kGroupKeys = 16;  // tokens of a block whose keys share units of 4 bytes

static inline int64_t cache_element_bytes(const RotaryAttentionArgs& args) {
  return args.int8_cache ? 1 : size_of(args.dtype);
}

static inline bool cache_has_units(const RotaryAttentionArgs& args) {
  const bool narrow = args.int8_cache || args.dtype == DType::kBFloat16;
  return !lies_in_rows(args) && narrow && args.block_size % kGroupKeys == 0 && args.dim % 16 == 0;
}

// Mask of the sign bits of four bytes. Flipping the sign bit of an int8 adds 128 and gives an unsigned byte.
constexpr uint32_t kKeyBias = 0x80808080u;

// Returns the offset, in elements, of dim `d` of the key or value in row `row` of a chunk.
static inline int64_t key_element(const RotaryAttentionArgs& args, int64_t row, int64_t d) {
  if (!cache_has_units(args)) return row * args.dim + d;
  const int64_t per = 4 / cache_element_bytes(args);
  return row / kGroupKeys * kGroupKeys * args.dim + (d / per * kGroupKeys + row % kGroupKeys) * per + d % per;
}
static inline int64_t value_element(const RotaryAttentionArgs& args, int64_t row, int64_t d) {
  if (!cache_has_units(args)) return row * args.dim + d;
  const int64_t per = 4 / cache_element_bytes(args);
  return (row / per * args.dim + d) * per + row % per;
}

// The byte offsets of a token's key or value and of its scale in the cache, for kv head 0. Head h follows at h
// * chunk_bytes.
struct CachePlace {
  int64_t values, scale;  // values: the row, or the group that begins with this row; scale: int8 caches only
};
static inline CachePlace cache_place(const RotaryAttentionArgs& args, int64_t block, int64_t row) {
  const int64_t chunk = block * args.kv_heads * chunk_bytes(args);
  const int64_t row_bytes = args.dim * cache_element_bytes(args);
  return {chunk + row * row_bytes, chunk + args.block_size * row_bytes + row * 4};
}

// Checks the arguments of a whole step. Returns 0, or an error code after one line on standard error. After an error,
// nothing was written. Fills `query_starts` [num_seqs] and write_first, and sets the rows of `out` after the last
// sequence to zero.
int check_rotary_attention(const char* op, RotaryAttentionArgs* args, int64_t* query_starts);

// Checks the arguments of attention over rotated queries and existing keys (`ready`). `starts` [2 * num_seqs] receives
// query_starts and, without block tables, key_starts; then `key_rows` is the number of rows that keys and values have.
// Returns 0, or an error code after one line on standard error.
int check_ready_attention(const char* op, RotaryAttentionArgs* args, int64_t key_rows, int64_t* starts);

}  // namespace llmk

#ifdef LLMK_ARCH
#include "paged_attention.h"
#endif
