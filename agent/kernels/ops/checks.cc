#include "checks.h"

#include "../common/check.h"

namespace llmk {

int refuse_lengths(const char* op, int64_t seq, int64_t query_len, int64_t context) {
  return refuse_text(op, "sequence %lld has %lld queries and %lld keys; it needs 0 <= queries <= keys",
                     static_cast<long long>(seq), static_cast<long long>(query_len),
                     static_cast<long long>(context));
}

int refuse_context(const char* op, int64_t seq, int64_t context, int64_t table_width, int64_t block_size) {
  return refuse_text(op, "context_lens[%lld] is %lld; block_tables of width %lld and block_size %lld hold %lld",
                     static_cast<long long>(seq), static_cast<long long>(context),
                     static_cast<long long>(table_width), static_cast<long long>(block_size),
                     static_cast<long long>(table_width * block_size));
}

static int check_blocks(const char* op, const AttentionArgs& args, int64_t seq, int64_t num_blocks) {
  const int64_t context = args.context_lens[seq];
  if (context > args.table_width * args.block_size) {
    return refuse_context(op, seq, context, args.table_width, args.block_size);
  }
  for (int64_t i = 0; i < ceil_div(context, args.block_size); ++i) {
    const int64_t block = args.block_tables[seq * args.table_width + i];
    if (block < 0 || block >= num_blocks) {
      return refuse_index(op, "block_tables", seq * args.table_width + i, block, num_blocks);
    }
  }
  return 0;
}

int check_attention(const char* op, AttentionArgs* args, int64_t tokens, int64_t num_blocks, int64_t plain_rows,
                    int64_t* starts) {
  int64_t query_end = 0, key_end = 0;
  for (int64_t seq = 0; seq < args->num_seqs; ++seq) {
    const int64_t query_len = args->query_lens[seq], context = args->context_lens[seq];
    if (query_len < 0 || context < query_len) return refuse_lengths(op, seq, query_len, context);
    starts[seq] = query_end;
    starts[args->num_seqs + seq] = key_end;
    query_end += query_len;
    key_end += context;
    if (args->block_tables != nullptr && query_len > 0) {
      const int error = check_blocks(op, *args, seq, num_blocks);
      if (error != 0) return error;
    }
  }
  if (query_end > tokens) {
    return refuse_text(op, "the query lengths sum to %lld; the query has %lld tokens",
                       static_cast<long long>(query_end), static_cast<long long>(tokens));
  }
  if (args->block_tables == nullptr && key_end > plain_rows) {
    return refuse_text(op, "the key lengths sum to %lld; the key has %lld tokens", static_cast<long long>(key_end),
                       static_cast<long long>(plain_rows));
  }
  args->query_starts = starts;
  args->key_starts = starts + args->num_seqs;
  // Rows past the last sequence are padding: zeros.
  const int64_t row_bytes = args->heads * args->dim * size_of(args->dtype);
  std::memset(static_cast<char*>(args->out) + query_end * row_bytes, 0,
              static_cast<size_t>((tokens - query_end) * row_bytes));
  return 0;
}

int check_slots(const char* op, const int32_t* slots, int64_t tokens, int64_t num_slots) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] >= num_slots) return refuse_index(op, "slot_mapping", i, slots[i], num_slots);
  }
  return 0;
}

int check_positions(const char* op, const int32_t* positions, int64_t tokens, int64_t table_rows) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (positions[i] < 0 || positions[i] >= table_rows) {
      return refuse_index(op, "positions", i, positions[i], table_rows);
    }
  }
  return 0;
}

}  // namespace llmk
