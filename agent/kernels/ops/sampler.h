// Chooses one token from each row of logits.
#pragma once
#include <cstdint>

namespace llmk {

constexpr int kMaxTopLogits = 32;  // equal to MAX_TOP_LOGITS in llm_serving/sampling_params.py

// The sampled id of a row whose logits cannot be used: one is NaN or +infinity, or none is finite.
constexpr int32_t kNotFinite = -2;

// The arguments of the sampler. An array has one entry per row unless its comment gives another shape. sampler.cc
// describes what each parameter does.
struct SampleArgs {
  const float* logits;         // [rows, vocab_size]
  // For each row of the batch, the row of `logits` from which it samples. -1: the results of this row stay unchanged.
  // If the pointer is null, row i samples from row i of `logits`.
  const int32_t* logits_rows;
  int64_t rows, vocab_size;
  const float* temperature;  // 0: greedy
  const int32_t* top_k;      // 0: off
  const float* top_p;        // 1: off
  const float* min_p;        // 0: off
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const uint64_t* seed;
  const int32_t* sample_position;
  // Number of largest logits to report; -1: none, and logsumexp becomes 0 without being computed.
  const int32_t* num_top_logits;
  const int32_t* do_sample;             // 0: the row is skipped and its token is -1; null: no row is skipped
  const int32_t* best_ids;              // token with the largest logit, the smaller id on a tie; -1 or null: unknown
  const int32_t* const* history;        // [rows]: token ids of each row, prompt first; null: no row has penalties
  const int32_t* history_lens;          // number of tokens in `history`: prompt and output
  const int32_t* history_prompt_lens;   // number of prompt tokens in `history`
  const int32_t* mask_number;  // number of the row's mask in `masks`, counted from 1; 0 or null: every token is allowed
  const uint32_t* masks;                // [num_masks, mask_words]: bit id % 32 of word id / 32 is 1 for an allowed id
  int64_t num_masks, mask_words;
  int32_t* sampled_ids;
  float* sampled_logit;
  float* logsumexp;
  int32_t* top_ids;   // [rows, kMaxTopLogits]: the tokens with the largest logits
  float* top_logits;  // [rows, kMaxTopLogits]: the logits of top_ids
  const int32_t* table_rows;  // [rows]: index in last_tokens; only read if last_tokens is set
  int32_t* last_tokens;       // entry table_rows[i] receives the token of row i; may be null
  int64_t last_tokens_size;
};

// Returns true if a row that samples has penalties and therefore needs its history.
bool has_penalties(const SampleArgs& args);

// Samples all rows. Returns 0. If an argument is invalid, samples nothing, writes one line to standard error and
// returns an error code of common/check.h.
int sample(const SampleArgs& args);

// The random number generator Philox4x32-10 (Salmon et al., SC 2011): computes four random numbers from a counter and a
// key, and writes them to `out`.
void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

}  // namespace llmk
