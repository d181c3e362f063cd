// SiLU and MoveTo, which MindFormers' models use and our own do not.
#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../ops/checks.h"
#include "call.h"

namespace llmk {

// SiLU(input), as ops/silu.h has it. MindSpore's own CPU kernel takes no bfloat16, and two of five of its float16
// results are not the nearest.
int plugin_silu(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  const SiluArgs args{call.data[0], call.data[call.count - 1], call.size(0), call.dtype(0)};
  if (args.count > 0) kernels().silu(args);
  return 0;
}

// MoveTo(input, to, blocking): a copy on another device. All memory here is the host's, so any place is this one.
int plugin_move_to(const Call& call) {
  const int out = call.count - 1;
  const int64_t bytes = call.size(0) * dtype_bytes(call.dtypes[0]);
  if (bytes == 0 && call.size(0) != 0) return refuse_text(call.op, "type %s is not known", call.dtypes[0]);
  if (call.data[0] != call.data[out]) std::memmove(call.data[out], call.data[0], static_cast<size_t>(bytes));
  return 0;
}

}  // namespace llmk
