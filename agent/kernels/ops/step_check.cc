#include "step_check.h"

#include <algorithm>

namespace llmk {
namespace {

// low <= values < high; true of none.
bool in_range(const int32_t* values, int64_t count, int64_t low, int64_t high) {
  if (count == 0) return true;
  int32_t least = values[0], most = values[0];
  for (int64_t i = 1; i < count; ++i) {
    least = std::min(least, values[i]);
    most = std::max(most, values[i]);
  }
  return least >= low && most < high;
}

}  // namespace

StepVerdict check_step(const StepCheckArgs& a) {
  if (a.decode != 0 && a.tokens != a.seqs) return StepVerdict::kRefused;
  const bool lengths = in_range(a.query_lens, a.seqs, 1, a.tokens + 1) &&
                       in_range(a.context_lens, a.seqs, 1, std::min(a.max_model_len, a.width * a.block_size) + 1);
  const bool numbers = in_range(a.token_ids, a.tokens, a.lowest_token, a.vocab_size) &&
                       in_range(a.positions, a.tokens, 0, a.max_model_len) &&
                       in_range(a.slot_mapping, a.tokens, a.lowest_slot, a.num_blocks * a.block_size) &&
                       in_range(a.block_tables, a.seqs * a.width, 0, a.num_blocks) &&
                       in_range(a.rows, a.seqs, 0, a.num_rows) &&
                       in_range(a.num_top_logits, a.seqs, a.lowest_top_logits, a.most_top_logits + 1);
  if (!lengths || !numbers) return StepVerdict::kRefused;
  int64_t end = 0;
  bool whole = a.decode == 0;
  for (int64_t s = 0; s < a.seqs; ++s) {
    end += a.query_lens[s];
    if (end > a.tokens || a.context_lens[s] < a.query_lens[s]) return StepVerdict::kRefused;
    if (a.positions[end - 1] + 1 != a.context_lens[s]) return StepVerdict::kRefused;
    whole = whole && a.query_lens[s] == a.context_lens[s];
    a.last_tokens[s] = static_cast<int32_t>(end - 1);
    a.sampled_tokens[s] = a.do_sample[s] != 0 ? a.last_tokens[s] : -1;
  }
  if (end != a.tokens) return StepVerdict::kRefused;
  return whole ? StepVerdict::kFineAndWhole : StepVerdict::kFine;
}

}  // namespace llmk
