// Prefetches the next keys and values into the L2 cache, because hardware prefetchers cannot follow block tables.
//
// Requests cache lines in about the order in which the kernel will read them: one request for each line that the kernel
// reads. A core has a limited number of outstanding misses. Too few requests leave the memory idle, and too many stall
// the core. Alternating between several blocks is faster than one block after the other.
#pragma once
#include "rotary_attention.h"

namespace llmk::LLMK_ARCH::paged {

class TileFetch {
 public:
  // Begins to prefetch positions [begin, end) of a sequence, for kv heads [head, head + heads): the keys if `keys` is
  // true, otherwise the values.
  //
  // If the range consists of whole blocks, alternates between `together` blocks at a time, and prefetches all heads of
  // each block. Otherwise prefetches one head after the other. If the cache holds units of 4 bytes, the range is
  // extended to whole groups of 16 keys.
  void start(const RotaryAttentionArgs& args, bool keys, int64_t seq, int64_t begin, int64_t end, int64_t head,
             int64_t heads, int together) {
    const auto base = reinterpret_cast<uintptr_t>(keys ? args.key_cache : args.value_cache);
    count_ = piece_ = 0;
    together_ = 1;
    if (lies_in_rows(args)) return start_ready(args, base, seq, begin, end, head, heads);
    const int64_t chunk = chunk_bytes(args), row_bytes = args.dim * cache_element_bytes(args);
    const int32_t* table = args.block_tables + seq * args.table_width;
    if (cache_has_units(args)) end = ceil_div(end, kGroupKeys) * kGroupKeys;
    if (together > 1 && begin % args.block_size == 0 && end % args.block_size == 0) {
      together_ = together;
      return start_blocks(args, base, keys, table, begin / args.block_size, end / args.block_size, head, heads);
    }
    for (int64_t h = 0; h < heads; ++h) {
      int64_t row = begin % args.block_size;
      const int32_t* block = table + begin / args.block_size;
      for (int64_t j = begin; j < end; row = 0, ++block) {
        const int64_t rows = smaller(args.block_size - row, end - j);
        const int64_t offset = (*block * args.kv_heads + head + h) * chunk + row * row_bytes;
        const bool whole = rows == args.block_size;  // the prefetch of a whole block includes its scales
        add(base + static_cast<uintptr_t>(offset), whole ? chunk : rows * row_bytes);
        // Also prefetches the scales of all values of the block. The computation of the softmax weights needs them
        // before the values.
        if (whole && keys && args.int8_cache) {
          const auto values = reinterpret_cast<uintptr_t>(args.value_cache);
          add(values + static_cast<uintptr_t>(offset + args.block_size * row_bytes), args.block_size * 4);
        }
        j += rows;
      }
    }
  }

  // Also prefetches the cache lines of the last token of a sequence, to which the task will write. With units of 4
  // bytes, these are all lines of a group of 16 keys, because the elements of one key are spread over them.
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

  // Forgets all memory that is not prefetched yet.
  void stop() { count_ = piece_ = 0; }

  // Prefetches the next `lines` cache lines. rest() prefetches all that are left.
  __attribute__((always_inline)) void some(int64_t lines) {
    if (together_ > 1) return some_of_several(lines);
    while (lines > 0 && piece_ < count_) {
      lines -= pieces_[piece_].fetch(lines);
      if (pieces_[piece_].lines == 0) ++piece_;
    }
  }

  void rest() { some(int64_t{1} << 40); }

 private:
  // Prefetches `lines` cache lines, divided equally among the next `together_` pieces.
  void some_of_several(int64_t lines) {
    while (lines > 0 && piece_ < count_) {
      const int end = smaller(piece_ + together_, count_);
      const int64_t each = larger(1, lines / (end - piece_));
      int64_t left = 0;
      for (int i = piece_; i < end; ++i) {
        lines -= pieces_[i].fetch(each);
        left += pieces_[i].lines;
      }
      if (left == 0) piece_ = end;
    }
  }

  // Begins to prefetch the whole blocks [first, end) of a block table, all heads of a block together.
  void start_blocks(const RotaryAttentionArgs& args, uintptr_t base, bool keys, const int32_t* table, int64_t first,
                    int64_t end, int64_t head, int64_t heads) {
    const int64_t chunk = chunk_bytes(args);
    for (int64_t i = first; i < end; ++i) {
      add(base + static_cast<uintptr_t>((table[i] * args.kv_heads + head) * chunk), heads * chunk);
    }
    if (!keys || !args.int8_cache) return;
    // Also prefetches the scales of the values. The computation of the softmax weights needs them before the values.
    const int64_t scale_bytes = args.block_size * 4;
    const auto scales = reinterpret_cast<uintptr_t>(args.value_cache) + static_cast<uintptr_t>(chunk - scale_bytes);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = first; i < end; ++i) {
        add(scales + static_cast<uintptr_t>((table[i] * args.kv_heads + head + h) * chunk), scale_bytes);
      }
    }
  }

  // Begins to prefetch keys or values that are matrix rows. Consecutive rows in memory are one piece.
  void start_ready(const RotaryAttentionArgs& args, uintptr_t base, int64_t seq, int64_t begin, int64_t end,
                   int64_t head, int64_t heads) {
    const int64_t stride = args.kv_heads * head_bytes(args), bytes = heads * head_bytes(args);
    for (int64_t j = begin; j < end;) {
      int64_t rows = end - j;
      if (args.block_tables != nullptr) rows = smaller(rows, args.block_size - j % args.block_size);
      const int64_t offset = ready_place(args, seq, j) + head * head_bytes(args);
      add(base + static_cast<uintptr_t>(offset), bytes, rows, stride);
      j += rows;
    }
  }

  // Adds memory to prefetch: `rows` ranges of `bytes` bytes, which begin `stride` bytes apart. If `stride` is not a
  // multiple of a cache line, a range may begin in the middle of a line. So one more line is prefetched for each range.
  void add(uintptr_t first, int64_t bytes, int64_t rows = 1, int64_t stride = 0) {
    if (count_ == kPieces) return;
    const uintptr_t last = first + static_cast<uintptr_t>(bytes);
    const int64_t lines = static_cast<int64_t>((last + 63) / 64 - first / 64) + (stride % 64 != 0);
    pieces_[count_++] = {reinterpret_cast<const char*>(first & ~uintptr_t{63}), lines, lines, rows, stride};
  }

  // Maximum number of pieces; further pieces are not prefetched.
  static constexpr int kPieces = 256;
  // Rows of memory to prefetch, `stride` bytes apart. The current row begins at `at` and has `lines` cache lines left.
  // `rows` counts the rows that are left, and each of them has `row_lines` lines.
  struct Piece {
    const char* at;
    int64_t lines, row_lines, rows, stride;

    // Prefetches at most `most` lines of the current row. Returns the number of prefetched lines.
    __attribute__((always_inline)) int64_t fetch(int64_t most) {
      const int64_t n = smaller(most, lines);
      for (int64_t i = 0; i < n; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
      at += 64 * n;
      lines -= n;
      if (lines == 0 && rows > 1) next_row();
      return n;
    }

    void next_row() {
      at += stride - 64 * row_lines;
      lines = row_lines;
      --rows;
    }
  };
  Piece pieces_[kPieces];
  int count_ = 0, piece_ = 0, together_ = 1;
};

}  // namespace llmk::LLMK_ARCH::paged
