// Gathers whole rows of `row_bytes` bytes, with elements of any type.
//
//   table [batch, outer, limit, row]   indices [batch, count]   ->   out [batch, outer, count, row]
//   out[b][o][i] = table[b][o][indices[b][i]]; a negative index counts from the end
#pragma once
#include <cstdint>

namespace llmk {

struct GatherArgs {
  const void* table;
  const void* indices;  // int64 if wide_indices, otherwise int32
  void* out;
  int64_t batch, outer, limit, count, row_bytes;
  bool wide_indices;
};

// Gathers the rows. Returns 0. If an index is out of range, gathers nothing, writes one line to standard error and
// returns an error code.
int gather_rows(const char* op, const GatherArgs& args);

}  // namespace llmk
