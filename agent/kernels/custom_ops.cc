// Entries of the AOT custom ops (ops.Custom, func_type="aot"): RotaryCache and PagedAttentionRagged. How to build them
// in Python is in library.py.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/tensors.h"
#include "ops/checks.h"

// What MindSpore's loader expects of the shape and type functions, without its headers: only pointers to AotExtra are
// passed here, and TypeId is an enum of int size.
class AotExtra;
enum TypeId : int {};

namespace llmk {
namespace {

int check_same_dtype(const Tensors& t, const std::vector<int>& indices) {
  const DType dtype = t.dtype(indices[0]);
  for (const int i : indices) {
    if (t.dtype(i) == dtype && dtype != DType::kUnsupported) continue;
    return refuse_text(t.op, "argument %d is %s, argument %d is %s; all must be the same one of float32, float16, "
                       "bfloat16", indices[0], t.dtypes[indices[0]], i, t.dtypes[i]);
  }
  return 0;
}

int check_dtype(const Tensors& t, const std::vector<int>& indices, const char* wanted) {
  for (const int i : indices) {
    if (!t.has_dtype(i, wanted)) return refuse_text(t.op, "argument %d is %s; it must be %s", i, t.dtypes[i], wanted);
  }
  return 0;
}

int check_caches(const Tensors& t, int key, int value) {
  if (t.ndims[key] != 4 || t.ndims[value] != 4 || t.size(key) != t.size(value)) {
    return refuse_text(t.op, "key_cache and value_cache must both be [blocks, block_size, kv_heads, head_dim]; they "
                       "have %d and %d dimensions, %lld and %lld elements", t.ndims[key], t.ndims[value],
                       static_cast<long long>(t.size(key)), static_cast<long long>(t.size(value)));
  }
  return 0;
}

int rotary_cache(const Tensors& t) {
  enum { kQkv, kPositions, kCos, kSin, kKeyCache, kValueCache, kSlots, kQuery };
  if (t.count != 8) return refuse_text(t.op, "got %d arguments; it takes 7 and gives 1", t.count);
  int error = check_same_dtype(t, {kQkv, kKeyCache, kValueCache, kQuery});
  if (error == 0) error = check_dtype(t, {kCos, kSin}, "float32");
  if (error == 0) error = check_dtype(t, {kPositions, kSlots}, "int32");
  if (error == 0) error = check_caches(t, kKeyCache, kValueCache);
  if (error != 0) return error;
  RotaryCacheArgs args{};
  args.dim = t.dim(kKeyCache, 3);
  args.kv_heads = t.dim(kKeyCache, 2);
  const int64_t width = t.dim(kQkv, -1);
  args.heads = args.dim > 0 ? width / args.dim - 2 * args.kv_heads : 0;
  if (args.heads < 1 || args.dim % 2 != 0 || width != (args.heads + 2 * args.kv_heads) * args.dim) {
    return refuse_text(t.op, "qkv has width %lld; with %lld kv heads of (even) size %lld it must be (heads + 2 * "
                       "kv_heads) * head_dim", static_cast<long long>(width), static_cast<long long>(args.kv_heads),
                       static_cast<long long>(args.dim));
  }
  args.tokens = t.size(kQkv) / width;
  if (t.size(kPositions) != args.tokens || t.size(kSlots) != args.tokens || t.dim(kCos, -1) != args.dim ||
      t.size(kCos) != t.size(kSin)) {
    return refuse_text(t.op, "%lld tokens of head_dim %lld, but %lld positions, %lld slots and cos rows of %lld",
                       static_cast<long long>(args.tokens), static_cast<long long>(args.dim),
                       static_cast<long long>(t.size(kPositions)), static_cast<long long>(t.size(kSlots)),
                       static_cast<long long>(t.dim(kCos, -1)));
  }
  args.qkv = t.data[kQkv];
  args.query = t.data[kQuery];
  args.key_cache = t.data[kKeyCache];
  args.value_cache = t.data[kValueCache];
  args.cos = t.as<float>(kCos);
  args.sin = t.as<float>(kSin);
  args.positions = t.as<int32_t>(kPositions);
  args.slots = t.as<int32_t>(kSlots);
  args.dtype = t.dtype(kQkv);
  error = check_positions(t.op, args.positions, args.tokens, t.size(kCos) / args.dim);
  if (error == 0) error = check_slots(t.op, args.slots, args.tokens, t.dim(kKeyCache, 0) * t.dim(kKeyCache, 1));
  if (error == 0 && args.tokens > 0) kernels().rotary_cache(args);
  return error;
}

int paged_attention_ragged(const Tensors& t) {
  enum { kQuery, kKeyCache, kValueCache, kBlockTables, kContextLens, kQueryLens, kOut };
  if (t.count != 7) return refuse_text(t.op, "got %d arguments; it takes 6 and gives 1", t.count);
  int error = check_same_dtype(t, {kQuery, kKeyCache, kValueCache, kOut});
  if (error == 0) error = check_dtype(t, {kBlockTables, kContextLens, kQueryLens}, "int32");
  if (error == 0) error = check_caches(t, kKeyCache, kValueCache);
  if (error != 0) return error;
  AttentionArgs args{};
  args.dim = t.dim(kKeyCache, 3);
  args.kv_heads = t.dim(kKeyCache, 2);
  args.block_size = t.dim(kKeyCache, 1);
  const int64_t width = t.dim(kQuery, -1);
  args.heads = width / args.dim;
  args.num_seqs = t.size(kQueryLens);
  if (args.heads * args.dim != width || args.heads % args.kv_heads != 0 || t.ndims[kBlockTables] != 2 ||
      t.dim(kBlockTables, 0) != args.num_seqs || t.size(kContextLens) != args.num_seqs) {
    return refuse_text(t.op, "query width %lld with kv_heads %lld of head_dim %lld; %lld query_lens, %lld context_lens, "
                       "%lld rows of block_tables", static_cast<long long>(width),
                       static_cast<long long>(args.kv_heads), static_cast<long long>(args.dim),
                       static_cast<long long>(args.num_seqs), static_cast<long long>(t.size(kContextLens)),
                       static_cast<long long>(t.dim(kBlockTables, 0)));
  }
  args.query = t.data[kQuery];
  args.out = t.data[kOut];
  args.keys = t.data[kKeyCache];
  args.values = t.data[kValueCache];
  args.block_tables = t.as<int32_t>(kBlockTables);
  args.table_width = t.dim(kBlockTables, 1);
  args.context_lens = t.as<int32_t>(kContextLens);
  args.query_lens = t.as<int32_t>(kQueryLens);
  args.scale = 1.0f / std::sqrt(static_cast<float>(args.dim));
  args.dtype = t.dtype(kQuery);
  std::vector<int64_t> starts(static_cast<size_t>(2 * args.num_seqs) + 1);
  error = check_attention(t.op, &args, t.size(kQuery) / width, t.dim(kKeyCache, 0), 0, starts.data());
  if (error == 0) kernels().attention(args);
  return error;
}

}  // namespace
}  // namespace llmk

