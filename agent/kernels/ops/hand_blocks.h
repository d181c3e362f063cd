// Copies blocks of the KV cache to or from the hand-over pool, which the agents of several replicas map. Each block of
// the pool has a header, which identifies the content of the block (llm_serving/handover/header.py), and a checksum.
//
//   device[a] [device_blocks, part_bytes] for each array a; pool [pool_blocks, num_arrays, part_bytes]
//   moves [num_moves, 3]: kind (kHandOutBlock or kHandInBlock), source block, destination block
//   expected [num_moves, kHeaderBytes]
//
// A block of the pool is contiguous, so that it can be sent to another machine in one piece.
#pragma once
#include <cstdint>

namespace llmk {

enum HandKind : int32_t { kHandOutBlock = 3, kHandInBlock = 4 };

constexpr int64_t kHeaderBytes = 32;
constexpr int kChecksumWords = 2;

// The header and the checksum of a block in the pool. A header of zeros means that the block has no content.
struct HandedHeader {
  unsigned char header[kHeaderBytes];
  uint64_t checksum[kChecksumWords];
  uint64_t unused[2];
};
static_assert(sizeof(HandedHeader) == 64, "one cache line");

struct HandBlocksArgs {
  void* const* device;
  char* pool;
  HandedHeader* headers;
  const int32_t* moves;
  const unsigned char* expected;
  int32_t* faults;
  int64_t num_arrays, num_moves, part_bytes, device_blocks, pool_blocks;
};

// Runs the moves, with one thread for each block. A move to the pool writes the block, the header in `expected` and the
// checksum. A move from the pool compares the stored header with `expected`, copies the block and compares the
// checksum. If the header or the checksum is wrong, sets faults[m] to 1. All other elements of `faults` stay unchanged.
// Returns 0. If a kind or a block is out of range, copies nothing, writes one line to standard error and returns an
// error code.
int hand_blocks(const char* op, const HandBlocksArgs& args);

// Writes the checksum of a block to checksum [kChecksumWords]. The block has `parts` parts of `part_bytes` bytes each,
// one after another at `data`.
void block_checksum(const char* data, int64_t parts, int64_t part_bytes, uint64_t* checksum);

}  // namespace llmk
