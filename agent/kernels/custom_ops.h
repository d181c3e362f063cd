// The custom ops as functions, for the op that runs several of them (custom_ops_layer.cc). Arguments as in the graph,
// inputs first; 0, or an error code after one line on standard error.
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

// Reads and checks the arguments of RotaryAttention; `query_starts` keeps memory that the arguments point to.
int read_rotary_attention(const Tensors& t, RotaryAttentionArgs* args, std::vector<int64_t>* query_starts);

using CustomOp = int (*)(const Tensors& t);

// Runs the operator, whose last `outputs` arguments it writes; remembers the call where launches are being recorded
// (plugin/launches.h).
int launch(CustomOp custom_op, int outputs, const Tensors& tensors);

// Which argument is which in an operator of the output layer.
struct LmHeadArguments {
  int hidden, residual, gamma, epsilon, weight, last_tokens, logits, best_ids, counts, done;
};

// Logits of each sampling sequence, the largest's token in best_ids [S + 1 or more] and its value in best_values [S].
// The rows of logits may be longer than the weight has columns.
int lm_head_rows(const Tensors& t, const LmHeadArguments& at, float* best_values);

// Last of all: the step's number, counts[3], as the last of best_ids and in `done` [1]; whoever finds it there knows
// that logits and ids are those of the step.
void say_done(const Tensors& t, const LmHeadArguments& at);

// What a norm reads and writes, whole matrices.
struct NormInput {
  const char* x;
  const char* residual;  // null: no sum
  char* sum;
  const void* gamma;
  float epsilon;
  int64_t width;
  DType dtype;
};

// Row `from` of the input, normed to `out`.
void norm_row(const NormInput& in, int64_t from, void* out);

// 0, or an error code after one line on standard error.
int check_float_type(const Tensors& t, int i);
int check_matrix(const Tensors& t, int i, int64_t rows, int64_t width, DType dtype);
int check_gamma(const Tensors& t, int gamma, int epsilon, int64_t width, DType dtype);
int check_weight(const Tensors& t, int i, int64_t columns, int64_t depth, bool gated);

// How many rows the step has: counts[which], at most `limit`; an error is told and gives -1.
int64_t rows_of(const Tensors& t, int counts, int which, int64_t limit);

// The header of argument i, a packed weight; null after a refusal.
const PackedWeightHeader* packed_weight(const Tensors& t, int i);

}  // namespace llmk

// MindSpore's entry of an operator with so many outputs, which are its last arguments.
#define LLMK_CUSTOM_OP(name, outputs, ...)                                                                          \
  static int run_##name(const llmk::Tensors& t) { return llmk::__VA_ARGS__; }                                       \
  extern "C" LLMK_ENTRY int name(int nparam, void** params, int* ndims,                 \
                                                             int64_t** shapes, const char** dtypes, void*, void*) { \
    const llmk::StandardFloatingPoint scope;                                                                        \
    return llmk::launch(run_##name, outputs, {#name, nparam, params, ndims, shapes, dtypes});                       \
  }
