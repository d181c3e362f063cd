// Sums and gathers among the agents of a stage, over the exchange (llm_serving/ipc/exchange.py).
//
// Every agent writes its contribution, a piece at a time, into a buffer of its own, raises its counter and waits for
// the others'. Then each adds up all contributions itself, in the order of the ranks, in float32, and rounds once: all
// get the same bits, and an element's sum depends on that element alone.
//
// Two buffers are taken in turns. Nobody writes the one of piece n before all others have published piece n - 1, which
// they do only when they have read piece n - 2. All agents of a stage must call the same functions in the same order.
#pragma once
#include <cstdint>

#include "../common/types.h"

namespace llmk {

// What a process is among the agents of its stage; agent/group/exchange.py fills it, field for field.
struct ExchangeArgs {
  void* base;
  int64_t down;     // offset of the word that says the group is down
  int64_t lines;    // offset of the flag line of the stage's first agent; the others' follow
  int64_t buffers;  // the same of the buffers, kBuffers of `piece_bytes` each
  int64_t piece_bytes;
  int64_t timeout_ms;
  int32_t size;
  int32_t index;
};

// Once a process, before any other. 0, or an error code.
int open_exchange(const ExchangeArgs& args);

// How many agents the stage has, and which this is; 1 and 0 before open_exchange.
int exchange_size();
int exchange_index();

// out = the sum over the agents of `in`, of the same type, or any where that is float32; the two may be one where the
// types are. 0, or an error code after a line on standard error.
int all_reduce(const char* op, DType dtype, const void* in, DType out_dtype, void* out, int64_t count);

// out [size, bytes] = `in` of every agent in order.
int all_gather(const char* op, const void* in, void* out, int64_t bytes);

// Rows of 4-byte elements to the first agent: `in` [rows, in_width] of agent r goes to column r * stride of `out`,
// whose rows are `out_stride` long; what agents have past `whole` columns in all is left out. The first agent's own is
// not moved.
struct GatherRowsArgs {
  const void* in;
  void* out;  // of the first agent only
  int64_t rows;
  int64_t in_width;
  int64_t stride;
  int64_t whole;
  int64_t out_stride;
};
int gather_rows_to_first(const char* op, const GatherRowsArgs& args);

// Nanoseconds spent here since the start, how many of them waiting for others, and how many pieces.
struct ExchangeTimes {
  int64_t total_ns;
  int64_t waiting_ns;
  int64_t pieces;
};
ExchangeTimes exchange_times();

}  // namespace llmk
