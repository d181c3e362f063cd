// A step's inputs, taken out of its slot and checked: nothing that a graph or the sampler would index with is taken on
// trust, and what was checked is what runs, whatever becomes of the slot.
#pragma once
#include <cstdint>

namespace llmk {

// T tokens, S sequences, table width W. Values are at least the lowest, and below a number of things.
struct StepCopyArgs {
  int64_t tokens, seqs, width;
  int32_t decode;  // one token a sequence
  int32_t lowest_token, lowest_slot, lowest_top_logits;  // each a number with a meaning of its own, below 0
  int64_t vocab_size, max_model_len, block_size, num_blocks, num_rows, most_top_logits;
  const int32_t* token_ids;        // [T], lowest_token where it is the row's last token
  const int32_t* positions;        // [T]
  const int32_t* slot_mapping;     // [T]
  const int32_t* query_lens;       // [S]
  const int32_t* context_lens;     // [S]
  const int32_t* block_tables;     // [S, W]
  const int32_t* rows;             // [S]
  const int32_t* do_sample;        // [S]
  const int32_t* num_top_logits;   // [S]
  const int32_t* row_last_tokens;  // [num_rows], below 0 where a row has none; null: lowest_token stays
  int32_t* own_token_ids;          // [T], and so on: the copies
  int32_t* own_positions;
  int32_t* own_slot_mapping;
  int32_t* own_query_lens;
  int32_t* own_context_lens;
  int32_t* own_block_tables;
  int32_t* own_rows;
  int32_t* last_tokens;     // [S] index in T of each sequence's last token
  int32_t* sampled_tokens;  // [S] the same where the sequence samples, else -1
  int32_t* counts;          // [3] tokens, seqs, width
};

enum class StepVerdict : int { kRefused = 0, kFine = 1, kFineAndWhole = 2 };  // whole: every sequence begins at 0

// What is refused is not explained; the copies may hold anything then.
StepVerdict copy_step(const StepCopyArgs& args);

}  // namespace llmk
