// The scalar reference of attention.h: every score, one softmax, in double.
#include "attention.h"

#include <cmath>
#include <vector>

namespace llmk {
namespace reference {
namespace {

template <class T>
void attend_row(const AttentionArgs& args, int64_t seq, int64_t row, int64_t head) {
  const int64_t visible = args.context_lens[seq] - args.query_lens[seq] + row + 1;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int64_t first = args.first_keys == nullptr ? 0 : args.first_keys[args.query_starts[seq] + row];
  const int64_t place = ((args.query_starts[seq] + row) * args.heads + head) * args.dim;
  const T* query = static_cast<const T*>(args.query) + place;
  std::vector<double> weights(static_cast<size_t>(visible)), sums(static_cast<size_t>(args.dim));
  double best = -1e300, mass = 0;
  for (int64_t j = first; j < visible; ++j) {
    const T* key = static_cast<const T*>(args.keys) + (key_row(args, seq, j) * args.kv_heads + kv_head) * args.dim;
    double score = 0;
    for (int64_t d = 0; d < args.dim; ++d) score += static_cast<double>(to_float(query[d])) * to_float(key[d]);
    weights[static_cast<size_t>(j)] = score * args.scale;
    best = std::fmax(best, score * args.scale);
  }
  for (int64_t j = first; j < visible; ++j) {
    const double weight = std::exp(weights[static_cast<size_t>(j)] - best);
    const int64_t offset = (key_row(args, seq, j) * args.kv_heads + kv_head) * args.dim;
    mass += weight;
    for (int64_t d = 0; d < args.dim; ++d) {
      sums[static_cast<size_t>(d)] += weight * to_float(static_cast<const T*>(args.values)[offset + d]);
    }
  }
  for (int64_t d = 0; d < args.dim; ++d) {
    from_float(static_cast<float>(sums[static_cast<size_t>(d)] / mass), static_cast<T*>(args.out) + place + d);
  }
}

template <class T>
void attention_typed(const AttentionArgs& args) {
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    for (int64_t row = 0; row < args.query_lens[seq]; ++row) {
      for (int64_t head = 0; head < args.heads; ++head) attend_row<T>(args, seq, row, head);
    }
  }
}

}  // namespace

void attention(const AttentionArgs& args) {
  if (args.dtype == DType::kFloat32) attention_typed<float>(args);
  if (args.dtype == DType::kFloat16) attention_typed<half_t>(args);
  if (args.dtype == DType::kBFloat16) attention_typed<bfloat_t>(args);
}

}  // namespace reference
}  // namespace llmk
