// The custom operator RotaryAttention: rotary embedding, cache write and paged attention of all tokens of a step. The
// kernel and the layout of the cache are in ops/rotary_attention.h.
//
//   qkv [Tm, (heads + 2 * kv_heads) * dim]   positions [Tm]   cos, sin [table rows, dim] float32
//   key_cache, value_cache, written in place: [num_blocks, kv_heads, block_size, dim] of the type of qkv,
//       or [num_blocks, kv_heads, block_size, dim + 4] of int8
//   slot_mapping [Tm]   block_tables: flat, W entries for each sequence   context_lens, query_lens [Sm]
//   counts [4] = {T, S, W, 0}
//   optional, one of three lists:
//       window [1] int32 (0: none)
//       window, sinks [heads] float32
//       window, query_gamma and key_gamma [dim] (of the type of qkv, or float32), epsilon [1]
//   -> attended [Tm, heads * dim], of which the first T rows are written
//
// Every tensor has space for the largest step, which has Tm tokens and Sm sequences. T, S and W are the tokens, the
// sequences and the width of the block table of this step. The number of heads follows from the width of qkv.
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "custom_ops.h"

class AotExtra;
enum TypeId : int {};

namespace llmk {
namespace {

enum Argument {
  kQkv, kPositions, kCos, kSin, kKeyCache, kValueCache, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts,
  kWindow, kQueryGamma, kKeyGamma, kEpsilon, kSinks = kQueryGamma
};

// Returns the index of the output. It is the last tensor, so its index depends on the number of optional inputs.
int out_of(const Tensors& t) { return t.count - 1; }
bool has_window(const Tensors& t) { return t.count > kWindow + 1; }
bool has_norms(const Tensors& t) { return t.count > kEpsilon + 1; }
bool has_sinks(const Tensors& t) { return t.count == kSinks + 2; }

int check_dtypes(const Tensors& t) {
  const DType dtype = t.dtype(kQkv);
  if (dtype == DType::kUnsupported || t.dtype(out_of(t)) != dtype) {
    return refuse_text(t.op, "qkv is %s and the output %s; both must be the same one of float32, float16, bfloat16",
                       t.dtypes[kQkv], t.dtypes[out_of(t)]);
  }
  for (const int i : {kKeyCache, kValueCache}) {
    if (std::strcmp(t.dtypes[i], t.dtypes[kKeyCache]) == 0 && (t.dtype(i) == dtype || t.has_dtype(i, "int8"))) continue;
    return refuse_text(t.op, "key_cache is %s and value_cache %s; both must be int8 or %s as qkv", t.dtypes[kKeyCache],
                       t.dtypes[kValueCache], t.dtypes[kQkv]);
  }
  for (const int i : {kCos, kSin}) {
    if (!t.has_dtype(i, "float32")) return refuse_text(t.op, "argument %d is %s; it must be float32", i, t.dtypes[i]);
  }
  for (const int i : {kPositions, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts}) {
    if (!t.has_dtype(i, "int32")) return refuse_text(t.op, "argument %d is %s; it must be int32", i, t.dtypes[i]);
  }
  return 0;
}

int read_shapes(const Tensors& t, RotaryAttentionArgs* args) {
  if (t.ndims[kKeyCache] != 4 || t.ndims[kValueCache] != 4 || t.size(kKeyCache) != t.size(kValueCache)) {
    return refuse_text(t.op, "key_cache and value_cache must both be [num_blocks, kv_heads, block_size, head_dim (+ 4 "
                       "for int8)]; they have %d and %d dimensions, %lld and %lld elements", t.ndims[kKeyCache],
                       t.ndims[kValueCache], static_cast<long long>(t.size(kKeyCache)),
                       static_cast<long long>(t.size(kValueCache)));
  }
  args->dtype = t.dtype(kQkv);
  args->int8_cache = t.has_dtype(kKeyCache, "int8");
  args->num_blocks = t.dim(kKeyCache, 0);
  args->kv_heads = t.dim(kKeyCache, 1);
  args->block_size = t.dim(kKeyCache, 2);
  args->dim = t.dim(kKeyCache, 3) - (args->int8_cache ? 4 : 0);
  const int64_t width = t.dim(kQkv, -1);
  args->heads = args->dim > 0 ? width / args->dim - 2 * args->kv_heads : 0;
  if (args->dim < 2 || args->dim % 2 != 0 || args->kv_heads < 1 || args->block_size < 1 || args->heads < 1 ||
      args->heads % args->kv_heads != 0 || width != (args->heads + 2 * args->kv_heads) * args->dim) {
    return refuse_text(t.op, "qkv has width %lld; with %lld kv heads of size %lld it must be (heads + 2 * kv_heads) * "
                       "head_dim with an even head_dim and heads a multiple of kv_heads", static_cast<long long>(width),
                       static_cast<long long>(args->kv_heads), static_cast<long long>(args->dim));
  }
  if (t.dim(kCos, -1) != args->dim || t.size(kCos) != t.size(kSin)) {
    return refuse_text(t.op, "cos rows have %lld elements, cos %lld, sin %lld; head_dim is %lld",
                       static_cast<long long>(t.dim(kCos, -1)), static_cast<long long>(t.size(kCos)),
                       static_cast<long long>(t.size(kSin)), static_cast<long long>(args->dim));
  }
  args->table_rows = t.size(kCos) / args->dim;
  return 0;
}

int read_counts(const Tensors& t, RotaryAttentionArgs* args) {
  if (t.size(kCounts) < 3) return refuse_text(t.op, "counts must be {tokens, sequences, table width, 0}");
  const int32_t* counts = t.as<int32_t>(kCounts);
  const int64_t most_tokens = t.size(kQkv) / t.dim(kQkv, -1), most_seqs = t.size(kQueryLens);
  if (counts[0] < 0 || counts[0] > most_tokens) return refuse_index(t.op, "counts", 0, counts[0], most_tokens + 1);
  if (counts[1] < 0 || counts[1] > most_seqs) return refuse_index(t.op, "counts", 1, counts[1], most_seqs + 1);
  args->tokens = counts[0];
  args->num_seqs = counts[1];
  args->table_width = counts[2];
  if (counts[2] < 0 || args->num_seqs * args->table_width > t.size(kBlockTables)) {
    return refuse_text(t.op, "counts asks for %lld block tables of width %lld; block_tables has %lld entries",
                       static_cast<long long>(args->num_seqs), static_cast<long long>(args->table_width),
                       static_cast<long long>(t.size(kBlockTables)));
  }
  if (t.size(kPositions) < args->tokens || t.size(kSlots) < args->tokens || t.size(kContextLens) < args->num_seqs ||
      t.size(out_of(t)) < args->tokens * args->heads * args->dim) {
    return refuse_text(t.op, "%lld tokens and %lld sequences, but %lld positions, %lld slots, %lld context_lens and "
                       "%lld elements of output", static_cast<long long>(args->tokens),
                       static_cast<long long>(args->num_seqs), static_cast<long long>(t.size(kPositions)),
                       static_cast<long long>(t.size(kSlots)), static_cast<long long>(t.size(kContextLens)),
                       static_cast<long long>(t.size(out_of(t))));
  }
  return 0;
}

int read_options(const Tensors& t, RotaryAttentionArgs* args) {
  if (has_window(t)) {
    if (!t.has_dtype(kWindow, "int32") || t.size(kWindow) != 1 || *t.as<int32_t>(kWindow) < 0) {
      return refuse_text(t.op, "window must be one int32, 0 for none, not below");
    }
    args->window = *t.as<int32_t>(kWindow);
  }
  if (has_sinks(t)) {
    if (!t.has_dtype(kSinks, "float32") || t.size(kSinks) != args->heads) {
      return refuse_text(t.op, "sinks has %lld elements of %s; it must have %lld float32, one for each query head",
                         static_cast<long long>(t.size(kSinks)), t.dtypes[kSinks], static_cast<long long>(args->heads));
    }
    args->sinks = t.as<float>(kSinks);
  }
  if (!has_norms(t)) return 0;
  args->gamma_dtype = t.dtype(kQueryGamma);
  for (const int i : {kQueryGamma, kKeyGamma}) {
    const bool fits = t.dtype(i) == args->dtype || t.has_dtype(i, "float32");
    if (fits && t.dtype(i) == args->gamma_dtype && t.size(i) == args->dim) continue;
    return refuse_text(t.op, "argument %d has %lld elements of %s; a norm's weight has %lld of the type of qkv or of "
                       "float32, both norms the same", i,
                       static_cast<long long>(t.size(i)), t.dtypes[i], static_cast<long long>(args->dim));
  }
  if (!t.has_dtype(kEpsilon, "float32") || t.size(kEpsilon) != 1) {
    return refuse_text(t.op, "epsilon must be one float32");
  }
  args->query_gamma = t.data[kQueryGamma];
  args->key_gamma = t.data[kKeyGamma];
  args->epsilon = *t.as<float>(kEpsilon);
  return 0;
}

}  // namespace

int read_rotary_attention(const Tensors& t, RotaryAttentionArgs* args, std::vector<int64_t>* query_starts) {
  if (t.count != kWindow + 1 && t.count != kQueryGamma + 1 && !has_sinks(t) && t.count != kEpsilon + 2) {
    return refuse_text(t.op, "got %d arguments; it takes 11, 12, 13 or 15 and gives 1", t.count);
  }
  int error = check_dtypes(t);
  if (error == 0) error = read_shapes(t, args);
  if (error == 0) error = read_counts(t, args);
  if (error == 0) error = read_options(t, args);
  if (error != 0) return error;
  args->qkv = t.data[kQkv];
  args->out = t.data[out_of(t)];
  args->key_cache = t.data[kKeyCache];
  args->value_cache = t.data[kValueCache];
  args->cos = t.as<float>(kCos);
  args->sin = t.as<float>(kSin);
  args->positions = t.as<int32_t>(kPositions);
  args->slots = t.as<int32_t>(kSlots);
  args->block_tables = t.as<int32_t>(kBlockTables);
  args->context_lens = t.as<int32_t>(kContextLens);
  args->query_lens = t.as<int32_t>(kQueryLens);
  args->scale = 1.0f / std::sqrt(static_cast<float>(args->dim));
  query_starts->resize(static_cast<size_t>(args->num_seqs) + 1);
  return check_rotary_attention(t.op, args, query_starts->data());
}

int rotary_attention(const Tensors& t) {
  RotaryAttentionArgs args{};
  std::vector<int64_t> query_starts;
  const int error = read_rotary_attention(t, &args, &query_starts);
  if (error == 0) kernels().rotary_attention(args);
  return error;
}

}  // namespace llmk

LLMK_CUSTOM_OP(RotaryAttention, 1, rotary_attention(t))

extern "C" {

// Returns the shape of the output: the shape of qkv without the columns of keys and values. The shape of the cache
// gives the number of kv heads, and the shape of `cos` gives the size of a head.
LLMK_ENTRY std::vector<int64_t> RotaryAttentionInferShape(int* ndims, int64_t** shapes, AotExtra*) {
  std::vector<int64_t> out(shapes[llmk::kQkv], shapes[llmk::kQkv] + ndims[llmk::kQkv]);
  out.back() -= 2 * shapes[llmk::kKeyCache][1] * shapes[llmk::kCos][1];
  return out;
}

LLMK_ENTRY TypeId RotaryAttentionInferType(std::vector<TypeId> types, AotExtra*) { return types[0]; }

}  // extern "C"
