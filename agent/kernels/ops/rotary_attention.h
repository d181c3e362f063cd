// RotaryAttention: rotary embedding, the write into the paged cache, and causal attention over the cache. One call
// handles all sequences of a step: prefill, chunks and decode.
//
// Inputs. qkv is [tokens, (heads + 2 * kv_heads) * dim], out is [tokens, heads * dim]. Sequence s has the query_lens[s]
// rows from query_starts[s] on. These rows are the last of the sequence's context_lens[s] positions. A row sees the
// keys of positions 0 to its own. Query head h uses kv head h / (heads / kv_heads).
//
// Cache. The cache is [num_blocks][kv_heads] chunks. Position j of sequence s is row j % block_size of block
// block_tables[s * table_width + j / block_size]. The keys and values of the step are first written to `slots` and then
// read from the cache.
//
// A float chunk has block_size * dim values of the type of qkv. An int8 chunk has block_size * dim int8, then
// [block_size] float32 scales. A value is scale * int8, where scale = max|x| / 127 over one head of a token.
//
// The layout of a chunk depends on its type. If block_size and dim are multiples of 16, bfloat16 and int8 chunks are
// stored as the products read them. They consist of units of 4 bytes, which hold `per` = 2 bfloat16 or 4 int8.
//     keys    [block_size / 16][dim / per][16 tokens][per dims]; int8 keys are unsigned bytes with 128 added
//     values  [block_size / 16][16 / per][dim][per tokens]
//
// All other chunks are [block_size][dim].
//
// Options. With gammas, every query and key head passes RMSNorm before the rotation, in float32 (Qwen3). With a window,
// a row sees only the last `window` keys, including its own (Mistral). With sinks, the softmax of a query head has one
// more term, exp(sink), which has no value (gpt-oss). With first_keys, a token sees no key before
// position first_keys[token]. With lse, the logarithm of each row's sum of exponentials is also returned.
//
// With `ready`, only the attention runs, for the native primitives: qkv is the rotated query [tokens, heads * dim], and
// keys and values are already stored. The heads of a token are then adjacent: the cache is
// [num_blocks][block_size][kv_heads][dim]. Without block_tables, keys and values are matrix rows [kv_heads][dim], and
// the rows of sequence s begin at key_starts[s].
//
// rotary_attention_checks.cc has the checks, paged_plan.h the division into tasks, and paged_rows.h the order of the
// arithmetic.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

struct RotaryAttentionArgs {
  const void* qkv;
  void* out;
  float* lse;  // [tokens, heads]: receives log(sum of exp(score)) over the visible keys; null: not needed
  void* key_cache;
  void* value_cache;
  const float* cos;  // table of the rotary embedding: [table_rows, dim]
  const float* sin;
  const int32_t* positions;     // [tokens]: row of cos and sin for each token
  const int32_t* slots;         // [tokens]; a negative slot: the key and value of the token are not written
  const int32_t* block_tables;  // [num_seqs, table_width]: the blocks of each sequence
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* query_lens;    // [num_seqs]
  const int64_t* query_starts;  // [num_seqs]: first query row of each sequence; filled by the checks
  const void* query_gamma;      // [dim] of gamma_dtype, or null: no norm
  const void* key_gamma;
  const float* sinks;           // [heads]: a score without a value for each query head, or null: none
  int64_t tokens, num_seqs, table_width, table_rows;
  int64_t num_blocks, block_size, heads, kv_heads, dim;
  int64_t window;     // maximum number of keys that a row sees; 0: no limit
  float epsilon;      // epsilon of the RMSNorm of query and key heads
  float scale;        // factor of the scores
  DType dtype;        // type of qkv and out
  DType gamma_dtype;  // type of query_gamma and key_gamma
  bool int8_cache;    // false: the cache has elements of dtype
  // True if a sequence may read a block that another sequence writes in this step. check_rotary_attention() sets it.
  bool write_first;
  // True: only the attention runs. The caller has already rotated the queries in qkv and stored the keys and values, as
  // the paragraph "With `ready`" of the file comment describes.
  bool ready;
  // Only used with `ready`. True: cache blocks have the layout of this operator. False: the layout of the primitives.
  bool laid_out;
  // [num_seqs]: first key row of each sequence; only used with `ready` and without block tables.
  const int64_t* key_starts;
  const int64_t* first_keys;  // [tokens]: first key that each token sees; only used with `ready`; null: all 0
};

