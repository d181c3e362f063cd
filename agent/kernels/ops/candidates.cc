#include "candidates.h"

#include <algorithm>
#include <cmath>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "sampler_row.h"

namespace llmk {
namespace {

// A device computes a sum of exponentials in float32. The relative error of the sum is at most kMassError +
// kMassErrorPerUnit * |largest logit|. The second term is the error of the rounded exponents, which grows with the
// largest logit.
constexpr double kMassError = 0x1p-16, kMassErrorPerUnit = 0x1p-21;
// Bound of the relative difference between a sum of this file and the same sum of RankedRow (ranked_logits.h). Both add
// the same terms in double, but in different orders.
constexpr double kOrderError = 1e-12;

struct Token {
  float raw;     // logit of the model
  float logit;   // logit after penalties
  float scaled;  // logit after penalties, divided by the temperature
  int32_t id;
};

// The candidates of one row of logits, and bounds for the logits of all other tokens.
struct Row {
  ScratchVector<Token> tokens;
  ScratchVector<Candidate> sorted;
  ScratchVector<float> weights;
  ScratchVector<double> running;
  bool is_complete;  // true if all tokens that are not candidates have the logit -inf
  float threshold;   // upper bound of the logits of tokens that are not candidates
  float top;         // the largest raw logit
};

int64_t part_columns(const SampleArgs& args, const CandidateArgs& from, int64_t part) {
  return smaller(from.part_size, args.vocab_size - part * from.part_size);
}

int check_candidates(const SampleArgs& args, const CandidateArgs& from) {
  if (args.best_ids == nullptr || from.best_values == nullptr) {
    return refuse_text("SampleCandidates", "best_ids and best_values are needed");
  }
  if (from.count == 0) return 0;
  if (from.parts < 1 || from.part_size < 1 || from.part_rows < args.rows ||
      part_columns(args, from, from.parts - 1) < from.count || from.parts * from.part_size < args.vocab_size) {
    return refuse_text("SampleCandidates", "%lld parts of %lld tokens and %lld rows; %lld candidates, %lld tokens, "
                       "%lld rows", static_cast<long long>(from.parts), static_cast<long long>(from.part_size),
                       static_cast<long long>(from.part_rows), static_cast<long long>(from.count),
                       static_cast<long long>(args.vocab_size), static_cast<long long>(args.rows));
  }
  return 0;
}

// Collects the candidates of a row from all parts of the vocabulary into `found`. Returns false if a logit or a sum is
// NaN, if a token id is out of range, or if there is no candidate.
bool collect(const SampleArgs& args, const CandidateArgs& from, int64_t row, Row* found) {
  found->tokens.clear();
  found->is_complete = true;
  found->threshold = found->top = -kInfinity;
  for (int64_t part = 0; part < from.parts; ++part) {
    const int64_t columns = part_columns(args, from, part), start = (part * from.part_rows + row) * from.count;
    float smallest = kInfinity;
    if (std::isnan(from.sums[part * from.part_rows + row])) return false;
    for (int64_t i = start; i < start + from.count; ++i) {
      const float value = from.values[i];
      if (value != value || from.ids[i] < 0 || from.ids[i] >= columns) return false;
      smallest = std::min(smallest, value);
      if (value == -kInfinity) continue;
      found->tokens.push_back({value, value, value, static_cast<int32_t>(part * from.part_size + from.ids[i])});
      found->top = std::max(found->top, value);
    }
    if (columns == from.count || smallest == -kInfinity) continue;
    found->is_complete = false;
    found->threshold = std::max(found->threshold, smallest);
  }
  return !found->tokens.empty();
}

// Returns the sum of e^((x - top) / divisor) over all logits x of a row, for the denominator of a softmax.
// The value sums[part][row] is the same sum over one part of the vocabulary, with the largest logit of this part
// instead of `top`.
double mass(const CandidateArgs& from, const float* sums, int64_t row, float top, float divisor) {
  double total = 0;
  for (int64_t part = 0; part < from.parts; ++part) {
    const int64_t at = part * from.part_rows + row;
    const float* values = from.values + at * from.count;
    const float own = *std::max_element(values, values + from.count);
    if (own == -kInfinity) continue;
    total += sums[at] * std::exp(static_cast<double>(own / divisor) - static_cast<double>(top / divisor));
  }
  return total;
}

// Sorts the candidates by logit_of(token), largest first, and the smaller id first on a tie.
//
// Returns the number of candidates, counted from the largest, whose rank is certain. Their logits are above
// `threshold`, so no token outside the candidates can rank before them. If only candidates have finite logits, all
// ranks are certain.
template <class LogitOf>
size_t rank(Row* row, float threshold, const LogitOf& logit_of) {
  row->sorted.clear();
  for (const Token& token : row->tokens) row->sorted.push_back({logit_of(token), token.id});
  std::sort(row->sorted.begin(), row->sorted.end(), [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  });
  if (row->is_complete) return row->sorted.size();
  size_t certain = 0;
  while (certain < row->sorted.size() && row->sorted[certain].logit > threshold) ++certain;
  return certain;
}

// Applies the penalties to the candidates. Returns false if the penalties could raise the logit of a token that is not
// a candidate.
bool penalize(const SampleArgs& args, int64_t row, Row* found) {
  if (args.repetition_penalty[row] < 1.0f || args.presence_penalty[row] < 0.0f || args.frequency_penalty[row] < 0.0f) {
    return false;
  }
  std::sort(found->tokens.begin(), found->tokens.end(), [](const Token& a, const Token& b) { return a.id < b.id; });
  constexpr int32_t kUnseen = -1;
  thread_local ScratchVector<int32_t> counts;
  counts.assign(found->tokens.size(), kUnseen);
  for (int32_t i = 0; i < args.history_lens[row]; ++i) {
    const int32_t id = args.history[row][i];
    const auto token = std::lower_bound(found->tokens.begin(), found->tokens.end(), id,
                                        [](const Token& a, int32_t wanted) { return a.id < wanted; });
    if (token == found->tokens.end() || token->id != id) continue;
    int32_t& count = counts[static_cast<size_t>(token - found->tokens.begin())];
    if (count == kUnseen) count = 0;
    if (i >= args.history_prompt_lens[row]) ++count;
  }
  for (size_t i = 0; i < found->tokens.size(); ++i) {
    if (counts[i] != kUnseen) {
      found->tokens[i].logit = penalized_logit(args, row, found->tokens[i].raw, counts[i]);
    }
  }
  return true;
}

// Draws a token of the row with the random number `u`. Returns -1 if the candidates do not determine the drawn token.
//
// Only the ranks of the first `certain` candidates are known. `whole` is the sum of the weights e^(logit - largest) of
// all tokens, with a rounding error.
int32_t draw_of_all(const SampleArgs& args, int64_t row, double whole, double u, size_t certain, Row* found) {
  const float top = found->sorted[0].logit;
  found->weights.resize(certain);
  float* weights = found->weights.data();
  for (size_t i = 0; i < certain; ++i) weights[i] = found->sorted[i].logit;
  kernels().logits.weights(weights, static_cast<int64_t>(certain), top, weights);
  while (certain > 1 && !(weights[certain - 1] > 0)) --certain;
  found->running.resize(certain);
  double running = 0;
  for (size_t i = 0; i < certain; ++i) found->running[i] = running += weights[i];
  const double error = kMassError + kMassErrorPerUnit * std::fabs(static_cast<double>(top));
  // `whole` has a rounding error. Therefore `low` and `high` are bounds of the probability mass that top-k and top-p
  // keep.
  double low = whole * (1 - error), high = whole * (1 + error);
  // Number of tokens that top-k and top-p keep. A value above `certain` means that the number is unknown.
  size_t kept = certain + 1;
  if (args.top_p[row] < 1.0f) {
    low *= args.top_p[row];
    high *= args.top_p[row];
    size_t end = 0;
    while (end < certain && found->running[end] < high) ++end;
    if (end < certain) {
      if (end > 0 && !(found->running[end - 1] < low)) return -1;
      kept = end + 1;
    } else {
      if (!(found->running[certain - 1] < low)) return -1;
      high += weights[certain - 1];
    }
  }
  if (args.min_p[row] > 0.0f) {
    size_t end = 1;
    while (end < certain && weights[end] >= args.min_p[row]) ++end;
    if (end < certain) {
      kept = std::min(kept, end);
    } else if (kept > certain) {
      low = std::min(low, found->running[certain - 1]);
    }
  }
  if (kept <= certain) low = high = found->running[kept - 1];
  const double margin = kOrderError * high;
  for (size_t i = 0; i < std::min(kept, certain); ++i) {
    if (!(found->running[i] > u * low - margin)) continue;
    return found->running[i] > u * high + margin ? found->sorted[i].id : -1;
  }
  return -1;
}

// Returns the sampled token, or -1 if the candidates do not determine it.
int32_t choose(const SampleArgs& args, const CandidateArgs& from, int64_t row, Row* found) {
  const bool penalized = has_penalties(args, row);
  const float temperature = args.temperature[row];
  if (temperature == 0.0f && !penalized) return args.best_ids[row];
  if (penalized && !penalize(args, row, found)) return -1;
  if (temperature == 0.0f) {
    return rank(found, found->threshold, [](const Token& token) { return token.logit; }) > 0 ? found->sorted[0].id : -1;
  }
  for (Token& token : found->tokens) token.scaled = token.logit / temperature;
  const size_t certain = rank(found, found->threshold / temperature, [](const Token& token) { return token.scaled; });
  if (certain == 0 || !(std::fabs(found->sorted[0].logit) < kInfinity)) return -1;
  const double u = uniform(args.seed[row], args.sample_position[row]);
  const int64_t top_k = args.top_k[row];
  if (top_k > 0 && top_k <= kFewTokens) {
    if (!found->is_complete && static_cast<int64_t>(certain) < top_k) return -1;
    const size_t count = std::min(certain, static_cast<size_t>(top_k));
    return draw_of_sorted(args, row, found->sorted.data(), count, u, &found->weights);
  }
  if (penalized || (top_k > 0 && top_k < args.vocab_size)) return -1;
  return draw_of_all(args, row, mass(from, from.scaled_sums, row, found->top, temperature), u, certain, found);
}

// Samples a row and writes its results: the token, the logsumexp and the best tokens. If the candidates do not
// determine all of these results, returns false and writes nothing.
bool decide(const SampleArgs& args, const CandidateArgs& from, int64_t row) {
  thread_local Row found;
  const int32_t wanted = args.num_top_logits[row];
  if (!std::isfinite(from.best_values[row])) {
    publish_not_finite(args, row);
    return true;
  }
  const uint32_t* mask = mask_of(args, row);
  const bool is_plain =
      args.temperature[row] == 0.0f && !has_penalties(args, row) && is_allowed(mask, args.best_ids[row]);
  if (!is_plain && (mask != nullptr || !candidates_have_filters(args, row))) return false;
  if (is_plain && wanted < 0) {
    args.logsumexp[row] = 0.0f;
    report_top(args, row, nullptr, 0);
    publish(args, row, args.best_ids[row], from.best_values[row]);
    return true;
  }
  if (from.count == 0 || !collect(args, from, row, &found)) return false;
  const int32_t id = choose(args, from, row, &found);
  if (id < 0) return false;
  const size_t certain = rank(&found, found.threshold, [](const Token& token) { return token.raw; });
  if (!found.is_complete && static_cast<int64_t>(certain) < wanted) return false;
  const double whole = wanted < 0 ? 1.0 : mass(from, from.sums, row, found.top, 1.0f);
  if (!(whole > 0 && whole < kInfinity)) return false;
  args.logsumexp[row] = wanted < 0 ? 0.0f : found.top + std::log(static_cast<float>(whole));
  report_top(args, row, found.sorted.data(), std::min(certain, static_cast<size_t>(std::max(wanted, 0))));
  const auto token = std::find_if(found.tokens.begin(), found.tokens.end(),
                                  [id](const Token& each) { return each.id == id; });
  publish(args, row, id, token == found.tokens.end() ? from.best_values[row] : token->raw);
  return true;
}

}  // namespace

int sample_candidates(const SampleArgs& args, const CandidateArgs& candidates, int32_t* undecided) {
  int error = check_candidates(args, candidates);
  for (int64_t row = 0; row < args.rows && error == 0; ++row) {
    error = check_row(args, row);
    if (error == 0 && !is_skipped(args, row) && args.best_ids[row] < 0) {
      error = refuse_index("SampleCandidates", "best_ids", row, args.best_ids[row], args.vocab_size);
    }
  }
  if (error != 0) return error;
  const auto run = [&](int64_t row) {
    if (is_skipped(args, row)) skip_row(args, row);
    undecided[row] = is_skipped(args, row) || decide(args, candidates, row) ? 0 : 1;
  };
  // A task samples several rows, because sampling a row from few candidates takes less time than waking a thread.
  constexpr int64_t kRowsPerTask = 16;
  parallel_for(ceil_div(args.rows, kRowsPerTask), [&](int64_t task) {
    for (int64_t row = task * kRowsPerTask; row < smaller(args.rows, (task + 1) * kRowsPerTask); ++row) run(row);
  });
  return 0;
}

}  // namespace llmk
