// The sampler. It runs these steps for each row of logits:
//
//  0. If a raw logit is NaN or +infinity, or none is finite, the result is kNotFinite.
//  1. Read from the raw logits: the logsumexp (if wanted), the `num_top_logits` largest logits with their tokens, and
//     later the sampled token's logit.
//  2. Apply the repetition penalty (Keskar et al. 2019) to the distinct tokens of prompt and output: divide a positive
//     logit, multiply any other. Then subtract frequency * count and presence from the tokens of the output.
//     After that, a mask sets the logits of all tokens that are not allowed to -infinity.
//  3. With temperature 0, choose the largest logit, the smaller id on a tie. Otherwise divide by the temperature.
//  4. Rank the tokens by probability, the smaller id first on a tie. Keep top_k tokens. Then keep the fewest tokens
//     whose mass reaches top_p. Then keep the tokens whose probability is at least min_p times the largest probability.
//  5. Draw the first token at which the running mass exceeds u * kept mass. The random number u comes from Philox, with
//     the seed as key and sample_position as counter.
//
// The mass of a token is e^(logit - largest logit) in float. Masses are added up in double. Only the tokens that a
// filter or the draw needs are sorted (ranked_logits.h), so a row costs a few passes over the vocabulary. The result of
// a row does not depend on other rows.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "../common/scratch_vector.h"
#include "../common/thread_pool.h"
#include "ranked_logits.h"
#include "sampler_row.h"

namespace llmk {

double uniform(uint64_t seed, int32_t position) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position), 0, 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t bits[4];
  philox(counter, key, bits);
  return (static_cast<double>(bits[0] >> 5) * 67108864.0 + static_cast<double>(bits[1] >> 6)) / 9007199254740992.0;
}

bool has_penalties(const SampleArgs& args, int64_t row) {
  return args.repetition_penalty[row] != 1.0f || args.presence_penalty[row] != 0.0f ||
         args.frequency_penalty[row] != 0.0f;
}

// Returns true if candidates.cc implements every filter of the row. All filters of this file are implemented there, so
// the result is always true. For a new filter that only this file has, the function must return false.
bool candidates_have_filters(const SampleArgs&, int64_t) { return true; }

const uint32_t* mask_of(const SampleArgs& args, int64_t row) {
  if (args.mask_number == nullptr || args.mask_number[row] == 0) return nullptr;
  return args.masks + (args.mask_number[row] - 1) * args.mask_words;
}

bool is_skipped(const SampleArgs& args, int64_t row) { return args.do_sample != nullptr && args.do_sample[row] == 0; }

void skip_row(const SampleArgs& args, int64_t row) {
  args.sampled_ids[row] = -1;
  args.sampled_logit[row] = args.logsumexp[row] = 0.0f;
  report_top(args, row, nullptr, 0);
}

void report_top(const SampleArgs& args, int64_t row, const Candidate* best, size_t count) {
  int32_t* ids = args.top_ids + row * kMaxTopLogits;
  float* values = args.top_logits + row * kMaxTopLogits;
  for (size_t i = 0; i < kMaxTopLogits; ++i) {
    ids[i] = i < count ? best[i].id : -1;
    values[i] = i < count ? best[i].logit : 0.0f;
  }
}

float penalized_logit(const SampleArgs& args, int64_t row, float logit, int32_t count) {
  const float repetition = args.repetition_penalty[row];
  logit = logit > 0 ? logit / repetition : logit * repetition;
  if (count > 0) {
    logit -= args.frequency_penalty[row] * static_cast<float>(count);
    logit -= args.presence_penalty[row];
  }
  return logit;
}

int32_t draw_of_sorted(const SampleArgs& args, int64_t row, const Candidate* best, size_t count, double u,
                       ScratchVector<float>* buffer) {
  buffer->resize(count);
  float* weights = buffer->data();
  for (size_t i = 0; i < count; ++i) weights[i] = best[i].logit;
  kernels().logits.weights(weights, static_cast<int64_t>(count), best[0].logit, weights);
  double total = 0, kept = 0, running = 0;
  for (size_t i = 0; i < count; ++i) total += weights[i];
  const double wanted = args.top_p[row] < 1.0f ? args.top_p[row] * total : kInfinity;
  size_t end = 0;
  while (end < count && (end == 0 || (kept < wanted && weights[end] >= args.min_p[row]))) kept += weights[end++];
  for (size_t i = 0; i < end; ++i) {
    running += weights[i];
    if (running > u * kept) return best[i].id;
  }
  return best[end - 1].id;
}

