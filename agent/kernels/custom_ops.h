// The custom operators of the fused graph as C++ functions, so that custom_ops_layer.cc can run several of them in one
// operator.
//
// Each function gets the tensors of the operator, inputs before outputs. Each function returns 0, or writes one line to
// standard error and returns an error code.
#pragma once
#include <vector>

#include "common/tensors.h"
#include "ops/linear.h"
#include "ops/rotary_attention.h"

namespace llmk {

int norm_linear(const Tensors& t, bool has_residual);
int packed_linear(const Tensors& t);
int gated_mlp(const Tensors& t);
int rotary_attention(const Tensors& t);

// Reads and checks the arguments of RotaryAttention. Fills `args` and the memory `query_starts`, to which `args` then
// points.
int read_rotary_attention(const Tensors& t, RotaryAttentionArgs* args, std::vector<int64_t>* query_starts);

using CustomOp = int (*)(const Tensors& t);

// Runs a custom operator, whose last `outputs` tensors are outputs. While launches are being recorded
// (plugin/launches.h), also records the call.
int launch(CustomOp custom_op, int outputs, const Tensors& tensors);

// The index of each argument of LmHead or ShardedLmHead. The two operators take their arguments in different orders.
struct LmHeadArguments {
  int hidden, residual, gamma, epsilon, weight, last_tokens, logits, best_ids, counts, done;
};

// Computes the logits of every sequence that samples. S is the number of sequences. Writes the id of the largest logit
// to best_ids [at least S + 1] and this logit to best_values [S].
//
// A negative entry of last_tokens means that the sequence does not sample. Then its row of logits is not written, and
// its best id is -1. A row of `logits` may have more elements than the weight has columns.
int lm_head_rows(const Tensors& t, const LmHeadArguments& at, float* best_values);

// Writes the number of the step, which is counts[3], to the only element of `done` and to the last element of best_ids.
// This is the last write of the step. So if a reader finds this number, the logits and ids belong to this step.
void mark_done(const Tensors& t, const LmHeadArguments& at);

// The inputs of an RMSNorm: out = norm(x + residual) * gamma. Each row has `width` elements of type `dtype`.
struct NormInput {
  const char* x;
  const char* residual;  // null: the norm of x alone, without a sum
  char* sum;
  const void* gamma;
  float epsilon;
  int64_t width;
  DType dtype;
  DType gamma_dtype;
};

// Computes the norm of row `from` of the inputs and writes it to `out`. If there is a residual, also stores x +
// residual in `in.sum`.
void norm_row(const NormInput& in, int64_t from, void* out);

// Checks of arguments. Each returns 0, or writes one line to standard error and returns an error code.
int check_float_type(const Tensors& t, int i);
int check_matrix(const Tensors& t, int i, int64_t rows, int64_t width, DType dtype);
int check_gamma(const Tensors& t, int gamma, int epsilon, int64_t width, DType dtype);
int check_weight(const Tensors& t, int i, int64_t columns, int64_t depth, bool gated);

// Returns counts[which]: the number of the step's tokens if `which` is 0, of its sequences if `which` is 1. If the
// number is negative or above `limit`, reports an error and returns -1.
int64_t rows_of(const Tensors& t, int counts, int which, int64_t limit);

// Returns the adapter slots of the step's rows, or null if no row has an adapter (ops/lora.h).
const int32_t* row_adapters(const Tensors& t, int counts);

// Returns the header of argument i, which must be a packed weight. Returns null after an error.
const PackedWeightHeader* packed_weight(const Tensors& t, int i);

}  // namespace llmk

// Defines the entry that MindSpore calls for an operator whose last `outputs` arguments are outputs.
#define LLMK_CUSTOM_OP(name, outputs, ...)                                                                          \
  static int run_##name(const llmk::Tensors& t) { return llmk::__VA_ARGS__; }                                       \
  extern "C" LLMK_ENTRY int name(int nparam, void** params, int* ndims,                 \
                                                             int64_t** shapes, const char** dtypes, void*, void*) { \
    const llmk::StandardFloatingPoint scope;                                                                        \
    return llmk::launch(run_##name, outputs, {#name, nparam, params, ndims, shapes, dtypes});                       \
  }
