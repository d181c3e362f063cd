// The primitives FlashAttentionScore, PagedAttention and FusedInferAttentionScore. This file translates their arguments
// for the kernel of ops/rotary_attention.h.
//
// All primitives get a query that is already rotated, and keys and values that are already stored. So they run the
// kernel with `ready` set. Prompts, chunks and decode steps all use this kernel.
#include <cstring>
#include <vector>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../ops/laid_out_caches.h"
#include "call.h"

namespace llmk {

static int check_heads(const Call& call, const RotaryAttentionArgs& args, int64_t query_width, int64_t key_width) {
  if (args.heads > 0 && args.kv_heads > 0 && args.heads % args.kv_heads == 0 && args.dim > 0 &&
      args.dim * args.heads == query_width && args.dim * args.kv_heads == key_width) {
    return 0;
  }
  return refuse_text(call.op, "query width %lld of %lld heads, key width %lld of %lld heads do not fit",
                     static_cast<long long>(query_width), static_cast<long long>(args.heads),
                     static_cast<long long>(key_width), static_cast<long long>(args.kv_heads));
}

// Reads the arguments that FlashAttentionScore and PagedAttention have at the same index: query 0, key 1, value 2, and
// the output last.
static RotaryAttentionArgs ready_args(const Call& call) {
  RotaryAttentionArgs args{};
  args.ready = true;
  args.qkv = call.data[0];
  args.key_cache = call.data[1];
  args.value_cache = call.data[2];
  args.out = call.data[call.count - 1];
  args.dtype = call.dtype(0);
  return args;
}

static int64_t longest_context(const RotaryAttentionArgs& args) {
  int64_t longest = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) longest = larger(longest, args.context_lens[seq]);
  return longest;
}

// Runs FlashAttentionScore in layout TH: query [tokens, heads * dim], key and value [tokens, kv_heads * dim]. The
// inputs actual_seq_qlen and actual_seq_kvlen have the length of each sequence, not running sums. A length may be zero.
// Only causal attention is supported. pre_tokens limits how many earlier tokens a query sees (sparse_mode 4, a band).
int plugin_flash_attention(const Call& call) {
  enum { kAttnMask = 6, kQueryLens = 8, kKeyLens = 9, kHeadNum = 10, kKeepProb, kScale, kPreTokens, kNextTokens,
         kInnerPrecise, kLayout, kSparseMode };
  constexpr int64_t kLayoutTH = 5;  // number of TH in FASInputLayoutMode of MindSpore 2.9
  for (const int unsupported : {3, 4, 5, 7}) {
    if (call.is_tensor(unsupported)) return refuse_text(call.op, "argument %d is not supported", unsupported);
  }
  const int64_t sparse = call.integer(kSparseMode), layout = call.integer(kLayout);
  const bool causal = call.is_tensor(kAttnMask) || call.integer(kNextTokens) == 0 || sparse == 2 || sparse == 3;
  const int64_t pre_tokens = call.integer(kPreTokens);
  if (!causal || layout != kLayoutTH || call.real(kKeepProb) != 1.0 || pre_tokens < 0) {
    return refuse_text(call.op, "only causal attention (a mask, next_tokens=0 or sparse_mode 2 or 3) in layout TH "
                       "without dropout; layout is %lld", static_cast<long long>(layout));
  }
  int error = check_equal_dtype(call, 0, 1);
  if (error == 0) error = check_equal_dtype(call, 0, 2);
  if (error != 0) return error;
  RotaryAttentionArgs args = ready_args(call);
  const int64_t width = call.dim(0, -1), key_width = call.dim(1, -1);
  args.tokens = call.size(0) / width;
  args.heads = call.integer(kHeadNum);
  args.dim = args.heads > 0 ? width / args.heads : 0;
  args.kv_heads = args.dim > 0 ? key_width / args.dim : 0;
  error = check_heads(call, args, width, key_width);
  if (error != 0) return error;
  const std::vector<int32_t> query_lens = integers(call, kQueryLens), key_lens = integers(call, kKeyLens);
  if (query_lens.size() != key_lens.size() || call.size(1) != call.size(2)) {
    return refuse_text(call.op, "%zu query lengths and %zu key lengths, key and value of %lld and %lld elements",
                       query_lens.size(), key_lens.size(), static_cast<long long>(call.size(1)),
                       static_cast<long long>(call.size(2)));
  }
  args.query_lens = query_lens.data();
  args.context_lens = key_lens.data();
  args.num_seqs = static_cast<int64_t>(query_lens.size());
  args.scale = static_cast<float>(call.real(kScale));
  std::vector<int64_t> starts(2 * query_lens.size() + 1);
  error = check_ready_attention(call.op, &args, call.size(1) / key_width, starts.data());
  if (error != 0) return error;
  if (pre_tokens + 1 < longest_context(args)) args.window = pre_tokens + 1;
  kernels().rotary_attention(args);
  return 0;
}

