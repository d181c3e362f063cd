// KV caches of the native primitives whose blocks have the layout of RotaryAttention (rotary_attention.h).
//
// A cache of ReshapeAndCache and PagedAttention is [blocks, block_size, kv_heads, dim]. On a CPU, PagedAttention would
// pack the keys and values of each step, because its products read units of 4 bytes. If the agent names a cache here,
// each block stores the same elements in the order of RotaryAttention: [kv_heads] chunks of units. Nothing is packed
// then. All primitives that read or write the cache must be ReshapeAndCache or PagedAttention. Copies of whole blocks
// do not depend on the order.
//
// Caches are bfloat16. block_size and dim are multiples of 16.
#pragma once
#include <cstdint>

namespace llmk {

// Names a cache by its address. A cache may be named several times. Before its memory is freed, it must be forgotten as
// often.
void keep_laid_out(const void* cache);
void forget_laid_out(const void* cache);
bool is_laid_out(const void* cache);

// The sizes of a cache that was named, and rows of keys or of values to write to it.
struct LaidOutRows {
  const char* rows;    // row of the first token, [kv_heads * dim] bfloat16
  int64_t row_bytes;   // bytes from one row to the next
  const int32_t* slots;  // [tokens]; the row of a token with a negative slot is not written
  void* cache;
  int64_t block_size, kv_heads, dim;
  bool is_key;
};

// Writes the rows of tokens [begin, end). Several threads may write different tokens at the same time.
void write_laid_out(const LaidOutRows& rows, int64_t begin, int64_t end);
// Writes the rows of tokens [0, tokens) with all threads.
void write_all_laid_out(const LaidOutRows& rows, int64_t tokens);
// Returns the number of tokens that a thread should write at a time. If there are many, these are whole groups.
int64_t laid_out_task(int64_t tokens);

}  // namespace llmk
