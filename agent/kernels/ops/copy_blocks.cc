#include "copy_blocks.h"

#include <cstring>

#include "../common/check.h"
#include "../common/thread_pool.h"

namespace llmk {

static int check_moves(const char* op, const CopyBlocksArgs& args) {
  for (int64_t m = 0; m < args.num_moves; ++m) {
    const int32_t kind = args.moves[3 * m], source = args.moves[3 * m + 1], destination = args.moves[3 * m + 2];
    if (kind < kCopyBlock || kind > kSwapInBlock) return refuse_index(op, "kind", m, kind, kSwapInBlock + 1);
    const int64_t source_limit = kind == kSwapInBlock ? args.host_blocks : args.device_blocks;
    const int64_t destination_limit = kind == kSwapOutBlock ? args.host_blocks : args.device_blocks;
    if (source < 0 || source >= source_limit) return refuse_index(op, "source", m, source, source_limit);
    if (destination < 0 || destination >= destination_limit)
      return refuse_index(op, "destination", m, destination, destination_limit);
  }
  return 0;
}

static void copy_block(const CopyBlocksArgs& args, int64_t array, const int32_t* move) {
  const void* from = move[0] == kSwapInBlock ? args.host[array] : args.device[array];
  void* to = move[0] == kSwapOutBlock ? args.host[array] : args.device[array];
  if (from == to && move[1] == move[2]) return;
  std::memcpy(static_cast<char*>(to) + move[2] * args.block_bytes,
              static_cast<const char*>(from) + move[1] * args.block_bytes, static_cast<size_t>(args.block_bytes));
}

int copy_blocks(const char* op, const CopyBlocksArgs& args) {
  const int error = check_moves(op, args);
  if (error != 0 || args.num_moves == 0) return error;
  parallel_for(args.num_arrays, [&](int64_t array) {
    for (int64_t m = 0; m < args.num_moves; ++m) copy_block(args, array, args.moves + 3 * m);
  });
  return 0;
}

}  // namespace llmk