// Returns true if element `index` of a mask is not zero, which means that the key is hidden. `element_bytes` is 1 for
// bool, 4 for float32, and 2 for float16 and bfloat16.
static bool is_masked(const void* mask, int64_t element_bytes, int64_t index) {
  if (element_bytes == 1) return static_cast<const uint8_t*>(mask)[index] != 0;
  if (element_bytes == 4) return static_cast<const float*>(mask)[index] != 0;
  return (static_cast<const uint16_t*>(mask)[index] & 0x7FFF) != 0;  // tests all bits except the sign
}

// Converts a mask [tokens, positions] to `first_keys`: the first key that each query sees. The mask is 0 (or false) at
// every visible key. The visible keys of a query must be consecutive and end at the query's own position. If every
// query sees all keys from position 0 on, `first_keys` becomes empty.
//
// A mask of another shape is ignored, because the kernel itself hides the keys after the query's position.
static int read_mask(const Call& call, int mask, const RotaryAttentionArgs& args, std::vector<int64_t>* first_keys) {
  if (!call.is_tensor(mask) || call.ndims[mask] != 2 || call.dim(mask, 0) != args.tokens ||
      call.dim(mask, 1) < longest_context(args)) {
    return 0;
  }
  const bool is_bool = call.has_dtype(mask, "bool");
  const int error = is_bool ? 0 : check_float(call, mask);
  if (error != 0) return error;
  const int64_t bytes = is_bool ? 1 : size_of(call.dtype(mask));
  first_keys->assign(static_cast<size_t>(args.tokens), 0);
  bool hides = false;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    for (int64_t row = 0; row < args.query_lens[seq]; ++row) {
      const int64_t token = args.query_starts[seq] + row, base = token * call.dim(mask, 1);
      const int64_t visible = args.context_lens[seq] - args.query_lens[seq] + row + 1;
      int64_t first = 0;
      while (first < visible && is_masked(call.data[mask], bytes, base + first)) ++first;
      for (int64_t key = first; key < visible || first == visible; ++key) {
        if (first < visible && !is_masked(call.data[mask], bytes, base + key)) continue;
        return refuse_text(call.op,
                           "attn_mask of token %lld hides key %lld; it must leave one run of keys that ends at "
                           "the token's own position %lld",
                           static_cast<long long>(token), static_cast<long long>(key),
                           static_cast<long long>(visible - 1));
      }
      (*first_keys)[static_cast<size_t>(token)] = first;
      hides = hides || first > 0;
    }
  }
  if (!hides) first_keys->clear();
  return 0;
}

// Checks that a mask, which may be missing, is bool [tokens, positions] and covers all positions of the block table.
static int check_covering_mask(const Call& call, int mask, const RotaryAttentionArgs& args) {
  const int64_t positions = args.table_width * args.block_size;
  if (!call.is_tensor(mask) || (call.has_dtype(mask, "bool") && call.ndims[mask] == 2 &&
                                call.dim(mask, 0) == args.tokens && call.dim(mask, 1) >= positions)) {
    return 0;
  }
  return refuse_text(call.op, "attn_mask is %s with %d axes and %lld elements; it must be bool [%lld, %lld or more]",
                     call.dtypes[mask], static_cast<int>(call.ndims[mask]), static_cast<long long>(call.size(mask)),
                     static_cast<long long>(args.tokens), static_cast<long long>(positions));
}

// Shortens each head to its first `width` elements: copies rows [tokens, heads * dim] to rows [tokens, heads * width].
static void copy_first_elements(const RotaryAttentionArgs& args, const char* from, int64_t width, char* to) {
  const int64_t element = size_of(args.dtype), bytes = width * element, stride = args.dim * element;
  parallel_for(args.tokens, [&](int64_t token) {
    for (int64_t head = token * args.heads; head < (token + 1) * args.heads; ++head) {
      std::memcpy(to + head * bytes, from + head * stride, static_cast<size_t>(bytes));
    }
  });
}

// Runs the attention. With mla_v_dim above 0 (latent attention), a value is the first mla_v_dim elements of a key. Then
// the kernel uses whole keys as values, and only the first mla_v_dim elements of each result are copied to the output.
static void run_paged(RotaryAttentionArgs* args, int64_t mla_v_dim) {
  char* out = static_cast<char*>(args->out);
  if (mla_v_dim > 0) {
    args->out = thread_scratch(kScratchLayer, args->tokens * args->heads * args->dim * size_of(args->dtype));
  }
  kernels().rotary_attention(*args);
  if (mla_v_dim > 0) copy_first_elements(*args, static_cast<const char*>(args->out), mla_v_dim, out);
}

