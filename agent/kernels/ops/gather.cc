#include "gather.h"

#include <cstring>

#include "../common/check.h"
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

static int64_t index_at(const GatherArgs& args, int64_t i) {
  const int64_t index = args.wide_indices ? static_cast<const int64_t*>(args.indices)[i]
                                          : static_cast<const int32_t*>(args.indices)[i];
  return index < 0 ? index + args.limit : index;
}

int gather_rows(const char* op, const GatherArgs& args) {
  for (int64_t i = 0; i < args.batch * args.count; ++i) {
    const int64_t index = index_at(args, i);
    if (index < 0 || index >= args.limit) return refuse_index(op, "indices", i, index, args.limit);
  }
  const int64_t rows = args.batch * args.outer * args.count;
  if (rows == 0 || args.row_bytes == 0) return 0;
  const int64_t per_task = larger(1, 65536 / args.row_bytes);
  parallel_for(ceil_div(rows, per_task), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * per_task, rows);
    for (int64_t row = task * per_task; row < end; ++row) {
      const int64_t plane = row / args.count, batch = plane / args.outer;
      const int64_t index = index_at(args, batch * args.count + row % args.count);
      std::memcpy(static_cast<char*>(args.out) + row * args.row_bytes,
                  static_cast<const char*>(args.table) + (plane * args.limit + index) * args.row_bytes,
                  static_cast<size_t>(args.row_bytes));
    }
  });
  return 0;
}

}  // namespace llmk
