#include "laid_out_caches.h"

#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "rotary_attention.h"

namespace llmk {
namespace {

std::shared_mutex caches_mutex;
// How often each cache was named and not yet forgotten.
std::unordered_map<const void*, int>& caches() {
  // The map is allocated once and never freed, because other threads may still use it when the process ends.
  static auto* all = new std::unordered_map<const void*, int>;
  return *all;
}

// Describes the cache to key_element() and value_element().
RotaryAttentionArgs described(const LaidOutRows& rows) {
  RotaryAttentionArgs args{};
  args.dtype = DType::kBFloat16;
  args.ready = args.laid_out = true;
  args.block_size = rows.block_size;
  args.kv_heads = rows.kv_heads;
  args.dim = rows.dim;
  return args;
}

// Writes 16 tokens of one head, which fill a group of the cache. `rows` is the row of the first token. `group` is the
// group of keys [dim / 2][16 tokens], or of values [8][dim].
void write_group(const LaidOutRows& rows, const char* first, uint32_t* group) {
  const int64_t dim = rows.dim, units = dim / 2;
  for (int64_t i = 0; rows.is_key && i < units; ++i) {
    for (int64_t j = 0; j < kGroupKeys; ++j) {
      std::memcpy(group + i * kGroupKeys + j, first + j * rows.row_bytes + i * 4, 4);
    }
  }
  for (int64_t pair = 0; !rows.is_key && pair < kGroupKeys / 2; ++pair, group += dim) {
    const uint16_t* even = reinterpret_cast<const uint16_t*>(first + 2 * pair * rows.row_bytes);
    const uint16_t* odd = reinterpret_cast<const uint16_t*>(first + (2 * pair + 1) * rows.row_bytes);
    for (int64_t d = 0; d < dim; ++d) group[d] = even[d] | static_cast<uint32_t>(odd[d]) << 16;
  }
}

// Writes one head of one token. `out` is the place of its first element in the cache.
void write_token(const LaidOutRows& rows, const char* row, uint16_t* out) {
  const int64_t dim = rows.dim;
  if (rows.is_key) {
    for (int64_t d = 0; d < dim; d += 2) std::memcpy(out + d * kGroupKeys, row + d * 2, 4);
    return;
  }
  const uint16_t* in = reinterpret_cast<const uint16_t*>(row);
  for (int64_t d = 0; d < dim; ++d) out[2 * d] = in[d];
}

// Prefetches the cache lines that write_token() writes.
void fetch_token(const LaidOutRows& rows, const uint16_t* out) {
  const int64_t lines = rows.dim * (rows.is_key ? kGroupKeys : 2) / 32;
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(out + i * 32, 1, 3);
}

bool fills_group(const LaidOutRows& rows, int64_t token, int64_t end) {
  const int64_t slot = rows.slots[token];
  if (slot < 0 || slot % kGroupKeys != 0 || token + kGroupKeys > end) return false;
  for (int64_t i = 1; i < kGroupKeys; ++i) {
    if (rows.slots[token + i] != slot + i) return false;
  }
  return true;
}

}  // namespace

void keep_laid_out(const void* cache) {
  const std::unique_lock<std::shared_mutex> lock(caches_mutex);
  ++caches()[cache];
}

void forget_laid_out(const void* cache) {
  const std::unique_lock<std::shared_mutex> lock(caches_mutex);
  if (--caches()[cache] <= 0) caches().erase(cache);
}

bool is_laid_out(const void* cache) {
  const std::shared_lock<std::shared_mutex> lock(caches_mutex);
  return caches().count(cache) != 0;
}

void write_laid_out(const LaidOutRows& rows, int64_t begin, int64_t end) {
  const RotaryAttentionArgs args = described(rows);
  const int64_t chunk_elements = rows.block_size * rows.dim;
  for (int64_t token = begin, count = 1; token < end; token += count) {
    const bool whole = fills_group(rows, token, end);
    count = whole ? kGroupKeys : 1;
    const int64_t slot = rows.slots[token], index = slot % rows.block_size;
    if (slot < 0) continue;
    const char* row = rows.rows + token * rows.row_bytes;
    uint16_t* out = static_cast<uint16_t*>(rows.cache) + slot / rows.block_size * rows.kv_heads * chunk_elements;
    out += rows.is_key ? key_element(args, index, 0) : value_element(args, index, 0);
    for (int64_t head = 0; head < rows.kv_heads; ++head, out += chunk_elements, row += rows.dim * 2) {
      if (whole) {
        write_group(rows, row, reinterpret_cast<uint32_t*>(out));
        continue;
      }
      if (head + 1 < rows.kv_heads) fetch_token(rows, out + chunk_elements);
      write_token(rows, row, out);
    }
  }
}

void write_all_laid_out(const LaidOutRows& rows, int64_t tokens) {
  const int64_t per_task = laid_out_task(tokens);
  parallel_for(ceil_div(tokens, per_task),
               [&](int64_t task) { write_laid_out(rows, task * per_task, smaller(tokens, (task + 1) * per_task)); });
}

int64_t laid_out_task(int64_t tokens) {
  const int64_t even = ceil_div(tokens, 2 * static_cast<int64_t>(num_threads()));
  return even < kGroupKeys ? larger(1, even) : kGroupKeys;
}

}  // namespace llmk