// Runs PagedAttention: query [tokens, heads * dim], caches [blocks, block_size, kv_heads, dim], block_tables int32
// [sequences, width].
//
// With mla_v_dim above 0 (latent attention), there is one kv head, both caches are the same memory, and the result is
// [tokens, heads * mla_v_dim].
//
// The last q_seq_lens[s] of the context_lens[s] tokens of sequence s are its queries. Without q_seq_lens, each sequence
// has one query. A query sees the keys up to its own position, which are in the cache already. An Ascend needs
// attn_mask to hide later keys, but this kernel compares positions. Unused entries of block_tables are not read.
//
// The blocks of a cache that ops/laid_out_caches.h names have another order of elements. This kernel reads it faster.
int plugin_paged_attention(const Call& call) {
  enum { kQuery, kKeyCache, kValueCache, kBlockTables, kContextLens, kAntiquantScale, kAntiquantOffset, kAttnMask,
         kQueryLens, kAlibi, kHeadNum, kScale, kKvHeadNum, kQuantMode, kMaskMode, kMlaDim };
  for (const int unsupported : {kAntiquantScale, kAntiquantOffset, kAlibi}) {
    if (call.is_tensor(unsupported)) return refuse_text(call.op, "argument %d is not supported", unsupported);
  }
  for (const int needed : {kKeyCache, kValueCache, kBlockTables, kContextLens}) {
    if (!call.is_tensor(needed)) return refuse_text(call.op, "argument %d is missing", needed);
  }
  int error = check_equal_dtype(call, kQuery, kKeyCache);
  if (error == 0) error = check_equal_dtype(call, kQuery, kValueCache);
  if (error != 0) return error;
  const int64_t mla_v_dim = call.integer(kMlaDim);
  const bool has_one_cache = call.data[kKeyCache] == call.data[kValueCache];
  const bool is_latent = mla_v_dim > 0 && call.integer(kKvHeadNum) == 1 && has_one_cache;
  if (call.ndims[kKeyCache] != 4 || call.size(kKeyCache) != call.size(kValueCache) || call.ndims[kBlockTables] != 2 ||
      !call.has_dtype(kBlockTables, "int32") || (mla_v_dim != 0 && !is_latent) || mla_v_dim > call.dim(kKeyCache, 3)) {
    return refuse_text(call.op,
                       "caches must be [blocks, block_size, kv_heads, head_dim], block_tables int32 [sequences, "
                       "width], mla_v_dim 0, or at most head_dim with one kv head and one cache");
  }
  RotaryAttentionArgs args = ready_args(call);
  args.heads = call.integer(kHeadNum);
  args.kv_heads = call.integer(kKvHeadNum);
  args.dim = call.size(kKeyCache, 2) / larger(1, args.kv_heads);
  args.num_blocks = call.dim(kKeyCache, 0);
  args.block_size = call.dim(kKeyCache, 1);
  const int64_t width = args.heads * args.dim;
  args.tokens = width > 0 ? call.size(kQuery) / width : 0;
  error = check_heads(call, args, call.size(kQuery) == args.tokens * width ? width : -1, call.size(kKeyCache, 2));
  if (error != 0) return error;
  const std::vector<int32_t> context_lens = integers(call, kContextLens);
  std::vector<int32_t> query_lens(context_lens.size(), 1);
  if (call.is_tensor(kQueryLens)) query_lens = integers(call, kQueryLens);
  args.num_seqs = static_cast<int64_t>(context_lens.size());
  if (query_lens.size() != context_lens.size() || call.dim(kBlockTables, 0) != args.num_seqs) {
    return refuse_text(call.op, "%zu q_seq_lens, %zu context_lens, %lld rows of block_tables; they must be equal",
                       query_lens.size(), context_lens.size(), static_cast<long long>(call.dim(kBlockTables, 0)));
  }
  args.block_tables = call.as<int32_t>(kBlockTables);
  args.table_width = call.dim(kBlockTables, 1);
  args.laid_out = is_laid_out(args.key_cache);
  args.query_lens = query_lens.data();
  args.context_lens = context_lens.data();
  args.scale = static_cast<float>(call.real(kScale));
  std::vector<int64_t> starts(2 * context_lens.size() + 1), first_keys;
  error = check_ready_attention(call.op, &args, 0, starts.data());
  if (error == 0) error = read_mask(call, kAttnMask, args, &first_keys);
  if (error != 0) return error;
  args.first_keys = first_keys.empty() ? nullptr : first_keys.data();
  run_paged(&args, mla_v_dim);
  return 0;
}

