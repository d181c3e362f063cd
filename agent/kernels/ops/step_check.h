// Whether what a step slot says can be run: nothing that a graph or the sampler would index with is taken on trust.
#pragma once
#include <cstdint>

namespace llmk {

// T tokens, S sequences, table width W. Values are at least the lowest, and below a number of things.
struct StepCheckArgs {
  int64_t tokens, seqs, width;
  int32_t decode;  // one token a sequence
  int32_t lowest_token, lowest_slot, lowest_top_logits;  // each a number with a meaning of its own, below 0
  int64_t vocab_size, max_model_len, block_size, num_blocks, num_rows, most_top_logits;
  const int32_t* token_ids;       // [T]
  const int32_t* positions;       // [T]
  const int32_t* slot_mapping;    // [T]
  const int32_t* query_lens;      // [S]
  const int32_t* context_lens;    // [S]
  const int32_t* block_tables;    // [S, W]
  const int32_t* rows;            // [S]
  const int32_t* do_sample;       // [S]
  const int32_t* num_top_logits;  // [S]
  int32_t* last_tokens;     // [S] index in T of each sequence's last token
  int32_t* sampled_tokens;  // [S] the same where the sequence samples, else -1
};

enum class StepVerdict : int { kRefused = 0, kFine = 1, kFineAndWhole = 2 };  // whole: every sequence begins at 0

// What is refused is not explained; last_tokens and sampled_tokens may hold anything then.
StepVerdict check_step(const StepCheckArgs& args);

}  // namespace llmk