#define LLMK_ENTRY __attribute__((visibility("default")))

extern "C" {

LLMK_ENTRY int RotaryCache(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*, void*) {
  const llmk::StandardFloatingPoint scope;
  return llmk::rotary_cache({"RotaryCache", nparam, params, ndims, shapes, dtypes});
}

LLMK_ENTRY int PagedAttentionRagged(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*,
                                    void*) {
  const llmk::StandardFloatingPoint scope;
  return llmk::paged_attention_ragged({"PagedAttentionRagged", nparam, params, ndims, shapes, dtypes});
}

// [T, (H + 2 KV) D] and the cache [NB, BS, KV, D] give [T, H D].
LLMK_ENTRY std::vector<int64_t> RotaryCacheInferShape(int* ndims, int64_t** shapes, AotExtra*) {
  std::vector<int64_t> out(shapes[0], shapes[0] + ndims[0]);
  out.back() -= 2 * shapes[4][2] * shapes[4][3];
  return out;
}

LLMK_ENTRY TypeId RotaryCacheInferType(std::vector<TypeId> types, AotExtra*) { return types[0]; }

LLMK_ENTRY std::vector<int64_t> PagedAttentionRaggedInferShape(int* ndims, int64_t** shapes, AotExtra*) {
  return std::vector<int64_t>(shapes[0], shapes[0] + ndims[0]);
}

LLMK_ENTRY TypeId PagedAttentionRaggedInferType(std::vector<TypeId> types, AotExtra*) { return types[0]; }

}  // extern "C"
