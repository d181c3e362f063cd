#include "step_copy.h"

#include <algorithm>
#include <cstring>

#include "lora.h"

namespace llmk {
namespace {

// Returns true if low <= value < high for all values.
bool in_range(const int32_t* values, int64_t count, int64_t low, int64_t high) {
  if (count == 0) return true;
  int32_t least = values[0], most = values[0];
  for (int64_t i = 1; i < count; ++i) {
    least = std::min(least, values[i]);
    most = std::max(most, values[i]);
  }
  return least >= low && most < high;
}

void copy(int32_t* to, const int32_t* from, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(int32_t));
}

void copy_all(const StepCopyArgs& a) {
  copy(a.own_token_ids, a.token_ids, a.tokens);
  copy(a.own_positions, a.positions, a.tokens);
  copy(a.own_slot_mapping, a.slot_mapping, a.tokens);
  copy(a.own_query_lens, a.query_lens, a.seqs);
  copy(a.own_context_lens, a.context_lens, a.seqs);
  copy(a.own_block_tables, a.block_tables, a.seqs * a.width);
  copy(a.own_rows, a.rows, a.seqs);
  a.counts[0] = static_cast<int32_t>(a.tokens);
  a.counts[1] = static_cast<int32_t>(a.seqs);
  a.counts[2] = static_cast<int32_t>(a.width);
}

bool in_bounds(const StepCopyArgs& a) {
  const int64_t longest = std::min(a.max_model_len, a.width * a.block_size);
  return in_range(a.own_query_lens, a.seqs, 1, a.tokens + 1) && in_range(a.own_context_lens, a.seqs, 1, longest + 1) &&
         in_range(a.own_token_ids, a.tokens, a.lowest_token, a.vocab_size) &&
         in_range(a.own_positions, a.tokens, 0, a.max_model_len) &&
         in_range(a.own_slot_mapping, a.tokens, a.lowest_slot, a.num_blocks * a.block_size) &&
         in_range(a.own_block_tables, a.seqs * a.width, 0, a.num_blocks) &&
         in_range(a.own_rows, a.seqs, 0, a.num_rows) &&
         in_range(a.num_top_logits, a.seqs, a.lowest_top_logits, a.max_top_logits + 1);
}

// Replaces the token id `lowest_token` (LAST_TOKEN) by the last token of batch row `row`, in own_token_ids [begin,
// end). Returns false if this batch row has no last token.
bool resolve(const StepCopyArgs& a, int64_t begin, int64_t end, int32_t row) {
  if (a.row_last_tokens == nullptr) return true;
  for (int64_t t = begin; t < end; ++t) {
    if (a.own_token_ids[t] != a.lowest_token) continue;
    a.own_token_ids[t] = a.row_last_tokens[row];
    if (a.own_token_ids[t] < 0) return false;
  }
  return true;
}

// Writes the adapter slot of sequence `s` for its tokens [begin, end). Returns false if this slot has no adapter.
bool copy_adapter(const StepCopyArgs& a, int64_t s, int64_t begin, int64_t end) {
  const int32_t adapter = a.adapters[s];
  if (adapter < -1 || adapter >= a.max_adapters || (adapter >= 0 && a.loaded[adapter] == 0)) return false;
  std::fill(a.counts + kRowAdapters + begin, a.counts + kRowAdapters + end, adapter);
  if (adapter >= 0) a.counts[kNumAdapted] += static_cast<int32_t>(end - begin);
  return true;
}

}  // namespace

StepVerdict copy_step(const StepCopyArgs& a) {
  if (a.decode != 0 && a.tokens != a.seqs) return StepVerdict::kRefused;
  copy_all(a);
  if (!in_bounds(a)) return StepVerdict::kRefused;
  int64_t end = 0;
  bool whole = a.decode == 0;
  if (a.adapters != nullptr) a.counts[kNumAdapted] = 0;
  for (int64_t s = 0; s < a.seqs; ++s) {
    const int64_t begin = end;
    end += a.own_query_lens[s];
    if (end > a.tokens || a.own_context_lens[s] < a.own_query_lens[s]) return StepVerdict::kRefused;
    if (a.own_positions[end - 1] + 1 != a.own_context_lens[s]) return StepVerdict::kRefused;
    if (!resolve(a, begin, end, a.own_rows[s])) return StepVerdict::kRefused;
    if (a.adapters != nullptr && !copy_adapter(a, s, begin, end)) return StepVerdict::kRefused;
    whole = whole && begin + a.own_context_lens[s] == end;
    a.last_tokens[s] = static_cast<int32_t>(end - 1);
    a.sampled_tokens[s] = a.do_sample[s] != 0 ? a.last_tokens[s] : -1;
  }
  if (end != a.tokens) return StepVerdict::kRefused;
  return whole ? StepVerdict::kFineAndWhole : StepVerdict::kFine;
}

}  // namespace llmk
