// The custom operators of a model that several agents share. AllReduceRows, ShardedEmbedTokens and ShardedLmHead run
// within a pipeline stage, HandOver between stages. The sharded decoder layers are in custom_ops_layer.cc.
//
// As in custom_ops_fused.cc, tensors have the size of the largest step, and `counts` gives the size of this step.
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "exchange/collectives.h"
#include "ops/gather.h"

namespace llmk {
namespace {

int64_t bytes_of(DType dtype, int64_t rows, int64_t width) { return size_of(dtype) * rows * width; }

// AllReduceRows: x [tokens, width], counts -> the sum of x over the agents.
int all_reduce_rows(const Tensors& t) {
  enum { kX, kCounts, kOut };
  if (t.count != 3) return refuse_text(t.op, "got %d arguments; it takes 2 and gives 1", t.count);
  int error = check_float_type(t, kX);
  if (error != 0) return error;
  const int64_t width = t.dim(kX, -1), rows = rows_of(t, kCounts, 0, t.dim(kX, 0));
  if (rows < 0) return kBadArgument;
  error = check_matrix(t, kOut, rows, width, t.dtype(kX));
  return error != 0 ? error : all_reduce(t.op, t.dtype(kX), t.data[kX], t.dtype(kOut), t.data[kOut], rows * width);
}

// ShardedEmbedTokens: ids [tokens], table [own vocabulary, width], vocabulary [2], counts -> the embeddings of the ids
// [tokens, width]. `vocabulary` is {first id of the table, size of the whole vocabulary}. For an id outside its own
// table, an agent uses a row of zeros. The rows are then added over the agents, and only one agent's row is not zero.
int sharded_embed_tokens(const Tensors& t) {
  enum { kIds, kTable, kVocabulary, kCounts, kOut };
  if (t.count != 5) return refuse_text(t.op, "got %d arguments; it takes 4 and gives 1", t.count);
  const int64_t rows = rows_of(t, kCounts, 0, t.dim(kOut, 0));
  if (rows < 0) return kBadArgument;
  if (!t.has_dtype(kIds, "int32") || t.size(kIds) < rows || t.ndims[kTable] != 2 || t.ndims[kOut] != 2 ||
      t.dim(kTable, 1) != t.dim(kOut, 1) || t.dtype(kTable) != t.dtype(kOut) || check_float_type(t, kTable) != 0 ||
      !t.has_dtype(kVocabulary, "int32") || t.size(kVocabulary) != 2) {
    return refuse_text(t.op, "takes int32 ids, a table [vocabulary, width], int32 vocabulary [2] and counts");
  }
  const int32_t* ids = t.as<int32_t>(kIds);
  const int64_t first = t.as<int32_t>(kVocabulary)[0], whole = t.as<int32_t>(kVocabulary)[1];
  const int64_t width = t.dim(kTable, 1), bytes = bytes_of(t.dtype(kTable), 1, width);
  for (int64_t i = 0; i < rows; ++i) {
    if (ids[i] < 0 || ids[i] >= whole) return refuse_index(t.op, "ids", i, ids[i], whole);
  }
  for (int64_t i = 0; i < rows; ++i) {
    char* out = t.as<char>(kOut) + i * bytes;
    const int64_t own = ids[i] - first;
    if (own >= 0 && own < t.dim(kTable, 0)) {
      std::memcpy(out, t.as<char>(kTable) + own * bytes, static_cast<size_t>(bytes));
    } else {
      std::memset(out, 0, static_cast<size_t>(bytes));
    }
  }
  return all_reduce(t.op, t.dtype(kOut), t.data[kOut], t.dtype(kOut), t.data[kOut], rows * width);
}

// The largest logit of one sequence in this agent's part of the vocabulary, and its token.
struct Best {
  float value;
  int32_t id;
};
static_assert(sizeof(Best) == 8, "two elements of gather_rows_to_first");

// Writes to best[i] the token with the largest logit of all agents, the smallest token on a tie. If an agent has found
// a NaN or an infinity, it passes the value NaN, and best[i] becomes -1. Only the first agent of the stage receives
// results. Sequences that do not sample (last < 0) are skipped.
int best_of_all(const char* op, int64_t seqs, const int32_t* last, const Best* own, int32_t* best) {
  const int size = exchange_size();
  Best* all = static_cast<Best*>(thread_scratch(kScratchRows, seqs * size * static_cast<int64_t>(sizeof(Best))));
  GatherRowsArgs args{own, all, seqs, 2, 2, 2 * size, 2 * size};
  const int error = gather_rows_to_first(op, args);
  if (error != 0 || exchange_index() != 0) return error;
  for (int64_t i = 0; i < seqs; ++i) {
    if (last[i] < 0) continue;
    Best top = own[i];
    for (int r = 1; r < size; ++r) {
      const Best& other = all[i * size + r];
      if (other.value > top.value || other.value != other.value) top = other;
    }
    best[i] = top.value == top.value ? top.id : -1;
  }
  return 0;
}

// ShardedLmHead: like LmHead, but each agent has a part of the vocabulary. `vocabulary` [3] is {first token id of this
// agent, size of the whole vocabulary, size of each agent's part except the last}.
//
// The first agent receives the logits of all agents [S, whole vocabulary] and the token with the largest logit. Every
// other agent keeps the logits of its own part [S, own part].
int sharded_lm_head(const Tensors& t) {
  enum { kHidden, kResidual, kGamma, kEpsilon, kWeight, kLastTokens, kLogits, kBestIds, kVocabulary, kCounts, kDone };
  if (t.count != 11) return refuse_text(t.op, "got %d arguments; it takes 10 and gives 1", t.count);
  if (!t.has_dtype(kVocabulary, "int32") || t.size(kVocabulary) != 3) {
    return refuse_text(t.op, "vocabulary must be int32 [3]");
  }
  const PackedWeightHeader* weight = packed_weight(t, kWeight);
  if (weight == nullptr) return kBadArgument;
  const bool first_agent = exchange_index() == 0;
  const int32_t* vocabulary = t.as<int32_t>(kVocabulary);
  const int64_t first = vocabulary[0], whole = vocabulary[1], stride = vocabulary[2], own = weight->columns;
  const int64_t out_stride = t.dim(kLogits, -1), seqs = rows_of(t, kCounts, 1, t.dim(kLogits, 0));
  if (seqs < 0) return kBadArgument;
  if (out_stride != (first_agent ? whole : own) || first != stride * exchange_index() || own > stride ||
      first + own > whole) {
    return refuse_text(t.op, "tokens %lld to %lld of %lld, %lld an agent, do not fit logits of %lld",
                       static_cast<long long>(first), static_cast<long long>(first + own),
                       static_cast<long long>(whole), static_cast<long long>(stride),
                       static_cast<long long>(out_stride));
  }
  if (!t.has_dtype(kLastTokens, "int32") || t.size(kLastTokens) < seqs) {
    return refuse_text(t.op, "takes int32 last_tokens, of %lld sequences", static_cast<long long>(seqs));
  }
  Best* best =
      static_cast<Best*>(thread_scratch(kScratchHistory, larger(1, seqs) * static_cast<int64_t>(sizeof(Best))));
  float* values = static_cast<float*>(thread_scratch(kScratchBest, larger(1, seqs) * 4));
  const LmHeadArguments at{kHidden,     kResidual, kGamma,   kEpsilon, kWeight,
                           kLastTokens, kLogits,   kBestIds, kCounts,  kDone};
  int error = lm_head_rows(t, at, values);
  if (error != 0) return error;
  const int32_t* last = t.as<int32_t>(kLastTokens);
  int32_t* ids = t.as<int32_t>(kBestIds);
  for (int64_t i = 0; i < seqs; ++i) best[i] = {values[i], static_cast<int32_t>(first + ids[i])};
  error = best_of_all(t.op, seqs, last, best, ids);
  // Finds groups of consecutive sequences that sample, and gathers the logits of each group in one call.
  for (int64_t begin = 0, end; begin < seqs && error == 0; begin = end) {
    end = begin + 1;
    if (last[begin] < 0) continue;
    while (end < seqs && last[end] >= 0) ++end;
    float* logits = t.as<float>(kLogits) + begin * out_stride;
    error = gather_rows_to_first(t.op, {logits, logits, end - begin, own, stride, whole, out_stride});
  }
  if (error == 0) mark_done(t, at);
  return error;
}

// HandOver. Inputs: hidden, residual and stream, each [tokens, width], and counts. Output: the number of the step as
// int32 [1], a copy of counts[3]. Writes hidden + residual to `stream`, the input of the next pipeline stage.
int hand_over(const Tensors& t) {
  enum { kHidden, kResidual, kStream, kCounts, kOut };
  if (t.count != 5) return refuse_text(t.op, "got %d arguments; it takes 4 and gives 1", t.count);
  int error = check_float_type(t, kHidden);
  if (error != 0) return error;
  const int64_t width = t.dim(kHidden, -1), rows = rows_of(t, kCounts, 0, t.dim(kHidden, 0));
  if (rows < 0) return kBadArgument;
  for (const int i : {static_cast<int>(kResidual), static_cast<int>(kStream)}) {
    if (error == 0) error = check_matrix(t, i, rows, width, t.dtype(kHidden));
  }
  if (error != 0) return error;
  const void* parts[] = {t.data[kHidden], t.data[kResidual]};
  kernels().sum_parts(t.dtype(kHidden), parts, 2, t.dtype(kHidden), t.data[kStream], rows * width);
  t.as<int32_t>(kOut)[0] = t.as<int32_t>(kCounts)[3];
  return 0;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(AllReduceRows, 1, all_reduce_rows(t))
LLMK_CUSTOM_OP(ShardedEmbedTokens, 1, sharded_embed_tokens(t))
LLMK_CUSTOM_OP(ShardedLmHead, 1, sharded_lm_head(t))
LLMK_CUSTOM_OP(HandOver, 1, hand_over(t))
