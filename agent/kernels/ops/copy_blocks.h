// Copies whole blocks of the KV cache within the device, or between device and host. A move copies the block in every
// array of the cache: the keys and the values of every layer.
//
//   device[a] [device_blocks, block_bytes], host[a] [host_blocks, block_bytes] for each array a
//   moves [num_moves, 3]: kind, source block, destination block; run in this order
//
// All moves of an array run in one thread, so they run in order.
#pragma once
#include <cstdint>

namespace llmk {

enum MoveKind : int32_t { kCopyBlock = 0, kSwapOutBlock = 1, kSwapInBlock = 2 };

struct CopyBlocksArgs {
  void* const* device;
  void* const* host;  // may be null if host_blocks is 0
  const int32_t* moves;
  int64_t num_arrays, num_moves, block_bytes, device_blocks, host_blocks;
};

// Runs the moves. Returns 0. If a kind or a block is out of range, copies nothing, writes one line to standard error
// and returns an error code.
int copy_blocks(const char* op, const CopyBlocksArgs& args);

}  // namespace llmk
