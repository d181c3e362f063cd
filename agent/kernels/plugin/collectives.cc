// The primitives AllReduce and AllGather among the agents of a stage, over shared memory. (On an Ascend, HCCL runs
// them.) The argument that names a group is ignored, because the agents of the stage are the only group.
#include "../exchange/collectives.h"
#include "call.h"

#include "../common/dtype_bytes.h"

namespace llmk {

// Runs AllReduce(x) -> the sum of x over the ranks. Elements are added in the order of the ranks, in float32, and
// rounded once.
int plugin_all_reduce(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  const int out = call.count - 1;
  return all_reduce(call.op, call.dtype(0), call.data[0], call.dtype(out), call.data[out], call.size(0));
}

// Runs AllGather(x [n, ...]) -> [size * n, ...]: joins the tensors x of all ranks, in the order of the ranks. x may
// have any type.
int plugin_all_gather(const Call& call) {
  const int64_t bytes = dtype_bytes(call.dtypes[0]) * call.size(0);
  const int out = call.count - 1;
  if (bytes == 0 || call.size(out) != call.size(0) * exchange_size()) {
    return refuse_text(call.op, "%lld elements of %s of %d agents do not make %lld",
                       static_cast<long long>(call.size(0)), call.dtypes[0], exchange_size(),
                       static_cast<long long>(call.size(out)));
  }
  return all_gather(call.op, call.data[0], call.data[out], bytes);
}

}  // namespace llmk