void publish(const SampleArgs& args, int64_t row, int32_t id, float logit) {
  args.sampled_ids[row] = id;
  args.sampled_logit[row] = logit;
  if (args.last_tokens != nullptr) args.last_tokens[args.table_rows[row]] = id;
}

void publish_not_finite(const SampleArgs& args, int64_t row) {
  args.sampled_ids[row] = kNotFinite;
  args.sampled_logit[row] = args.logsumexp[row] = 0.0f;
  report_top(args, row, nullptr, 0);
  if (args.last_tokens != nullptr) args.last_tokens[args.table_rows[row]] = 0;
}

namespace {

// Buffers of a thread, reused for each row.
struct Workspace {
  ScratchVector<float> penalized, scaled, weights;
  ScratchVector<int32_t> counts;
  ScratchVector<Candidate> best;
};

// Returns false if a logit is NaN or +infinity, or if no logit is finite. The loop has no branch, so that the compiler
// vectorises it.
bool is_usable(const float* row, int64_t size) {
  constexpr int32_t kInfinityBits = 0x7F800000;
  int32_t broken = 0, finite = 0;
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, row + i, sizeof(bits));
    const int32_t magnitude = bits & 0x7FFFFFFF;
    broken |= magnitude > kInfinityBits || bits == kInfinityBits;
    finite |= magnitude < kInfinityBits;
  }
  return broken == 0 && finite != 0;
}

// Returns the first id whose logit is `value`. Returns 0 if no logit is equal, which happens if the penalties leave no
// finite logit.
int32_t first_equal(const float* row, int64_t size, float value) {
  return static_cast<int32_t>(std::max<int64_t>(kernels().logits.first_equal(row, size, value), 0));
}

const float* apply_penalties(const SampleArgs& args, int64_t row, const float* logits, Workspace* work) {
  if (args.history_lens[row] == 0) return logits;
  const int32_t* history = args.history[row];
  const int32_t total = args.history_lens[row], prompt = args.history_prompt_lens[row];
  work->penalized.assign(logits, logits + args.vocab_size);
  // counts[id] is -1 if the token is not in the history. Otherwise it is the token's count in the output.
  work->counts.resize(static_cast<size_t>(args.vocab_size), -1);
  for (int32_t i = 0; i < total; ++i) {
    int32_t& count = work->counts[static_cast<size_t>(history[i])];
    if (count < 0) count = 0;
    if (i >= prompt) ++count;
  }
  for (int32_t i = 0; i < total; ++i) {
    int32_t& count = work->counts[static_cast<size_t>(history[i])];
    if (count < 0) continue;  // the penalties of this token were applied at an earlier occurrence
    float& logit = work->penalized[static_cast<size_t>(history[i])];
    logit = penalized_logit(args, row, logit, count);
    count = -1;
  }
  return work->penalized.data();
}

// Copies the logits to work->penalized, with -infinity for each token that is not allowed, and returns the copy.
const float* apply_mask(const uint32_t* mask, int64_t vocab_size, const float* logits, Workspace* work) {
  if (logits != work->penalized.data()) work->penalized.assign(logits, logits + vocab_size);
  float* masked = work->penalized.data();
  for (int64_t start = 0; start < vocab_size; start += 32) {
    const uint32_t bits = mask[start / 32];
    if (bits == ~0u) continue;
    const int64_t count = smaller(int64_t{32}, vocab_size - start);
    for (int64_t i = 0; i < count; ++i) masked[start + i] = (bits >> i & 1u) != 0 ? masked[start + i] : -kInfinity;
  }
  return masked;
}

