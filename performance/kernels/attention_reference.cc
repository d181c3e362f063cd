// The scalar reference of the attention kernel (ops/rotary_attention.h). It computes all scores of a query row and then
// one softmax over them, in double precision.
#include <cmath>
#include <vector>

#include "reference.h"

namespace llmk::reference {
namespace {

using Head = std::vector<double>;

// Returns one head of a token, in double precision. A row of `qkv` has all query heads, then all key heads, then all
// value heads. If the model normalises queries and keys, RMSNorm is applied to a query or key head.
Head load_head(const RotaryAttentionArgs& args, int64_t token, int64_t head) {
  Head x(static_cast<size_t>(args.dim));
  const int64_t first = (token * (args.heads + 2 * args.kv_heads) + head) * args.dim;
  for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] = load_element(args.dtype, args.qkv, first + d);
  const void* gamma = head < args.heads ? args.query_gamma : args.key_gamma;
  if (gamma == nullptr || head >= args.heads + args.kv_heads) return x;
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(args.dim) + args.epsilon);
  for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] *= scale * load_element(args.gamma_dtype, gamma, d);
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

// Locates one key or value in the cache: the chunk (one block of one kv head), the row in the chunk, and the kv head.
struct Held {
  int64_t chunk, row, head;
  bool is_key;

  int64_t element(const RotaryAttentionArgs& args, int64_t d) const {
    return is_key ? key_element(args, row, d) : value_element(args, row, d);
  }
  // Returns the number to XOR with each stored int8. If the cache has units of 4 bytes, int8 keys have a flipped sign
  // bit, and the number flips this bit back. Otherwise the number is 0.
  char bias(const RotaryAttentionArgs& args) const {
    return static_cast<char>(is_key && cache_has_units(args) ? kKeyBias & 0xFF : 0);
  }
  int64_t scale(const RotaryAttentionArgs& args) const { return args.block_size * args.dim + row * 4; }
};

Held held(const RotaryAttentionArgs& args, int64_t slot, int64_t head, bool is_key) {
  const int64_t block = slot / args.block_size;
  return {(block * args.kv_heads + head) * chunk_bytes(args), slot % args.block_size, head, is_key};
}

void write_cache(const RotaryAttentionArgs& args, const Head& x, const Held& at) {
  char* base = static_cast<char*>(at.is_key ? args.key_cache : args.value_cache) + at.chunk;
  if (!args.int8_cache) {
    for (int64_t d = 0; d < args.dim; ++d) {
      store_any(args.dtype, x[static_cast<size_t>(d)], base, at.element(args, d));
    }
    return;
  }
  double most = 0;
  for (const double value : x) most = std::fmax(most, std::fabs(value));
  const float scale = static_cast<float>(most / 127);
  for (int64_t d = 0; d < args.dim; ++d) {
    const double value = x[static_cast<size_t>(d)];
    const int whole = most > 0 ? static_cast<int>(std::nearbyint(value * 127 / most)) : 0;
    base[at.element(args, d)] = static_cast<char>(whole ^ at.bias(args));
  }
  std::memcpy(base + at.scale(args), &scale, sizeof(scale));
}

Head read_cache(const RotaryAttentionArgs& args, const Held& at) {
  const char* base = static_cast<const char*>(at.is_key ? args.key_cache : args.value_cache) + at.chunk;
  Head x(static_cast<size_t>(args.dim));
  float scale = 1;
  if (args.int8_cache) std::memcpy(&scale, base + at.scale(args), sizeof(scale));
  for (int64_t d = 0; d < args.dim; ++d) {
    const int64_t i = at.element(args, d);
    x[static_cast<size_t>(d)] = args.int8_cache
                                    ? scale * double{static_cast<float>(static_cast<int8_t>(base[i] ^ at.bias(args)))}
                                    : load_element(args.dtype, base, i);
  }
  return x;
}

// Returns the key or value at a position of a sequence.
Head held_at(const RotaryAttentionArgs& args, int64_t seq, int64_t position, int64_t kv_head, bool is_key) {
  if (lies_in_rows(args)) {
    const int64_t first = ready_place(args, seq, position) / size_of(args.dtype) + kv_head * args.dim;
    Head x(static_cast<size_t>(args.dim));
    const void* cache = is_key ? args.key_cache : args.value_cache;
    for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] = load_element(args.dtype, cache, first + d);
    return x;
  }
  const int64_t block = args.block_tables[seq * args.table_width + position / args.block_size];
  return read_cache(args, held(args, block * args.block_size + position % args.block_size, kv_head, is_key));
}

Head query_of(const RotaryAttentionArgs& args, int64_t token, int64_t head) {
  if (!args.ready) return rotate(args, token, load_head(args, token, head));
  Head x(static_cast<size_t>(args.dim));
  const int64_t first = (token * args.heads + head) * args.dim;
  for (int64_t d = 0; d < args.dim; ++d) x[static_cast<size_t>(d)] = load_element(args.dtype, args.qkv, first + d);
  return x;
}

void attend(const RotaryAttentionArgs& args, int64_t seq, int64_t row, int64_t head) {
  const int64_t token = args.query_starts[seq] + row, kv_head = head / (args.heads / args.kv_heads);
  const int64_t group = args.heads / args.kv_heads, first = first_key(args, seq, row * group);
  const int64_t visible = visible_keys(args, seq, row * group);
  const Head query = query_of(args, token, head);
  std::vector<double> scores(static_cast<size_t>(visible));
  const bool sink = args.sinks != nullptr;
  double best = sink ? static_cast<double>(args.sinks[head]) : -1e300, mass = 0;
  for (int64_t j = first; j < visible; ++j) {
    const Head key = held_at(args, seq, j, kv_head, true);
    double score = 0;
    for (size_t d = 0; d < key.size(); ++d) score += query[d] * key[d];
    scores[static_cast<size_t>(j)] = score * args.scale;
    best = std::fmax(best, score * args.scale);
  }
  if (sink) mass = std::exp(args.sinks[head] - best);
  Head sums(query.size());
  for (int64_t j = first; j < visible; ++j) {
    const Head value = held_at(args, seq, j, kv_head, false);
    const double weight = std::exp(scores[static_cast<size_t>(j)] - best);
    mass += weight;
    for (size_t d = 0; d < value.size(); ++d) sums[d] += weight * value[d];
  }
  for (int64_t d = 0; d < args.dim; ++d) {
    store_any(args.dtype, sums[static_cast<size_t>(d)] / mass, args.out,
                  (token * args.heads + head) * args.dim + d);
  }
}

}  // namespace

void rotary_attention(const RotaryAttentionArgs& args) {
  for (int64_t token = 0; token < args.tokens && !args.ready; ++token) {
    if (args.slots[token] < 0) continue;
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      write_cache(args, rotate(args, token, load_head(args, token, args.heads + head)),
                  held(args, args.slots[token], head, true));
      write_cache(args, load_head(args, token, args.heads + args.kv_heads + head),
                  held(args, args.slots[token], head, false));
    }
  }
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    for (int64_t row = 0; row < args.query_lens[seq]; ++row) {
      for (int64_t head = 0; head < args.heads; ++head) attend(args, seq, row, head);
    }
  }
}

}  // namespace llmk::reference
