// The primitive ApplyRotaryPosEmb. This file translates its arguments for the kernel of ops/rotary.h.
#include <vector>

#include "../common/kernel_table.h"
#include "../ops/checks.h"
#include "call.h"

namespace llmk {

// Finds the row of cos and sin for each token and writes it to `positions`. If the tables have one row per token, in
// order, leaves `positions` empty. Otherwise computes the rows from `position_ids`, whose meaning depends on
// cos_format:
//
//   0 and 1: positions, one per token. For a query [batch, length, width], one list for all batches is enough.
//   2 and 3: lengths of sequences that start at position 0 (MindFormers' prefill).
//
// Formats 0 and 2 rotate halves, formats 1 and 3 interleaved pairs.
static int rotary_positions(const Call& call, int64_t tokens, int64_t rows, int64_t format,
                            std::vector<int32_t>* positions) {
  if (rows == tokens) return 0;
  const std::vector<int32_t> given = integers(call, 4);
  const int64_t count = static_cast<int64_t>(given.size());
  const int64_t length = call.ndims[0] >= 3 ? call.dim(0, 1) : tokens;
  if (format < 2 && (count == tokens || (count > 0 && count == length))) {
    for (int64_t t = 0; t < tokens; ++t) positions->push_back(given[static_cast<size_t>(t % count)]);
  } else if (format >= 2 && call.ndims[0] >= 3 && length > 1) {
    for (int64_t t = 0; t < tokens; ++t) positions->push_back(static_cast<int32_t>(t % length));
  } else if (format >= 2) {
    for (const int32_t len : given) {
      for (int32_t i = 0; i < len && static_cast<int64_t>(positions->size()) <= tokens; ++i) positions->push_back(i);
    }
  }
  if (static_cast<int64_t>(positions->size()) != tokens) {
    return refuse_text(call.op, "%lld tokens, cos of %lld rows and %lld position_ids do not fit cos_format %lld",
                       static_cast<long long>(tokens), static_cast<long long>(rows), static_cast<long long>(count),
                       static_cast<long long>(format));
  }
  return check_positions(call.op, positions->data(), tokens, rows);
}

int plugin_rotary(const Call& call) {
  const int64_t dim = call.dim(2, -1), format = call.integer(5);
  int error = check_equal_dtype(call, 0, 1);
  if (error == 0) error = check_equal_dtype(call, 2, 3);
  if (error != 0) return error;
  // The query is [tokens, width], [batch, length, width] or [batch, length, heads, dim].
  const int token_axes = call.ndims[0] == 4 ? 2 : call.ndims[0] - 1;
  const int64_t tokens = call.size(0, 0, token_axes);
  const int64_t query_width = call.size(0, token_axes), key_width = call.size(1, token_axes);
  if (dim < 2 || dim % 2 != 0 || query_width % dim != 0 || key_width % dim != 0 ||
      call.size(1) != tokens * key_width || format < 0 || format > 3) {
    return refuse_text(call.op, "query width %lld, key width %lld, cos width %lld, cos_format %lld do not fit",
                       static_cast<long long>(query_width), static_cast<long long>(key_width),
                       static_cast<long long>(dim), static_cast<long long>(format));
  }
  if (tokens == 0) return 0;
  std::vector<int32_t> positions;
  error = rotary_positions(call, tokens, call.size(2) / dim, format, &positions);
  if (error != 0) return error;
  for (int i = 0; i < 2; ++i) {
    const int64_t width = i == 0 ? query_width : key_width;
    RotaryArgs args{};
    args.x = call.data[i];
    args.out = call.data[call.count - 2 + i];
    args.cos = call.data[2];
    args.sin = call.data[3];
    args.positions = positions.empty() ? nullptr : positions.data();
    args.tokens = tokens;
    args.heads = width / dim;
    args.dim = dim;
    args.x_stride = args.out_stride = width;
    args.dtype = call.dtype(0);
    args.table_dtype = call.dtype(2);
    args.interleaved = format % 2 == 1;
    kernels().rotary(args);
  }
  return 0;
}

}  // namespace llmk
