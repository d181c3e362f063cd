// Copies the inputs of a step out of its step slot and checks the copies. Every number is checked, because the graph
// and the sampler use the numbers as indices. Later changes of the step slot do not affect the copies.
#pragma once
#include <cstdint>

namespace llmk {

// The arguments of copy_step(): the sizes of a step, the limits of its values, its arrays, and the arrays that receive
// the copies. T is the number of tokens, S the number of sequences, W the width of the block tables.
//
// Each value has an upper and a lower limit. The lower limit is 1 for lengths and otherwise 0, or the `lowest_...`
// member for the value if there is one.
struct StepCopyArgs {
  int64_t tokens, seqs, width;
  int32_t decode;  // 1: one token per sequence
  int32_t lowest_token, lowest_slot, lowest_top_logits;  // equal to LAST_TOKEN, PADDING_SLOT, NO_LOGSUMEXP (negative)
  int64_t vocab_size, max_model_len, block_size, num_blocks, num_rows, max_top_logits, max_adapters;
  const int32_t* token_ids;        // [T]; the id lowest_token stands for the last token of the batch row
  const int32_t* positions;        // [T]
  const int32_t* slot_mapping;     // [T]
  const int32_t* query_lens;       // [S]
  const int32_t* context_lens;     // [S]
  const int32_t* block_tables;     // [S, W]
  const int32_t* rows;             // [S]
  const int32_t* do_sample;        // [S]
  const int32_t* num_top_logits;   // [S]
  const int32_t* adapters;         // [S] adapter slot of each sequence, -1: none; null: the steps have no adapters
  // [num_rows]: the last token of each batch row, or a negative number if there is no last token. If null, lowest_token
  // is not replaced.
  const int32_t* row_last_tokens;
  int32_t* own_token_ids;          // [T]; this array and the following arrays receive the copies
  int32_t* own_positions;
  int32_t* own_slot_mapping;
  int32_t* own_query_lens;
  int32_t* own_context_lens;
  int32_t* own_block_tables;
  int32_t* own_rows;
  int32_t* last_tokens;     // [S] each sequence's last token, as an index from 0 to T - 1
  int32_t* sampled_tokens;  // [S] like last_tokens, but -1 if the sequence does not sample
  int32_t* counts;          // [3] tokens, sequences, width; with adapters, also from kNumAdapted (lora.h) on
  const int32_t* loaded;    // [max_adapters] 1 if the adapter slot has an adapter; sequences may name only these
};

// The result of the checks. The value kRefused means that a value is out of bounds. With kFine, all values are valid.
// With kFineAndWhole, all values are valid and all sequences start at position 0.
enum class StepVerdict : int { kRefused = 0, kFine = 1, kFineAndWhole = 2 };

// Copies and checks a step. If a value is out of bounds, returns kRefused without a message, and the contents of the
// copies are undefined.
StepVerdict copy_step(const StepCopyArgs& args);

}  // namespace llmk
