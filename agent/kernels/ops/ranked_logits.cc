#include "ranked_logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/kernel_table.h"

namespace llmk {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kBinsPerUnit = 8.0f;

// Buffers of a thread, reused for each row.
struct Buffers {
  ScratchVector<float> weights;
  ScratchVector<uint16_t> bins;
  ScratchVector<int32_t> ids;
};

Buffers& buffers() {
  thread_local Buffers instance;
  return instance;
}

bool ranks_before(float logit, int32_t id, float other_logit, int32_t other_id) {
  return logit != other_logit ? logit > other_logit : id < other_id;
}

}  // namespace

void best_tokens(const float* row, int64_t size, float top, int64_t count, ScratchVector<Candidate>* best) {
  ScratchVector<int32_t>& ids = buffers().ids;
  ids.resize(static_cast<size_t>(size) + 16);
  int64_t found = 0;
  for (float depth = 2;; depth *= 2) {
    const float low = depth > 64 || !(top - depth < top) ? -kInfinity : top - depth;
    found = kernels().logits.collect(row, size, low, top, ids.data());
    if (found >= count || low == -kInfinity) break;
  }
  best->resize(static_cast<size_t>(found));
  for (int64_t i = 0; i < found; ++i) {
    const int32_t id = ids[static_cast<size_t>(i)];
    (*best)[static_cast<size_t>(i)] = {row[id], id};
  }
  const int64_t kept = std::min(found, count);
  std::partial_sort(best->begin(), best->begin() + kept, best->end(), [](const Candidate& a, const Candidate& b) {
    return ranks_before(a.logit, a.id, b.logit, b.id);
  });
  best->resize(static_cast<size_t>(kept));
}

RankedRow::RankedRow(const float* row, int64_t size, float top) : row_(row), size_(size), top_(top) {
  Buffers& work = buffers();
  work.weights.resize(static_cast<size_t>(size));
  work.bins.resize(static_cast<size_t>(size));
  kernels().logits.weights(row, size, top, work.weights.data());
  const float* weights = work.weights.data();
  uint16_t* bins = work.bins.data();
  for (int64_t i = 0; i < size; ++i) {  // the loop has no branches, so that the compiler vectorises it
    const float below = (top - row[i]) * kBinsPerUnit;
    const int32_t bin = static_cast<int32_t>(below < kBins - 1 ? below : kBins - 1);
    bins[i] = static_cast<uint16_t>(weights[i] > 0 ? bin : kBins);
  }
  // Each bin has kWays counters, and token i uses counter i % kWays. So neighbouring tokens of one bin do not wait for
  // each other's addition.
  constexpr int kWays = 4;
  int32_t counts[kBins + 1][kWays] = {};
  double masses[kBins + 1][kWays] = {};
  for (int64_t i = 0; i < size; ++i) {
    ++counts[bins[i]][i % kWays];
    masses[bins[i]][i % kWays] += weights[i];
  }
  for (int bin = 0; bin < kBins; ++bin) {
    counts_[bin] = int64_t{counts[bin][0]} + counts[bin][1] + counts[bin][2] + counts[bin][3];
    masses_[bin] = (masses[bin][0] + masses[bin][1]) + (masses[bin][2] + masses[bin][3]);
    count_ += counts_[bin];
    mass_ += masses_[bin];
  }
}

const ScratchVector<RankedRow::Ranked>& RankedRow::sorted(int bin) {
  thread_local ScratchVector<Ranked> tokens;
  if (bin == sorted_bin_) return tokens;
  sorted_bin_ = bin;
  tokens.clear();
  Buffers& work = buffers();
  work.ids.resize(static_cast<size_t>(size_) + 16);
  const float margin = 1e-5f * std::max(1.0f, std::fabs(top_));  // larger than the rounding error of top - logit
  const float low = bin == kBins - 1 ? -kInfinity : top_ - static_cast<float>(bin + 1) / kBinsPerUnit - margin;
  const float high = top_ - static_cast<float>(bin) / kBinsPerUnit + margin;
  const int64_t found = kernels().logits.collect(row_, size_, low, high, work.ids.data());
  for (int64_t i = 0; i < found; ++i) {
    const int32_t id = work.ids[static_cast<size_t>(i)];
    if (work.bins[static_cast<size_t>(id)] != bin) continue;
    tokens.push_back({id, row_[id], work.weights[static_cast<size_t>(id)]});
  }
  std::sort(tokens.begin(), tokens.end(),
            [](const Ranked& a, const Ranked& b) { return ranks_before(a.logit, a.id, b.logit, b.id); });
  return tokens;
}

// Adds bins to the prefix, in descending order of their logits. Sorts only one bin: the first for which keep_bin()
// returns false.
template <class KeepBin, class KeepToken>
Prefix RankedRow::walk(const KeepBin& keep_bin, const KeepToken& keep_token) {
  Prefix prefix{0, 0};
  for (int bin = 0; bin < kBins; ++bin) {
    if (counts_[bin] == 0) continue;
    if (keep_bin(prefix, bin)) {
      prefix = {prefix.count + counts_[bin], prefix.mass + masses_[bin]};
      continue;
    }
    for (const Ranked& token : sorted(bin)) {
      if (!keep_token(prefix, token.weight)) break;
      prefix = {prefix.count + 1, prefix.mass + token.weight};
    }
    break;
  }
  return prefix;
}

Prefix RankedRow::best(int64_t count) {
  return walk([&](const Prefix& prefix, int bin) { return prefix.count + counts_[bin] <= count; },
              [&](const Prefix& prefix, float) { return prefix.count < count; });
}

Prefix RankedRow::reaching(double mass) {
  return walk([&](const Prefix& prefix, int bin) { return prefix.mass + masses_[bin] < mass; },
              [&](const Prefix& prefix, float) { return prefix.count == 0 || prefix.mass < mass; });
}

Prefix RankedRow::at_least(float weight) {
  return walk([&](const Prefix&, int bin) { return sorted(bin).back().weight >= weight; },
              [&](const Prefix& prefix, float other) { return prefix.count == 0 || other >= weight; });
}

int32_t RankedRow::token_at(double mass, Prefix within) {
  double running = 0;
  int64_t passed = 0;
  int32_t last = 0;
  for (int bin = 0; bin < kBins && passed < within.count; ++bin) {
    if (counts_[bin] == 0) continue;
    const bool whole = passed + counts_[bin] <= within.count;
    if (whole && running + masses_[bin] <= mass && passed + counts_[bin] < within.count) {
      running += masses_[bin];
      passed += counts_[bin];
      continue;
    }
    for (const Ranked& token : sorted(bin)) {
      if (passed == within.count) break;
      running += token.weight;
      ++passed;
      last = token.id;
      if (running > mass) return last;
    }
  }
  return last;
}

}  // namespace llmk
