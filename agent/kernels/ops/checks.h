// Checks shared by the entries: 0, or an error code after one line on standard error.
#pragma once
#include "attention.h"
#include "rotary.h"

namespace llmk {

// Lengths against the number of tokens; the reach of each sequence against its table or the plain keys; every block
// that will be read against the cache. Fills query_starts (and key_starts where plain) of `starts`, 2 * num_seqs long.
int check_attention(const char* op, AttentionArgs* args, int64_t tokens, int64_t num_blocks, int64_t plain_rows,
                    int64_t* starts);

// A sequence's lengths are not 0 <= queries <= keys.
int refuse_lengths(const char* op, int64_t seq, int64_t query_len, int64_t context);

// A sequence has more keys than its block table reaches.
int refuse_context(const char* op, int64_t seq, int64_t context, int64_t table_width, int64_t block_size);

int check_slots(const char* op, const int32_t* slots, int64_t tokens, int64_t num_slots);

int check_positions(const char* op, const int32_t* positions, int64_t tokens, int64_t table_rows);

}  // namespace llmk