// Runs FusedInferAttentionScore with a block table: query [tokens, 1, heads * dim], caches
// [blocks, block_size, kv_heads * dim], block_table int32 [tokens, width], actual_seq_lengths_kv [tokens].
//
// Each row of the table has one query. The query sees the keys at positions below its element of actual_seq_lengths_kv,
// except those that attn_mask hides. The mask is bool [tokens, positions], true for a hidden key, and has at least
// width * block_size positions. The visible keys of a query must be consecutive, and the last one must be at the
// position before the query's length.
//
// The second result is softmax_lse, float32 [tokens, heads, 1, 1]: the logarithm of the sum of exp(score) over the
// visible keys.
int plugin_fused_infer_attention(const Call& call) {
  enum { kQuery, kKey, kValue, kPseShift, kAttnMask, kQueryLens, kKeyLens, kDequantScale1, kBlockTable = 14,
         kQueryPadding, kPrefixLens = 23, kNumHeads, kScale, kLayout = 28, kNumKvHeads, kBlockSize = 32,
         kLseFlag = 34, kOut = 37, kLse, kArguments };
  constexpr int64_t kLayoutBSH = 0;  // number of BSH in FASInputLayoutMode of MindSpore 2.9
  if (call.count != kArguments) return refuse_text(call.op, "%d arguments; it takes one key and one value", call.count);
  for (int i = kPseShift; i <= kPrefixLens; ++i) {
    const bool is_known = i == kAttnMask || i == kQueryLens || i == kKeyLens || i == kBlockTable;
    if (!is_known && call.is_tensor(i)) return refuse_text(call.op, "argument %d is not supported", i);
  }
  int error = check_equal_dtype(call, kQuery, kKey);
  if (error == 0) error = check_equal_dtype(call, kQuery, kValue);
  if (error != 0) return error;
  RotaryAttentionArgs args{};
  args.ready = true;
  args.qkv = call.data[kQuery];
  args.key_cache = call.data[kKey];
  args.value_cache = call.data[kValue];
  args.out = call.data[kOut];
  args.lse = call.as<float>(kLse);
  args.dtype = call.dtype(kQuery);
  args.heads = call.integer(kNumHeads);
  args.kv_heads = call.integer(kNumKvHeads);
  args.block_size = call.integer(kBlockSize);
  args.scale = static_cast<float>(call.real(kScale));
  if (call.ndims[kQuery] != 3 || call.dim(kQuery, 1) != 1 || call.ndims[kKey] != 3 ||
      call.size(kKey) != call.size(kValue) || call.dim(kKey, 1) != args.block_size || !call.is_tensor(kBlockTable) ||
      !call.has_dtype(kBlockTable, "int32") || call.ndims[kBlockTable] != 2 || !call.is_tensor(kKeyLens) ||
      call.integer(kLayout) != kLayoutBSH || !call.boolean(kLseFlag)) {
    return refuse_text(call.op,
                       "takes a query [tokens, 1, width], caches [blocks, block_size, width], an int32 block_table and "
                       "actual_seq_lengths_kv, in layout BSH with softmax_lse_flag");
  }
  args.tokens = call.dim(kQuery, 0);
  args.num_seqs = args.tokens;
  args.num_blocks = call.dim(kKey, 0);
  args.dim = args.kv_heads > 0 ? call.dim(kKey, 2) / args.kv_heads : 0;
  error = check_heads(call, args, call.dim(kQuery, 2), call.dim(kKey, 2));
  if (error != 0) return error;
  const std::vector<int32_t> key_lens = integers(call, kKeyLens);
  const std::vector<int32_t> query_lens(key_lens.size(), 1);
  if (static_cast<int64_t>(key_lens.size()) != args.tokens || call.dim(kBlockTable, 0) != args.tokens) {
    return refuse_text(call.op, "%zu lengths and %lld rows of block_table for %lld queries; they must be equal",
                       key_lens.size(), static_cast<long long>(call.dim(kBlockTable, 0)),
                       static_cast<long long>(args.tokens));
  }
  args.block_tables = call.as<int32_t>(kBlockTable);
  args.table_width = call.dim(kBlockTable, 1);
  args.query_lens = query_lens.data();
  args.context_lens = key_lens.data();
  std::vector<int64_t> starts(2 * key_lens.size() + 1), first_keys;
  error = check_ready_attention(call.op, &args, 0, starts.data());
  if (error == 0) error = check_covering_mask(call, kAttnMask, args);
  if (error == 0) error = read_mask(call, kAttnMask, args, &first_keys);
  if (error != 0) return error;
  args.first_keys = first_keys.empty() ? nullptr : first_keys.data();
  kernels().rotary_attention(args);
  return 0;
}

}  // namespace llmk
