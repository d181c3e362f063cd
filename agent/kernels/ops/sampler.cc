// The sampler. Per row, in this order:
//
//   1. from the raw logits: logsumexp, the best `num_top_logits` pairs, later the sampled token's logit
//   2. repetition penalty (Keskar et al. 2019) on the distinct tokens of prompt and output: a positive logit is
//      divided, another multiplied; then frequency * count and presence are taken off the tokens of the output
//   3. temperature 0: the largest logit, the smaller id on a tie. Otherwise divide by the temperature
//   4. walk the tokens from the most probable down, the smaller id first on a tie: keep top_k of them; of those the
//      fewest whose mass reaches top_p; of those the ones with at least min_p of the largest probability
//   5. draw: the first token at which the running mass exceeds u * mass kept, u from Philox keyed by the seed with
//      sample_position as counter
//
// The walk sorts only the bands of logits it reaches, so that a row costs a few passes over the vocabulary. Masses are
// e^(x - max) in float, added up in double. A row's result depends on nothing but the row.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t id;
};

bool comes_first(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Buffers of a thread, kept from row to row.
struct Workspace {
  std::vector<float> penalized, scaled, weights;
  std::vector<int32_t> ids, counts;
  std::vector<Candidate> candidates;
};

// Delivers a row's tokens from the most probable down, band by band below the largest logit.
class DescendingWalk {
 public:
  DescendingWalk(const float* row, int64_t size, float top, Workspace* work)
      : row_(row), size_(size), top_(top), high_(top), work_(work) {
    work->candidates.clear();
    work->weights.clear();
  }

  // Candidate number `index`, or null past the last. Weight e^(logit - top) through weight(index).
  const Candidate* at(size_t index) {
    while (index >= work_->candidates.size()) {
      if (!add_band()) return nullptr;
    }
    return &work_->candidates[index];
  }

  float weight(size_t index) const { return work_->weights[index]; }

 private:
  bool add_band() {
    if (high_ == -kInfinity) return false;
    depth_ *= 2;
    const float low = depth_ > 64 ? -kInfinity : top_ - depth_;
    work_->ids.resize(static_cast<size_t>(size_) + 16);
    const int64_t found = kernels().logits.collect(row_, size_, low, high_, work_->ids.data());
    const size_t begin = work_->candidates.size();
    for (int64_t i = 0; i < found; ++i) {
      const int32_t id = work_->ids[static_cast<size_t>(i)];
      work_->candidates.push_back({row_[id], id});
    }
    std::sort(work_->candidates.begin() + static_cast<int64_t>(begin), work_->candidates.end(), comes_first);
    weigh(begin);
    high_ = low;
    return true;
  }

  void weigh(size_t begin) {
    const size_t end = work_->candidates.size();
    work_->weights.resize(end);
    for (size_t i = begin; i < end; ++i) work_->weights[i] = work_->candidates[i].logit;
    float* weights = work_->weights.data() + begin;
    kernels().logits.weights(weights, static_cast<int64_t>(end - begin), top_, weights);
  }

  const float* row_;
  int64_t size_;
  float top_, high_, depth_ = 1;
  Workspace* work_;
};

double uniform(uint64_t seed, int32_t position) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position), 0, 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t bits[4];
  philox(counter, key, bits);
  return (static_cast<double>(bits[0] >> 5) * 67108864.0 + static_cast<double>(bits[1] >> 6)) / 9007199254740992.0;
}

int32_t first_equal(const float* row, int64_t size, float value) {
  for (int64_t i = 0; i < size; ++i) {
    if (row[i] == value) return static_cast<int32_t>(i);
  }
  return 0;  // every logit is NaN or -infinity
}

bool has_penalties(const SampleArgs& args, int64_t row) {
  return args.repetition_penalty[row] != 1.0f || args.presence_penalty[row] != 0.0f ||
         args.frequency_penalty[row] != 0.0f;
}

const float* apply_penalties(const SampleArgs& args, int64_t row, const float* logits, Workspace* work) {
  if (args.history_lens[row] == 0) return logits;
  const int32_t* history = args.history[row];
  const int32_t total = args.history_lens[row], prompt = args.history_prompt_lens[row];
  const float repetition = args.repetition_penalty[row];
  work->penalized.assign(logits, logits + args.vocab_size);
  work->counts.resize(static_cast<size_t>(args.vocab_size), -1);  // -1: not seen; else the count in the output
  for (int32_t i = 0; i < total; ++i) {
    int32_t& count = work->counts[static_cast<size_t>(history[i])];
    if (count < 0) count = 0;
    if (i >= prompt) ++count;
  }
  for (int32_t i = 0; i < total; ++i) {
    int32_t& count = work->counts[static_cast<size_t>(history[i])];
    if (count < 0) continue;  // done at an earlier occurrence
    float& logit = work->penalized[static_cast<size_t>(history[i])];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count > 0) {
      logit -= args.frequency_penalty[row] * static_cast<float>(count);
      logit -= args.presence_penalty[row];
    }
    count = -1;
  }
  return work->penalized.data();
}

// Tokens kept by top-k, top-p and min-p, and their mass. Off filters cost nothing: the walk stops where the draw does.
struct Kept {
  size_t count;
  double mass;
};

