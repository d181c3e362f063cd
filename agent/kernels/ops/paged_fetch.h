// Brings the next tile into the second-level cache while this one is worked on: block tables are beyond the hardware's
// prefetchers. Lines are asked for in the order of memory, all heads of a block after each other, a few at a time:
// a core has a limited number of misses under way, and they should never run dry.
#pragma once
#include "rotary_attention.h"

namespace llmk {
namespace LLMK_ARCH {
namespace paged {

constexpr int kFetchUnits = 8;   // units multiplied between two calls of some()
constexpr int kFetchBlocks = 4;  // blocks of rows of a tile that call it

class TileFetch {
 public:
  // Keys [begin, end) of a sequence for kv heads [head, head + heads), over about `calls` calls of some().
  void start(const RotaryAttentionArgs& args, int64_t seq, int64_t begin, int64_t end, int64_t head, int64_t heads,
             int64_t calls) {
    count_ = piece_ = 0;
    quota_ = 0;
    if (args.ready) return start_ready(args, seq, begin, end, head, heads, calls);
    const int64_t chunk = chunk_bytes(args), row_bytes = args.dim * (args.int8_cache ? 1 : size_of(args.dtype));
    const int32_t* table = args.block_tables + seq * args.table_width;
    int64_t lines = 0;
    for (int64_t j = begin; j < end;) {
      const int64_t row = j % args.block_size, rows = smaller(args.block_size - row, end - j);
      const bool whole = rows == args.block_size;
      const int64_t offset = (table[j / args.block_size] * args.kv_heads + head) * chunk + row * row_bytes;
      for (int side = 0; side < 2; ++side) {
        const void* cache = side == 0 ? args.key_cache : args.value_cache;
        for (int64_t h = 0; h < (whole ? 1 : heads) && count_ < kPieces; ++h) {
          lines += add(cache, offset + h * chunk, whole ? heads * chunk : rows * row_bytes);
        }
      }
      j += rows;
    }
    quota_ = ceil_div(lines, calls);
  }

  void stop() { count_ = piece_ = 0; }

  __attribute__((always_inline)) void some() { fetch(quota_); }

  void rest() { fetch(int64_t{1} << 40); }

 private:
  // Every key is a piece: its heads lie side by side.
  void start_ready(const RotaryAttentionArgs& args, int64_t seq, int64_t begin, int64_t end, int64_t head, int64_t heads,
                   int64_t calls) {
    int64_t lines = 0;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t offset = ready_place(args, seq, j) + head * head_bytes(args);
      if (count_ + 2 > kPieces) break;
      lines += add(args.key_cache, offset, heads * head_bytes(args));
      lines += add(args.value_cache, offset, heads * head_bytes(args));
    }
    quota_ = ceil_div(lines, calls);
  }

  // The lines of a piece.
  int64_t add(const void* cache, int64_t offset, int64_t bytes) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(cache) + static_cast<uintptr_t>(offset);
    const uintptr_t last = first + static_cast<uintptr_t>(bytes);
    const int64_t lines = static_cast<int64_t>((last + 63) / 64 - first / 64);
    pieces_[count_++] = {reinterpret_cast<const char*>(first & ~uintptr_t{63}), lines};
    return lines;
  }

  __attribute__((always_inline)) void fetch(int64_t lines) {
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

  static constexpr int kPieces = 192;  // what does not fit is not fetched
  struct Piece {
    const char* at;
    int64_t lines;
  };
  Piece pieces_[kPieces];
  int count_ = 0, piece_ = 0;
  int64_t quota_ = 0;
};

}  // namespace paged
}  // namespace LLMK_ARCH
}  // namespace llmk
