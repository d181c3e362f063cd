// What RotaryAttention refuses, before anything is written.
#include "../common/check.h"
#include "checks.h"
#include "rotary_attention.h"

namespace llmk {
namespace {

int check_lengths(const char* op, RotaryAttentionArgs* args, int64_t* query_starts) {
  int64_t end = 0;
  for (int64_t seq = 0; seq < args->num_seqs; ++seq) {
    const int64_t query_len = args->query_lens[seq], context = args->context_lens[seq];
    if (query_len < 0 || context < query_len) return refuse_lengths(op, seq, query_len, context);
    if (query_len > 0 && context > args->table_width * args->block_size) {
      return refuse_context(op, seq, context, args->table_width, args->block_size);
    }
    query_starts[seq] = end;
    end += query_len;
  }
  if (end > args->tokens) {
    return refuse_text(op, "the query lengths sum to %lld; the step has %lld tokens", static_cast<long long>(end),
                       static_cast<long long>(args->tokens));
  }
  return 0;
}

int check_tokens(const char* op, const RotaryAttentionArgs& args) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  for (int64_t i = 0; i < args.tokens; ++i) {
    if (args.positions[i] < 0 || args.positions[i] >= args.table_rows) {
      return refuse_index(op, "positions", i, args.positions[i], args.table_rows);
    }
    if (args.slots[i] >= num_slots) return refuse_index(op, "slot_mapping", i, args.slots[i], num_slots);
  }
  return 0;
}

int check_tables(const char* op, const RotaryAttentionArgs& args) {
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    if (args.query_lens[seq] == 0) continue;
    const int64_t first = seq * args.table_width, count = ceil_div(args.context_lens[seq], args.block_size);
    for (int64_t i = first; i < first + count; ++i) {
      if (args.block_tables[i] < 0 || args.block_tables[i] >= args.num_blocks) {
        return refuse_index(op, "block_tables", i, args.block_tables[i], args.num_blocks);
      }
    }
  }
  return 0;
}

// Blocks written in this step, a bit each.
class WrittenBlocks {
 public:
  explicit WrittenBlocks(int64_t num_blocks) {
    const int64_t bytes = ceil_div(num_blocks, 64) * 8;
    words_ = static_cast<uint64_t*>(thread_scratch(kScratchTile, bytes));
    std::memset(words_, 0, static_cast<size_t>(bytes));
  }
  bool has(int64_t block) const { return (words_[block / 64] >> (block % 64) & 1) != 0; }
  void add(int64_t block) { words_[block / 64] |= uint64_t{1} << (block % 64); }

 private:
  uint64_t* words_;
};

// Marks what a sequence writes. False when it writes anywhere but at its own last positions, or where another one does.
bool mark_writes(const RotaryAttentionArgs& args, int64_t seq, WrittenBlocks* written) {
  const int64_t begin = args.context_lens[seq] - args.query_lens[seq];
  int64_t last = -1;
  for (int64_t row = 0; row < args.query_lens[seq]; ++row) {
    const int64_t slot = args.slots[args.query_starts[seq] + row], block = slot / args.block_size;
    if (slot < 0) continue;
    if (args.block_tables[seq * args.table_width + (begin + row) / args.block_size] != block) return false;
    if (block != last && written->has(block)) return false;
    written->add(block);
    last = block;
  }
  return true;
}

// True unless every sequence reads only what it writes itself, or what no one writes in this step. With a prefix cache
// a sequence may share a block that another one fills in the same step.
bool must_write_first(const RotaryAttentionArgs& args) {
  WrittenBlocks written(args.num_blocks);
  int64_t tokens = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    if (!mark_writes(args, seq, &written)) return true;
    tokens += args.query_lens[seq];
  }
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    if (args.query_lens[seq] == 0) continue;
    const int64_t old = (args.context_lens[seq] - args.query_lens[seq]) / args.block_size;
    for (int64_t i = 0; i < old; ++i) {
      if (written.has(args.block_tables[seq * args.table_width + i])) return true;
    }
  }
  return tokens != args.tokens;
}

}  // namespace

int check_rotary_attention(const char* op, RotaryAttentionArgs* args, int64_t* query_starts) {
  int error = check_lengths(op, args, query_starts);
  if (error == 0) error = check_tokens(op, *args);
  if (error == 0) error = check_tables(op, *args);
  if (error != 0) return error;
  args->query_starts = query_starts;
  args->write_first = must_write_first(*args);
  const int64_t used =
      args->num_seqs == 0 ? 0 : query_starts[args->num_seqs - 1] + args->query_lens[args->num_seqs - 1];
  const int64_t row_bytes = args->heads * args->dim * size_of(args->dtype);
  std::memset(static_cast<char*>(args->out) + used * row_bytes, 0,
              static_cast<size_t>((args->tokens - used) * row_bytes));
  return 0;
}

}  // namespace llmk