// Returns the first allowed id, or -1 if no token is allowed.
int32_t first_allowed(const uint32_t* mask, int64_t vocab_size) {
  for (int32_t id = 0; id < vocab_size; ++id) {
    if (is_allowed(mask, id)) return id;
  }
  return -1;
}

// Draws one of the best top_k tokens of a row. First sorts these tokens.
int32_t draw_of_few(const SampleArgs& args, int64_t row, const float* scaled, float top, double u, Workspace* work) {
  best_tokens(scaled, args.vocab_size, top, args.top_k[row], &work->best);
  return draw_of_sorted(args, row, work->best.data(), work->best.size(), u, &work->weights);
}

int32_t draw_of_many(const SampleArgs& args, int64_t row, const float* scaled, float top, double u) {
  RankedRow ranked(scaled, args.vocab_size, top);
  Prefix kept = ranked.all();
  if (args.top_k[row] > 0 && args.top_k[row] < kept.count) kept = ranked.best(args.top_k[row]);
  if (args.top_p[row] < 1.0f) {
    const Prefix nucleus = ranked.reaching(args.top_p[row] * kept.mass);
    if (nucleus.count < kept.count) kept = nucleus;
  }
  if (args.min_p[row] > 0.0f) {
    const Prefix likely = ranked.at_least(args.min_p[row]);
    if (likely.count < kept.count) kept = likely;
  }
  return ranked.token_at(u * kept.mass, kept);
}

int32_t draw(const SampleArgs& args, int64_t row, const float* logits, float top, Workspace* work) {
  const float scaled_top = top / args.temperature[row];
  const bool finite = std::fabs(scaled_top) < kInfinity && top > kLowest;
  if (!finite) return first_equal(logits, args.vocab_size, top);
  work->scaled.resize(static_cast<size_t>(args.vocab_size));
  float* scaled = work->scaled.data();
  kernels().logits.divide(logits, args.vocab_size, args.temperature[row], scaled);
  const double u = uniform(args.seed[row], args.sample_position[row]);
  const bool few = args.top_k[row] > 0 && args.top_k[row] <= kFewTokens;
  return few ? draw_of_few(args, row, scaled, scaled_top, u, work) : draw_of_many(args, row, scaled, scaled_top, u);
}

void sample_row(const SampleArgs& args, int64_t row) {
  thread_local Workspace work;
  if (is_skipped(args, row)) return skip_row(args, row);
  const float* raw = args.logits + (args.logits_rows == nullptr ? row : args.logits_rows[row]) * args.vocab_size;
  const int32_t best = args.best_ids == nullptr ? -1 : args.best_ids[row];
  // If the best id is known, a kernel has already read all logits of the row, and they are usable.
  if (best < 0 && !is_usable(raw, args.vocab_size)) return publish_not_finite(args, row);
  const float raw_top = best < 0 ? kernels().logits.largest(raw, args.vocab_size) : raw[best];
  args.logsumexp[row] = 0.0f;
  if (args.num_top_logits[row] >= 0) {
    args.logsumexp[row] = raw_top + std::log(kernels().logits.sum_exp(raw, args.vocab_size, raw_top));
  }
  work.best.clear();
  if (args.num_top_logits[row] > 0) best_tokens(raw, args.vocab_size, raw_top, args.num_top_logits[row], &work.best);
  report_top(args, row, work.best.data(), work.best.size());
  const float* logits = raw;
  float top = raw_top;
  if (has_penalties(args, row)) {
    logits = apply_penalties(args, row, raw, &work);
    top = kernels().logits.largest(logits, args.vocab_size);
  }
  const bool greedy = args.temperature[row] == 0.0f;
  const uint32_t* mask = mask_of(args, row);
  const bool best_is_known = best >= 0 && logits == raw;
  if (mask != nullptr && !(greedy && best_is_known && is_allowed(mask, best))) {
    logits = apply_mask(mask, args.vocab_size, logits, &work);
    top = kernels().logits.largest(logits, args.vocab_size);
  }
  int32_t id = best;
  if (mask != nullptr && !(top > kLowest)) {
    id = first_allowed(mask, args.vocab_size);
  } else if (!greedy) {
    id = draw(args, row, logits, top, &work);
  } else if (best < 0 || logits != raw) {
    id = first_equal(logits, args.vocab_size, top);
  }
  publish(args, row, id, raw[id]);
}