// A row of a sequence is one query. Its number is token * group + head, where `group` is the number of query heads of a
// kv head. The row sees the keys at positions [first_key(), visible_keys()).
static inline int64_t visible_keys(const RotaryAttentionArgs& args, int64_t seq, int64_t row) {
  return args.context_lens[seq] - args.query_lens[seq] + row / (args.heads / args.kv_heads) + 1;
}
static inline int64_t first_key(const RotaryAttentionArgs& args, int64_t seq, int64_t row) {
  if (args.first_keys != nullptr) return args.first_keys[args.query_starts[seq] + row / (args.heads / args.kv_heads)];
  return args.window == 0 ? 0 : larger(0, visible_keys(args, seq, row) - args.window);
}

// Returns true if the keys and values have the layout of the native primitives, with the heads of a token side by side.
// Otherwise they are chunks of this operator's cache.
static inline bool lies_in_rows(const RotaryAttentionArgs& args) { return args.ready && !args.laid_out; }

// Returns the size of a chunk in bytes. A chunk is one block of one kv head.
static inline int64_t chunk_bytes(const RotaryAttentionArgs& args) {
  return args.block_size * (args.int8_cache ? args.dim + 4 : args.dim * size_of(args.dtype));
}

// Returns the distance in bytes from one kv head to the next.
static inline int64_t head_bytes(const RotaryAttentionArgs& args) {
  return lies_in_rows(args) ? args.dim * size_of(args.dtype) : chunk_bytes(args);
}

// Returns the byte offset of the keys (or values) of all heads at a position of a sequence. Only valid if lies_in_rows
// is true, so that the heads of a token are adjacent.
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

constexpr int64_t kGroupKeys = 16;  // number of tokens in a group of the cache layout with 4-byte units

static inline int64_t cache_element_bytes(const RotaryAttentionArgs& args) {
  return args.int8_cache ? 1 : size_of(args.dtype);
}

static inline bool cache_has_units(const RotaryAttentionArgs& args) {
  const bool narrow = args.int8_cache || args.dtype == DType::kBFloat16;
  return !lies_in_rows(args) && narrow && args.block_size % kGroupKeys == 0 && args.dim % 16 == 0;
}

// Mask of the sign bits of four bytes. Flipping the sign bit of an int8 adds 128 and gives an unsigned byte.
constexpr uint32_t kKeyBias = 0x80808080u;

// Returns the place of dim `d` of the key in row `row`, counted in elements from the start of a chunk. The function
// value_element() does the same for a value.
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

// The addresses of a token's key (or value) and of its scale in the cache, as byte offsets for kv head 0. For head h,
// add h * chunk_bytes() to both.
struct CachePlace {
  // `values` is the offset of the token's row in a chunk. If the chunk has units of 4 bytes, the rows of 16 tokens are
  // interleaved. Then the offset is valid only for the first of the 16 tokens, and is where their group begins. `scale`
  // is valid only for int8 caches.
  int64_t values, scale;
};
static inline CachePlace cache_place(const RotaryAttentionArgs& args, int64_t block, int64_t row) {
  const int64_t chunk = block * args.kv_heads * chunk_bytes(args);
  const int64_t row_bytes = args.dim * cache_element_bytes(args);
  return {chunk + row * row_bytes, chunk + args.block_size * row_bytes + row * 4};
}

// Checks the arguments of a whole step. Fills `query_starts` [num_seqs] and write_first, and sets the rows of `out`
// after the last sequence to zero. Returns 0, or writes one line to standard error and returns an error code.
int check_rotary_attention(const char* op, RotaryAttentionArgs* args, int64_t* query_starts);

// Checks the arguments of attention whose queries are rotated already, and whose keys and values exist already. Returns
// 0, or writes one line to standard error and returns an error code.
//
// `starts` holds 2 * num_seqs numbers: first query_starts, then key_starts. key_starts are written only without block
// tables. In this case, `key_rows` is the number of rows of the keys and of the values.
int check_ready_attention(const char* op, RotaryAttentionArgs* args, int64_t key_rows, int64_t* starts);

}  // namespace llmk