Kept filter(const SampleArgs& args, int64_t row, double total, DescendingWalk* walk) {
  const size_t vocab_size = static_cast<size_t>(args.vocab_size);
  size_t limit = args.top_k[row] > 0 ? std::min(static_cast<size_t>(args.top_k[row]), vocab_size) : vocab_size;
  if (limit < vocab_size) {
    total = 0;
    size_t i = 0;
    for (; i < limit && walk->at(i) != nullptr; ++i) total += walk->weight(i);
    limit = i;
  }
  const bool by_mass = args.top_p[row] < 1.0f;
  const float floor = args.min_p[row];
  if (!by_mass && floor <= 0.0f) return {limit, total};
  const double wanted = by_mass ? static_cast<double>(args.top_p[row]) * total : total * 2;
  Kept kept{0, 0};
  while (kept.count < limit && walk->at(kept.count) != nullptr) {
    if (kept.count > 0 && (kept.mass >= wanted || walk->weight(kept.count) < floor)) break;
    kept.mass += walk->weight(kept.count++);
  }
  return kept;
}

int32_t draw(const SampleArgs& args, int64_t row, const float* logits, float top, Workspace* work) {
  work->scaled.resize(static_cast<size_t>(args.vocab_size));
  float* scaled = work->scaled.data();
  kernels().logits.divide(logits, args.vocab_size, args.temperature[row], scaled);
  const float scaled_top = top / args.temperature[row];
  if (!(std::fabs(scaled_top) < kInfinity)) return first_equal(logits, args.vocab_size, top);
  DescendingWalk walk(scaled, args.vocab_size, scaled_top, work);
  const double total = kernels().logits.sum_exp(scaled, args.vocab_size, scaled_top);
  const Kept kept = filter(args, row, total, &walk);
  const double target = uniform(args.seed[row], args.sample_position[row]) * kept.mass;
  double mass = 0;
  int32_t chosen = first_equal(logits, args.vocab_size, top);
  for (size_t i = 0; i < kept.count; ++i) {
    const Candidate* candidate = walk.at(i);
    if (candidate == nullptr || walk.weight(i) == 0.0f) break;
    chosen = candidate->id;
    mass += walk.weight(i);
    if (mass > target) break;
  }
  return chosen;
}

void report_top(const SampleArgs& args, int64_t row, const float* logits, float top, Workspace* work) {
  const int32_t wanted = args.num_top_logits[row];
  int32_t* ids = args.top_ids + row * kMaxTopLogits;
  float* values = args.top_logits + row * kMaxTopLogits;
  DescendingWalk walk(logits, args.vocab_size, top, work);
  for (int32_t i = 0; i < kMaxTopLogits; ++i) {
    const Candidate* candidate = i < wanted ? walk.at(static_cast<size_t>(i)) : nullptr;
    ids[i] = candidate == nullptr ? -1 : candidate->id;
    values[i] = candidate == nullptr ? 0.0f : candidate->logit;
  }
}

bool is_skipped(const SampleArgs& args, int64_t row) { return args.do_sample != nullptr && args.do_sample[row] == 0; }

void skip_row(const SampleArgs& args, int64_t row) {
  args.sampled_ids[row] = -1;
  args.sampled_logit[row] = args.logsumexp[row] = 0.0f;
  std::fill_n(args.top_ids + row * kMaxTopLogits, kMaxTopLogits, -1);
  std::fill_n(args.top_logits + row * kMaxTopLogits, kMaxTopLogits, 0.0f);
}

void sample_row(const SampleArgs& args, int64_t row) {
  thread_local Workspace work;
  if (is_skipped(args, row)) return skip_row(args, row);
  const float* raw = args.logits + row * args.vocab_size;
  const float raw_top = kernels().logits.largest(raw, args.vocab_size);
  args.logsumexp[row] = raw_top + std::log(kernels().logits.sum_exp(raw, args.vocab_size, raw_top));
  report_top(args, row, raw, raw_top, &work);
  const float* logits = raw;
  float top = raw_top;
  if (has_penalties(args, row)) {
    logits = apply_penalties(args, row, raw, &work);
    top = kernels().logits.largest(logits, args.vocab_size);
  }
  const bool greedy = args.temperature[row] == 0.0f;
  const int32_t id = greedy ? first_equal(logits, args.vocab_size, top) : draw(args, row, logits, top, &work);
  args.sampled_ids[row] = id;
  args.sampled_logit[row] = raw[id];
}

int check_row(const SampleArgs& args, int64_t row) {
  if (is_skipped(args, row)) return 0;
  if (!(args.temperature[row] >= 0)) return refuse("Sample", "temperature", row, args.temperature[row], "at least 0");
  if (args.num_top_logits[row] < 0 || args.num_top_logits[row] > kMaxTopLogits) {
    return refuse("Sample", "num_top_logits", row, args.num_top_logits[row], "0 to 32");
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

}  // namespace

int sample(const SampleArgs& args) {
  if (args.vocab_size < 1) return refuse("Sample", "vocab_size", 0, static_cast<double>(args.vocab_size), "at least 1");
  for (int64_t row = 0; row < args.rows; ++row) {
    const int error = check_row(args, row);
    if (error != 0) return error;
  }
  parallel_for(args.rows, [&](int64_t row) { sample_row(args, row); });
  return 0;
}

}  // namespace llmk
