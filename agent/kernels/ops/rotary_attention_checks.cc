// Checks the arguments of attention before anything is written: lengths, positions, slots and block tables.
#include "../common/check.h"
#include "checks.h"
#include "rotary_attention.h"

namespace llmk {
namespace {

constexpr int64_t kPlainBlockKeys = 64;  // block size that the kernel assumes if keys are matrix rows

// Checks the lengths of every sequence and fills query_starts.
int check_lengths(const char* op, const RotaryAttentionArgs& args, int64_t* query_starts) {
  int64_t end = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t query_len = args.query_lens[seq], context = args.context_lens[seq];
    if (query_len < 0 || context < query_len) {
      return refuse_text(op, "sequence %lld has %lld queries and %lld keys; it needs 0 <= queries <= keys",
                         static_cast<long long>(seq), static_cast<long long>(query_len),
                         static_cast<long long>(context));
    }
    if (args.block_tables != nullptr && query_len > 0 && context > args.table_width * args.block_size) {
      return refuse_text(op, "context_lens[%lld] is %lld; block_tables of width %lld and block_size %lld hold %lld",
                         static_cast<long long>(seq), static_cast<long long>(context),
                         static_cast<long long>(args.table_width), static_cast<long long>(args.block_size),
                         static_cast<long long>(args.table_width * args.block_size));
    }
    query_starts[seq] = end;
    end += query_len;
  }
  if (end > args.tokens) {
    return refuse_text(op, "the query lengths sum to %lld; the step has %lld tokens", static_cast<long long>(end),
                       static_cast<long long>(args.tokens));
  }
  return 0;
}

// Checks every block that the kernel reads against the size of the cache.
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

// Sets the output rows after the last sequence to zero: they are padding.
void clear_padding(const RotaryAttentionArgs& args) {
  const int64_t last = args.num_seqs - 1, used = last < 0 ? 0 : args.query_starts[last] + args.query_lens[last];
  const int64_t row_bytes = args.heads * args.dim * size_of(args.dtype);
  char* padding = static_cast<char*>(args.out) + used * row_bytes;
  std::memset(padding, 0, static_cast<size_t>((args.tokens - used) * row_bytes));
}

// The set of blocks that this step writes, one bit for each block.
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

// Adds the blocks that a sequence writes to `written`. Returns false if the sequence writes to a position other than
// those of its own new tokens, or into a block that another sequence writes.
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

// Returns true if a sequence may read a block that another sequence writes in this step. Then the kernel must write all
// keys of the step before it reads any. This happens if two sequences share a block through the prefix cache, and one
// of them fills it in this step.
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
  int error = check_lengths(op, *args, query_starts);
  if (error == 0) error = check_positions(op, args->positions, args->tokens, args->table_rows);
  if (error == 0) error = check_slots(op, args->slots, args->tokens, args->num_blocks * args->block_size);
  if (error == 0) error = check_tables(op, *args);
  if (error != 0) return error;
  args->query_starts = query_starts;
  args->write_first = must_write_first(*args);
  clear_padding(*args);
  return 0;
}

int check_ready_attention(const char* op, RotaryAttentionArgs* args, int64_t key_rows, int64_t* starts) {
  int error = check_lengths(op, *args, starts);
  if (error == 0 && args->block_tables != nullptr) error = check_tables(op, *args);
  if (error != 0) return error;
  args->query_starts = starts;
  if (args->block_tables == nullptr) {
    int64_t* key_starts = starts + args->num_seqs;
    int64_t key_end = 0;
    for (int64_t seq = 0; seq < args->num_seqs; ++seq) {
      key_starts[seq] = key_end;
      key_end += args->context_lens[seq];
    }
    if (key_end > key_rows) {
      return refuse_text(op, "the key lengths sum to %lld; the key has %lld tokens", static_cast<long long>(key_end),
                         static_cast<long long>(key_rows));
    }
    args->key_starts = key_starts;
    args->block_size = kPlainBlockKeys;
  }
  clear_padding(*args);
  return 0;
}

}  // namespace llmk
