// Sums and gathers arrays of the agents of a stage, through shared memory that is called the exchange
// (llm_serving/ipc/exchange.py).
//
// An array is exchanged in pieces, at most as large as a buffer. Every agent writes its piece into its own buffer. Then
// it publishes the piece: it raises its counter, which the other agents wait for. When all agents have published their
// pieces, each agent adds up all pieces itself, in the order of the ranks. It adds in float32 and rounds once. So all
// agents get the same bits, and an element of the sum depends only on its own terms.
//
// Each agent has two buffers, so its piece n overwrites its piece n - 2. Before an agent writes piece n, it
// waits until all agents have published piece n - 1. This is sufficient, because an agent publishes piece n - 1 only
// after it has read piece n - 2. All agents of a stage must call the same functions in the same order.
#pragma once
#include <cstdint>

#include "../common/types.h"

namespace llmk {

// The shared memory of a stage's exchange, and the index of this agent in the stage. agent/kernels/collectives.py fills
// this struct.
struct ExchangeArgs {
  void* base;
  int64_t down;     // offset of the word that is set when the group is down
  int64_t lines;    // offset of the flag line of the first agent; the flag lines of the other agents follow
  int64_t buffers;  // offset of the first agent's kBuffers buffers; the buffers of the other agents follow
  int64_t piece_bytes;  // size of a buffer
  int64_t timeout_ms;
  int64_t bell;  // offset of the line that announces changes to other machines; 0 if all agents are on one machine
  int32_t size;
  int32_t index;
};

// Opens the exchange. Each process calls it once, before the other functions. Returns 0 or an error code.
int open_exchange(const ExchangeArgs& args);

// Returns the number of agents of the stage, or 1 if there is no exchange. The function exchange_index() returns the
// index of this agent, or 0 if there is no exchange.
int exchange_size();
int exchange_index();

// Writes to `out` the sum of `in` over the agents of the stage. The sum has the type of `in`, but a float32 sum may be
// stored in another type. If the types are equal, `in` and `out` may be the same memory. Returns 0, or writes one line
// to standard error and returns an error code.
int all_reduce(const char* op, DType dtype, const void* in, DType out_dtype, void* out, int64_t count);

// Copies the arrays `in` of all agents of the stage to `out` [size, bytes], in the order of the ranks. Each array has
// `bytes` bytes. Returns 0 or an error code.
int all_gather(const char* op, const void* in, void* out, int64_t bytes);

// The arguments of gather_rows_to_first(), which collects matrices of 4-byte elements in the first agent.
//
// The matrix `in` [rows, in_width] of agent r is copied to `out`, where its first column becomes column r * stride.
// Only the first `whole` columns of `out` are written. Consecutive rows of `out` are `out_stride` elements apart. The
// first agent must write its own columns to `out` before the call.
struct GatherRowsArgs {
  const void* in;
  void* out;  // used in the first agent only
  int64_t rows;
  int64_t in_width;
  int64_t stride;
  int64_t whole;
  int64_t out_stride;
};
int gather_rows_to_first(const char* op, const GatherRowsArgs& args);

// The time that this process spent in all_reduce() and the gathers, and the number of exchanged pieces. `waiting_ns` is
// the part of the time in which it waited for other agents.
struct ExchangeTimes {
  int64_t total_ns;
  int64_t waiting_ns;
  int64_t pieces;
};
ExchangeTimes exchange_times();

}  // namespace llmk
