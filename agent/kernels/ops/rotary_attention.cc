// The scalar reference of rotary_attention.h: every score, one softmax, in double.
#include "rotary_attention.h"

#include <cmath>
#include <vector>

namespace llmk {
namespace reference {
namespace {

double load_element(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kFloat16) return to_float(static_cast<const half_t*>(data)[i]);
  return to_float(static_cast<const bfloat_t*>(data)[i]);
}

void store_element(DType dtype, double value, void* data, int64_t i) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::kFloat32) from_float(rounded, static_cast<float*>(data) + i);
  if (dtype == DType::kFloat16) from_float(rounded, static_cast<half_t*>(data) + i);
  if (dtype == DType::kBFloat16) from_float(rounded, static_cast<bfloat_t*>(data) + i);
}

using Head = std::vector<double>;

// Normed where it is a query or key that is to be.
Head load_head(const RotaryAttentionArgs& args, int64_t token, int64_t head) {
  Head x(static_cast<size_t>(args.dim));
  const int64_t first = (token * (args.heads + 2 * args.kv_heads) + head) * args.dim;
  for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] = load_element(args.dtype, args.qkv, first + d);
  const void* gamma = head < args.heads ? args.query_gamma : args.key_gamma;
  if (gamma == nullptr || head >= args.heads + args.kv_heads) return x;
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(args.dim) + args.epsilon);
  for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] *= scale * load_element(args.dtype, gamma, d);
  return x;
}

Head rotate(const RotaryAttentionArgs& args, int64_t token, const Head& x) {
  const size_t half = x.size() / 2;
  const float* cos = args.cos + args.positions[token] * args.dim;
  const float* sin = args.sin + args.positions[token] * args.dim;
  Head out(x.size());
  for (size_t i = 0; i < half; ++i) {
    out[i] = x[i] * cos[i] - x[i + half] * sin[i];
    out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
  }
  return out;
}

void write_cache(const RotaryAttentionArgs& args, const Head& x, void* cache, const CachePlace& place, int64_t head) {
  char* base = static_cast<char*>(cache) + head * chunk_bytes(args);
  if (!args.int8_cache) {
    for (size_t d = 0; d < x.size(); ++d) store_element(args.dtype, x[d], base + place.values, static_cast<int64_t>(d));
    return;
  }
  double most = 0;
  for (const double value : x) most = std::fmax(most, std::fabs(value));
  const float scale = static_cast<float>(most / 127);
  for (size_t d = 0; d < x.size(); ++d) {
    base[place.values + static_cast<int64_t>(d)] =
        static_cast<char>(most > 0 ? static_cast<int>(std::nearbyint(x[d] * 127 / most)) : 0);
  }
  std::memcpy(base + place.scale, &scale, sizeof(scale));
}

Head read_cache(const RotaryAttentionArgs& args, const void* cache, const CachePlace& place, int64_t head) {
  const char* base = static_cast<const char*>(cache) + head * chunk_bytes(args);
  Head x(static_cast<size_t>(args.dim));
  float scale = 1;
  if (args.int8_cache) std::memcpy(&scale, base + place.scale, sizeof(scale));
  for (int64_t d = 0; d < args.dim; ++d) {
    x[static_cast<size_t>(d)] = args.int8_cache ? scale * double{static_cast<float>(static_cast<int8_t>(base[place.values + d]))}
                                                : load_element(args.dtype, base + place.values, d);
  }
  return x;
}

void attend(const RotaryAttentionArgs& args, int64_t seq, int64_t row, int64_t head) {
  const int64_t token = args.query_starts[seq] + row, kv_head = head / (args.heads / args.kv_heads);
  const int64_t group = args.heads / args.kv_heads, first = first_key(args, seq, row * group);
  const int64_t visible = visible_keys(args, seq, row * group);
  const Head query = rotate(args, token, load_head(args, token, head));
  const auto place = [&](int64_t position) {
    return cache_place(args, args.block_tables[seq * args.table_width + position / args.block_size],
                       position % args.block_size);
  };
  std::vector<double> scores(static_cast<size_t>(visible));
  double best = -1e300, mass = 0;
  for (int64_t j = first; j < visible; ++j) {
    const Head key = read_cache(args, args.key_cache, place(j), kv_head);
    double score = 0;
    for (size_t d = 0; d < key.size(); ++d) score += query[d] * key[d];
    scores[static_cast<size_t>(j)] = score * args.scale;
    best = std::fmax(best, score * args.scale);
  }
  Head sums(query.size());
  for (int64_t j = first; j < visible; ++j) {
    const Head value = read_cache(args, args.value_cache, place(j), kv_head);
    const double weight = std::exp(scores[static_cast<size_t>(j)] - best);
    mass += weight;
    for (size_t d = 0; d < value.size(); ++d) sums[d] += weight * value[d];
  }
  for (int64_t d = 0; d < args.dim; ++d) {
    store_element(args.dtype, sums[static_cast<size_t>(d)] / mass, args.out, (token * args.heads + head) * args.dim + d);
  }
}

}  // namespace

void rotary_attention(const RotaryAttentionArgs& args) {
  for (int64_t token = 0; token < args.tokens; ++token) {
    if (args.slots[token] < 0) continue;
    const CachePlace place = cache_place(args, args.slots[token] / args.block_size, args.slots[token] % args.block_size);
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      write_cache(args, rotate(args, token, load_head(args, token, args.heads + head)), args.key_cache, place, head);
      write_cache(args, load_head(args, token, args.heads + args.kv_heads + head), args.value_cache, place, head);
    }
  }
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    for (int64_t row = 0; row < args.query_lens[seq]; ++row) {
      for (int64_t head = 0; head < args.heads; ++head) attend(args, seq, row, head);
    }
  }
}

}  // namespace reference
}  // namespace llmk
