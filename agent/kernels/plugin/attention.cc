// FlashAttentionScore and PagedAttention: from the primitives' arguments to ops/attention.h.
#include <vector>

#include "../common/kernel_table.h"
#include "../ops/checks.h"
#include "call.h"

namespace llmk {

static int check_heads(const Call& call, const AttentionArgs& args, int64_t query_width, int64_t key_width) {
  if (args.heads > 0 && args.kv_heads > 0 && args.heads % args.kv_heads == 0 && args.dim > 0 &&
      args.dim * args.heads == query_width && args.dim * args.kv_heads == key_width) {
    return 0;
  }
  return refuse_text(call.op, "query width %lld of %lld heads, key width %lld of %lld heads do not fit",
                     static_cast<long long>(query_width), static_cast<long long>(args.heads),
                     static_cast<long long>(key_width), static_cast<long long>(args.kv_heads));
}

// Layout TH: query [tokens, heads * dim], key and value [tokens, kv_heads * dim]; actual_seq_qlen and actual_seq_kvlen
// are the lengths of the sequences (not running sums), zero allowed. Causal only.
int plugin_flash_attention(const Call& call) {
  enum { kAttnMask = 6, kQueryLens = 8, kKeyLens = 9, kHeadNum = 10, kKeepProb, kScale, kPreTokens, kNextTokens,
         kInnerPrecise, kLayout, kSparseMode };
  constexpr int64_t kLayoutTH = 5;  // MindSpore 2.9: FASInputLayoutMode
  for (const int unsupported : {3, 4, 5, 7}) {
    if (call.is_tensor(unsupported)) return refuse_text(call.op, "argument %d is not supported", unsupported);
  }
  const int64_t sparse = call.integer(kSparseMode), layout = call.integer(kLayout);
  const bool causal = call.is_tensor(kAttnMask) || call.integer(kNextTokens) == 0 || sparse == 2 || sparse == 3;
  if (!causal || layout != kLayoutTH || call.real(kKeepProb) != 1.0) {
    return refuse_text(call.op, "only causal attention (a mask, next_tokens=0 or sparse_mode 2 or 3) in layout TH "
                       "without dropout; layout is %lld", static_cast<long long>(layout));
  }
  int error = check_equal_dtype(call, 0, 1);
  if (error == 0) error = check_equal_dtype(call, 0, 2);
  if (error != 0) return error;
  AttentionArgs args{};
  const int64_t width = call.dim(0, -1), key_width = call.dim(1, -1), tokens = call.size(0) / width;
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
  args.query = call.data[0];
  args.out = call.data[call.count - 1];
  args.keys = call.data[1];
  args.values = call.data[2];
  args.query_lens = query_lens.data();
  args.context_lens = key_lens.data();
  args.num_seqs = static_cast<int64_t>(query_lens.size());
  args.scale = static_cast<float>(call.real(kScale));
  args.dtype = call.dtype(0);
  std::vector<int64_t> starts(2 * query_lens.size() + 1);
  error = check_attention(call.op, &args, tokens, 0, call.size(1) / key_width, starts.data());
  if (error == 0) kernels().attention(args);
  return error;
}

// Query [tokens, heads * dim], caches [blocks, block_size, kv_heads, dim], block_tables int32 [sequences, width]. The last
// q_seq_lens[s] of the context_lens[s] tokens of sequence s are its queries, one where q_seq_lens is missing; each sees
// the keys up to its own position, which the cache holds already. Padding of block_tables is not read. An Ascend hides later
// keys by attn_mask alone; here the position does.
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
  if (call.ndims[kKeyCache] != 4 || call.size(kKeyCache) != call.size(kValueCache) || call.ndims[kBlockTables] != 2 ||
      !call.has_dtype(kBlockTables, "int32") || call.integer(kMlaDim) != 0) {
    return refuse_text(call.op, "caches must be [blocks, block_size, kv_heads, head_dim], block_tables int32 [sequences, "
                       "width], mla_v_dim 0");
  }
  AttentionArgs args{};
  args.heads = call.integer(kHeadNum);
  args.kv_heads = call.integer(kKvHeadNum);
  args.dim = call.size(kKeyCache, 2) / larger(1, args.kv_heads);
  args.block_size = call.dim(kKeyCache, 1);
  const int64_t width = args.heads * args.dim, tokens = width > 0 ? call.size(kQuery) / width : 0;
  error = check_heads(call, args, call.size(kQuery) == tokens * width ? width : -1, call.size(kKeyCache, 2));
  if (error != 0) return error;
  const std::vector<int32_t> context_lens = integers(call, kContextLens);
  std::vector<int32_t> query_lens(context_lens.size(), 1);
  if (call.is_tensor(kQueryLens)) query_lens = integers(call, kQueryLens);
  args.num_seqs = static_cast<int64_t>(context_lens.size());
  if (query_lens.size() != context_lens.size() || call.dim(kBlockTables, 0) != args.num_seqs) {
    return refuse_text(call.op, "%zu q_seq_lens, %zu context_lens, %lld rows of block_tables; they must be equal",
                       query_lens.size(), context_lens.size(), static_cast<long long>(call.dim(kBlockTables, 0)));
  }
  args.query = call.data[kQuery];
  args.out = call.data[call.count - 1];
  args.keys = call.data[kKeyCache];
  args.values = call.data[kValueCache];
  args.block_tables = call.as<int32_t>(kBlockTables);
  args.table_width = call.dim(kBlockTables, 1);
  args.query_lens = query_lens.data();
  args.context_lens = context_lens.data();
  args.scale = static_cast<float>(call.real(kScale));
  args.dtype = call.dtype(kQuery);
  std::vector<int64_t> starts(2 * context_lens.size() + 1);
  error = check_attention(call.op, &args, tokens, call.dim(kKeyCache, 0), 0, starts.data());
  if (error == 0) kernels().attention(args);
  return error;
}

}  // namespace llmk
