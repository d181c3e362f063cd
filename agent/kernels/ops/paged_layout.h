// Copies keys and values from matrix rows into the layout of the cache (rotary_attention.h). Results with and without
// this copy have the same bits.
//
// Without the copy, each task packs all keys that its rows see into panels. If a sequence has many tasks, one copy for
// all tasks is faster.
#pragma once
#include <cstring>

#include "paged_rows.h"
#include "paged_write.h"

namespace llmk::LLMK_ARCH::paged {

// Keys and values of a sequence are copied only up to this size in bytes. If they are larger, each task packs its own
// panels.
constexpr int64_t kMostLaidOutBytes = int64_t{64} << 20;

static inline int64_t laid_out_groups(const RotaryAttentionArgs& args, int64_t seq) {
  return ceil_div(args.context_lens[seq], kGroupKeys);
}

// Returns the size in bytes of the contiguous copy of one sequence's keys. The copy of its values has the same size.
static inline int64_t laid_out_bytes(const RotaryAttentionArgs& args, int64_t seq) {
  return laid_out_groups(args, seq) * kGroupKeys * args.kv_heads * args.dim * size_of(args.dtype);
}

static inline bool pays_layout(const RotaryAttentionArgs& args, int64_t seq) {
  const bool many = args.query_lens[seq] * (args.heads / args.kv_heads) > kTaskRows;
  const bool whole_vectors = args.dim * size_of(args.dtype) % (kLanes * 4) == 0;
  return many && whole_vectors && 2 * laid_out_bytes(args, seq) <= kMostLaidOutBytes;
}

// Copies a group of 16 keys or values of a kv head into the layout of the cache. Zeros follow the end of the sequence.
static inline void lay_out_group(const RotaryAttentionArgs& args, int64_t seq, int64_t group, int64_t head,
                                 bool is_key, char* rows, char* chunk) {
  const int64_t row_bytes = args.dim * size_of(args.dtype);
  const char* base = static_cast<const char*>(is_key ? args.key_cache : args.value_cache) + head * row_bytes;
  for (int64_t i = 0; i < kGroupKeys; ++i) {
    const int64_t position = group * kGroupKeys + i;
    const auto bytes = static_cast<size_t>(row_bytes);
    if (position < args.context_lens[seq]) {
      std::memcpy(rows + i * row_bytes, base + ready_place(args, seq, position), bytes);
    } else {
      std::memset(rows + i * row_bytes, 0, bytes);
    }
  }
  if (is_key) return place_key_group(rows, row_bytes, reinterpret_cast<Unit*>(chunk));
  place_value_group<uint16_t>(rows, args.dim, reinterpret_cast<Unit*>(chunk));
}

// Copies the keys and values of one bfloat16 sequence into the layout of the cache, in blocks of one group each.
// Returns the arguments of attention over the copy. The memory is valid until the next call.
static inline RotaryAttentionArgs laid_out_sequence(const RotaryAttentionArgs& args, int64_t seq) {
  const int64_t groups = laid_out_groups(args, seq), bytes = laid_out_bytes(args, seq);
  char* keys = static_cast<char*>(thread_scratch(kScratchLaidOut, 2 * bytes + groups * 4));
  char* values = keys + bytes;
  int32_t* table = reinterpret_cast<int32_t*>(values + bytes);
  const int64_t row_bytes = args.dim * size_of(args.dtype), chunk = kGroupKeys * row_bytes;
  parallel_for(groups, [&](int64_t group) {
    char* rows = static_cast<char*>(thread_scratch(kScratchTile, chunk));
    table[group] = static_cast<int32_t>(group);
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      const int64_t place = (group * args.kv_heads + head) * chunk;
      lay_out_group(args, seq, group, head, true, rows, keys + place);
      lay_out_group(args, seq, group, head, false, rows, values + place);
    }
  });
  RotaryAttentionArgs one = args;
  one.laid_out = true;
  one.key_cache = keys;
  one.value_cache = values;
  one.block_tables = table;
  one.context_lens += seq;
  one.query_lens += seq;
  one.query_starts += seq;
  one.num_seqs = 1;
  one.table_width = one.num_blocks = groups;
  one.block_size = kGroupKeys;
  return one;
}

}  // namespace llmk::LLMK_ARCH::paged
