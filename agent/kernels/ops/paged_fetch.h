// Brings what is read next into the second-level cache while something else is worked on: block tables are beyond the
// hardware's prefetchers. Lines are asked for in the order in which they will be read, one for each line that is read
// meanwhile: a core has a limited number of misses under way, which should neither run dry nor make it wait.
#pragma once
#include "rotary_attention.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

class TileFetch {
 public:
  // The keys, or the values, of positions [begin, end) of a sequence for kv heads [head, head + heads), head after
  // head. A group of keys is a whole one where the cache holds them in units.
  void start(const RotaryAttentionArgs& args, bool keys, int64_t seq, int64_t begin, int64_t end, int64_t head,
             int64_t heads) {
    const auto base = reinterpret_cast<uintptr_t>(keys ? args.key_cache : args.value_cache);
    count_ = piece_ = 0;
    if (lies_in_rows(args)) return start_ready(args, base, seq, begin, end, head, heads);
    const int64_t chunk = chunk_bytes(args), row_bytes = args.dim * cache_element_bytes(args);
    const int32_t* table = args.block_tables + seq * args.table_width;
    if (cache_has_units(args)) end = ceil_div(end, kGroupKeys) * kGroupKeys;
    for (int64_t h = 0; h < heads; ++h) {
      int64_t row = begin % args.block_size;
      const int32_t* block = table + begin / args.block_size;
      for (int64_t j = begin; j < end; row = 0, ++block) {
        const int64_t rows = smaller(args.block_size - row, end - j);
        const int64_t offset = (*block * args.kv_heads + head + h) * chunk + row * row_bytes;
        const bool whole = rows == args.block_size;  // with its scales
        add(base + static_cast<uintptr_t>(offset), whole ? chunk : rows * row_bytes);
        // The values' scales are needed with the weights of all keys, before any value.
        if (whole && keys && args.int8_cache) {
          const auto values = reinterpret_cast<uintptr_t>(args.value_cache);
          add(values + static_cast<uintptr_t>(offset + args.block_size * row_bytes), args.block_size * 4);
        }
        j += rows;
      }
    }
  }

  // Besides: what the last token of a sequence is written to, whose key has a part in every unit of a group.
  void add_written(const RotaryAttentionArgs& args, int64_t seq, int64_t head, int64_t heads) {
    const int64_t position = args.context_lens[seq] - 1, index = position % args.block_size, chunk = chunk_bytes(args);
    const int64_t block = args.block_tables[seq * args.table_width + position / args.block_size];
    const int64_t first = (block * args.kv_heads + head) * chunk, row_bytes = args.dim * cache_element_bytes(args);
    const bool units = cache_has_units(args);
    const int64_t rows = units ? kGroupKeys : 1, per = units ? 4 / cache_element_bytes(args) : 1;
    for (int64_t h = 0; h < heads; ++h) {
      const uintptr_t key = reinterpret_cast<uintptr_t>(args.key_cache) + static_cast<uintptr_t>(first + h * chunk);
      const uintptr_t value = reinterpret_cast<uintptr_t>(args.value_cache) + static_cast<uintptr_t>(first + h * chunk);
      add(key + static_cast<uintptr_t>(index / rows * rows * row_bytes), rows * row_bytes);
      add(value + static_cast<uintptr_t>(index / per * per * row_bytes), per * row_bytes);
    }
  }

  void stop() { count_ = piece_ = 0; }

  __attribute__((always_inline)) void some(int64_t lines) {
    while (lines > 0 && piece_ < count_) {
      Piece& piece = pieces_[piece_];
      const int64_t n = smaller(lines, piece.lines);
      for (int64_t i = 0; i < n; ++i) __builtin_prefetch(piece.at + 64 * i, 0, 2);
      piece.at += 64 * n;
      piece.lines -= n;
      lines -= n;
      if (piece.lines == 0) ++piece_;
    }
  }

  void rest() { some(int64_t{1} << 40); }

 private:
  // Every key is a piece: its heads lie side by side.
  void start_ready(const RotaryAttentionArgs& args, uintptr_t base, int64_t seq, int64_t begin, int64_t end,
                   int64_t head, int64_t heads) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t offset = ready_place(args, seq, j) + head * head_bytes(args);
      add(base + static_cast<uintptr_t>(offset), heads * head_bytes(args));
    }
  }

  void add(uintptr_t first, int64_t bytes) {
    if (count_ == kPieces) return;
    const uintptr_t last = first + static_cast<uintptr_t>(bytes);
    const int64_t lines = static_cast<int64_t>((last + 63) / 64 - first / 64);
    pieces_[count_++] = {reinterpret_cast<const char*>(first & ~uintptr_t{63}), lines};
  }

  static constexpr int kPieces = 256;  // what does not fit is not fetched
  struct Piece {
    const char* at;
    int64_t lines;
  };
  Piece pieces_[kPieces];
  int count_ = 0, piece_ = 0;
};

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
