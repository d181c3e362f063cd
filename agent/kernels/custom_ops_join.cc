// The custom operators JoinNorms and JoinNormsKeepSecond of the fused graph. One of them is the first operator of a
// head, a small network that makes drafts. For each token, it joins the norms of the embedding and of the hidden state.
#include <cstdint>
#include <cstring>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/tensors.h"
#include "common/thread_pool.h"
#include "custom_ops.h"

namespace llmk {
namespace {

// JoinNorms: first, second [tokens, width], the gammas of both norms, epsilon, counts -> out [tokens, 2 * width].
// out = [norm(first), norm(second)] for each token. JoinNormsKeepSecond has a second result [tokens, width]:
// norm(second).
int join_norms(const Tensors& t, bool keeps_second) {
  enum { kFirst, kSecond, kFirstGamma, kSecondGamma, kEpsilon, kCounts, kOut, kKept };
  const int results = keeps_second ? 2 : 1;
  if (t.count != kOut + results) {
    return refuse_text(t.op, "got %d arguments; it takes 6 and gives %d", t.count, results);
  }
  int error = check_float_type(t, kFirst);
  if (error != 0) return error;
  const DType dtype = t.dtype(kFirst);
  const int64_t width = t.dim(kFirst, -1), rows = rows_of(t, kCounts, 0, t.dim(kFirst, 0));
  if (rows < 0) return kBadArgument;
  for (const int gamma : {static_cast<int>(kFirstGamma), static_cast<int>(kSecondGamma)}) {
    if (error == 0) error = check_gamma(t, gamma, kEpsilon, width, dtype);
  }
  if (error == 0) error = check_matrix(t, kSecond, rows, width, dtype);
  if (error == 0) error = check_matrix(t, kOut, rows, 2 * width, dtype);
  if (error == 0 && keeps_second) error = check_matrix(t, kKept, rows, width, dtype);
  if (error != 0) return error;
  const float epsilon = *t.as<float>(kEpsilon);
  const NormInput first{t.as<char>(kFirst), nullptr, nullptr, t.data[kFirstGamma],
                        epsilon, width, dtype, t.dtype(kFirstGamma)};
  const NormInput second{t.as<char>(kSecond), nullptr, nullptr, t.data[kSecondGamma],
                         epsilon, width, dtype, t.dtype(kSecondGamma)};
  const int64_t bytes = size_of(dtype) * width, per_task = larger(1, 16384 / width);
  parallel_for(ceil_div(rows, per_task), [&](int64_t task) {
    for (int64_t row = task * per_task; row < smaller((task + 1) * per_task, rows); ++row) {
      char* out = t.as<char>(kOut) + 2 * row * bytes;
      norm_row(first, row, out);
      norm_row(second, row, out + bytes);
      if (keeps_second) std::memcpy(t.as<char>(kKept) + row * bytes, out + bytes, static_cast<size_t>(bytes));
    }
  });
  return 0;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(JoinNorms, 1, join_norms(t, false))
LLMK_CUSTOM_OP(JoinNormsKeepSecond, 2, join_norms(t, true))