// Returns true if this call must leave the results of the row as they are.
bool is_left(const SampleArgs& args, int64_t row) { return args.logits_rows != nullptr && args.logits_rows[row] < 0; }

// Returns true if the row's result is known without its logits: it is skipped, or it is greedy and its best token is
// known. If the results of the first rows are known, `sample` writes them in the calling thread, because waking another
// thread would take longer.
bool is_known(const SampleArgs& args, int64_t row) {
  if (is_skipped(args, row)) return true;
  return args.best_ids != nullptr && args.best_ids[row] >= 0 && args.temperature[row] == 0.0f &&
         args.num_top_logits[row] < 0 && !has_penalties(args, row) &&
         is_allowed(mask_of(args, row), args.best_ids[row]);
}

}  // namespace

int check_row(const SampleArgs& args, int64_t row) {
  if (is_skipped(args, row)) return 0;
  if (!(args.temperature[row] >= 0)) return refuse("Sample", "temperature", row, args.temperature[row], "at least 0");
  if (args.best_ids != nullptr && args.best_ids[row] >= args.vocab_size) {
    return refuse_index("Sample", "best_ids", row, args.best_ids[row], args.vocab_size);
  }
  if (args.num_top_logits[row] < -1 || args.num_top_logits[row] > kMaxTopLogits) {
    return refuse("Sample", "num_top_logits", row, args.num_top_logits[row], "-1 to 32");
  }
  if (args.last_tokens != nullptr && (args.table_rows[row] < 0 || args.table_rows[row] >= args.last_tokens_size)) {
    return refuse_index("Sample", "table_rows", row, args.table_rows[row], args.last_tokens_size);
  }
  if (args.mask_number != nullptr && args.mask_number[row] != 0) {
    if (args.masks == nullptr || args.mask_number[row] < 0 || args.mask_number[row] > args.num_masks) {
      return refuse_index("Sample", "mask_number", row, args.mask_number[row], args.num_masks + 1);
    }
    if (args.mask_words * 32 < args.vocab_size || first_allowed(mask_of(args, row), args.vocab_size) < 0) {
      return refuse_text("Sample", "the mask of row %lld is too short or allows no token", static_cast<long long>(row));
    }
  }
  if (!has_penalties(args, row)) return 0;
  if (args.history_lens == nullptr || args.history == nullptr) {
    return refuse_text("Sample", "row %lld has penalties, so it needs a history", static_cast<long long>(row));
  }
  if (!(args.repetition_penalty[row] > 0)) {
    return refuse("Sample", "repetition_penalty", row, args.repetition_penalty[row], "above 0");
  }
  const int32_t total = args.history_lens[row];
  if (total < 0 || args.history_prompt_lens[row] < 0 || args.history_prompt_lens[row] > total) {
    return refuse("Sample", "history_prompt_lens", row, args.history_prompt_lens[row], "0 to the history's length");
  }
  for (int32_t i = 0; i < total; ++i) {
    const int32_t id = args.history[row][i];
    if (id < 0 || id >= args.vocab_size) return refuse_index("Sample", "history", row, id, args.vocab_size);
  }
  return 0;
}

bool has_penalties(const SampleArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    if (!is_skipped(args, row) && has_penalties(args, row)) return true;
  }
  return false;
}

int sample(const SampleArgs& args) {
  if (args.vocab_size < 1) return refuse("Sample", "vocab_size", 0, static_cast<double>(args.vocab_size), "at least 1");
  for (int64_t row = 0; row < args.rows; ++row) {
    const int error = check_row(args, row);
    if (error != 0) return error;
  }
  int64_t known = 0;
  while (known < args.rows && (is_left(args, known) || is_known(args, known))) ++known;
  for (int64_t row = 0; row < known; ++row) {
    if (!is_left(args, row)) sample_row(args, row);
  }
  parallel_for(args.rows - known, [&](int64_t row) {
    if (!is_left(args, known + row)) sample_row(args, known + row);
  });
  return 0;
}

}  // namespace llmk
