// The custom operator LatentAttention: multi-head latent attention (MLA) of DeepSeek-V2 (arXiv:2405.04434), for all
// tokens of a step. It uses the absorbed form: the up-projections of keys and values are applied to queries and
// results.
//
// Inputs. Tm and Sm are the numbers of tokens and sequences of the largest step, T and S those of this step. W is the
// width of the block table of this step. key_up and value_up have one packed weight for each head, all of equal size.
//
//   joined        [Tm, first + rank + rope]: queries (`first` elements, see below), latent vector, key to rotate
//   form          int32 [5] = {heads, query_rank, nope, value, interleaved}
//   numbers       float32 [2] = {epsilon of the norms, scale of the scores}
//   positions     [Tm]
//   cos, sin      [max_positions, rope], indexed by `positions`
//   cache         [num_blocks, block_size, rank + rope], written in place
//   slot_mapping  [Tm]
//   block_tables  flat; W entries for each sequence
//   context_lens, query_lens [Sm]
//   counts        [4] = {T, S, W, 0}
//   latent_gamma  [rank]
//   key_up        packed weights of `rank` columns and depth `nope`, one for each head
//   value_up      packed weights of `value` columns and depth `rank`, one for each head
//   query_gamma   [query_rank]; only if query_rank > 0
//   query         packed weight of heads * (nope + rope) columns; only if query_rank > 0
//   -> out        [Tm, heads * value], of which the first T rows are written
//
// A row of `joined` begins with `first` elements. If query_rank is 0, they are the queries of all heads: heads * (nope
// + rope) elements. Otherwise they are a latent vector of query_rank elements, from which the operator computes the
// queries. Each query head has `nope` elements that are not rotated, then `rope` elements that are rotated.
//
//   cache row   round(norm(latent) * latent_gamma), then the rotated key
//   query       round(key_up[h] * nope elements), then the rotated elements: as wide as a cache row
//   attended    attention of the queries of all heads over the cache rows, as one kv head (ops/rotary_attention.h)
//   out         value_up[h] * the elements 0 to rank - 1 of attended
//
// Prompts, chunks and decode steps all run this arithmetic. Each operation computes a row from that row alone, so the
// result of a token does not depend on the other tokens of the step. All cache rows are written before any cache row is
// read, because a sequence may read a row that another sequence writes.
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "ops/checks.h"

namespace llmk {
namespace {

enum Argument {
  kJoined, kForm, kNumbers, kPositions, kCos, kSin, kCache, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts,
  kLatentGamma, kKeyUp, kValueUp, kQueryGamma, kQuery
};

constexpr int64_t kPieceRows = 256;  // number of rows that a thread multiplies by a head's weight at a time

struct LatentJob {
  const Tensors& t;
  DType dtype;
  int64_t heads, query_rank, nope, rope, value, rank;
  bool interleaved;
  int64_t tokens;
  float epsilon;
  RotaryAttentionArgs attention;

  int64_t element() const { return size_of(dtype); }
  int64_t head_dim() const { return nope + rope; }
  int64_t cache_dim() const { return rank + rope; }
  int64_t first_width() const { return query_rank > 0 ? query_rank : heads * head_dim(); }
  int64_t joined_width() const { return first_width() + cache_dim(); }
  const char* head_weight(int argument, int64_t head) const {
    return t.as<char>(argument) + head * (t.size(argument) / heads);
  }
};

int out_of(const Tensors& t) { return t.count - 1; }

// The intermediate results of the operator, with one row for each token.
struct LatentMemory {
  char* normed;    // latent queries after their norm: [T, query_rank]; null if query_rank is 0
  char* queries;   // [T, heads * head_dim]; null if the queries are in `joined`
  char* absorbed;  // queries in the form of cache rows: [T, heads * cache_dim]
  char* attended;  // results of the attention: [T, heads * cache_dim]
};

LatentMemory latent_memory(const LatentJob& job) {
  const int64_t own = job.query_rank > 0 ? 1 : 0, wide = job.heads * job.cache_dim();
  const int64_t widths[] = {own * job.query_rank, own * job.heads * job.head_dim(), wide, wide};
  int64_t total = 0;
  for (const int64_t width : widths) total += ceil_div(job.tokens * width * job.element(), 64) * 64;
  char* next = static_cast<char*>(thread_scratch(kScratchLayer, total));
  char* parts[4];
  for (int i = 0; i < 4; ++i) {
    parts[i] = next;
    next += ceil_div(job.tokens * widths[i] * job.element(), 64) * 64;
  }
  return {parts[0], parts[1], parts[2], parts[3]};
}

int read_form(const Tensors& t, LatentJob* job) {
  if (!t.has_dtype(kForm, "int32") || t.size(kForm) != 5 || !t.has_dtype(kNumbers, "float32") ||
      t.size(kNumbers) != 2) {
    return refuse_text(t.op, "form must be int32 [5] and numbers float32 [2]");
  }
  const int32_t* form = t.as<int32_t>(kForm);
  job->heads = form[0];
  job->query_rank = form[1];
  job->nope = form[2];
  job->value = form[3];
  job->interleaved = form[4] != 0;
  job->epsilon = t.as<float>(kNumbers)[0];
  if (job->heads < 1 || job->query_rank < 0 || job->nope < 1 || job->value < 1) {
    return refuse_text(t.op, "form has %d heads, query_rank %d, nope %d and value %d; heads and sizes must be positive",
                       form[0], form[1], form[2], form[3]);
  }
  const int wanted = job->query_rank > 0 ? kQuery + 2 : kValueUp + 2;
  if (t.count != wanted) return refuse_text(t.op, "got %d arguments; with this form there are %d", t.count, wanted);
  return 0;
}

int check_dtypes(const Tensors& t, DType dtype) {
  for (const int i : {static_cast<int>(kCache), out_of(t)}) {
    if (t.dtype(i) != dtype) return refuse_text(t.op, "argument %d is %s; joined is %s", i, t.dtypes[i], t.dtypes[0]);
  }
  for (const int i : {kCos, kSin}) {
    if (!t.has_dtype(i, "float32")) return refuse_text(t.op, "argument %d is %s; it must be float32", i, t.dtypes[i]);
  }
  for (const int i : {kPositions, kSlots, kBlockTables, kContextLens, kQueryLens, kCounts}) {
    if (!t.has_dtype(i, "int32")) return refuse_text(t.op, "argument %d is %s; it must be int32", i, t.dtypes[i]);
  }
  return 0;
}

int read_shapes(const Tensors& t, LatentJob* job) {
  if (t.ndims[kCache] != 3 || t.ndims[kCos] != 2 || t.ndims[kJoined] != 2 || t.ndims[out_of(t)] != 2) {
    return refuse_text(t.op, "joined, cos and the output must have 2 dimensions, the cache 3");
  }
  job->rope = t.dim(kCos, 1);
  job->rank = t.dim(kCache, 2) - job->rope;
  if (job->rope < 2 || job->rope % 2 != 0 || job->rank < 1 || t.size(kCos) != t.size(kSin)) {
    return refuse_text(t.op, "rows of cos have %lld elements and rows of the cache %lld; the first must be even, the "
                       "second greater", static_cast<long long>(job->rope), static_cast<long long>(t.dim(kCache, 2)));
  }
  if (t.dim(kJoined, 1) != job->joined_width() || t.dim(out_of(t), 1) != job->heads * job->value) {
    return refuse_text(t.op, "joined has width %lld and the output %lld; with this form they must be %lld and %lld",
                       static_cast<long long>(t.dim(kJoined, 1)), static_cast<long long>(t.dim(out_of(t), 1)),
                       static_cast<long long>(job->joined_width()), static_cast<long long>(job->heads * job->value));
  }
  return 0;
}

int check_gamma_of(const Tensors& t, int i, int64_t width, DType dtype) {
  if (t.dtype(i) == dtype && t.size(i) == width) return 0;
  return refuse_text(t.op, "argument %d has %lld elements of %s; a norm's weight has %lld of the type of joined", i,
                     static_cast<long long>(t.size(i)), t.dtypes[i], static_cast<long long>(width));
}

int check_head_weights(const LatentJob& job, int argument, int64_t columns, int64_t depth) {
  const Tensors& t = job.t;
  if (!t.has_dtype(argument, "uint8") || t.size(argument) % (64 * job.heads) != 0) {
    return refuse_text(t.op, "argument %d has %lld bytes of %s; it must be uint8, a multiple of 64 for each of %lld "
                       "heads", argument, static_cast<long long>(t.size(argument)), t.dtypes[argument],
                       static_cast<long long>(job.heads));
  }
  for (int64_t head = 0; head < job.heads; ++head) {
    const int error = check_packed_weight(t.op, job.head_weight(argument, head), t.size(argument) / job.heads);
    if (error != 0) return error;
    const PackedWeightHeader& header = header_of(job.head_weight(argument, head));
    if (header.columns == columns && header.depth == depth && header.gated == 0) continue;
    return refuse_text(t.op, "argument %d: the weight of head %lld has %lld columns and depth %lld; it must be %lld "
                       "and %lld", argument, static_cast<long long>(head), static_cast<long long>(header.columns),
                       static_cast<long long>(header.depth), static_cast<long long>(columns),
                       static_cast<long long>(depth));
  }
  return 0;
}

int check_weights(const LatentJob& job) {
  const Tensors& t = job.t;
  int error = check_gamma_of(t, kLatentGamma, job.rank, job.dtype);
  if (error == 0) error = check_head_weights(job, kKeyUp, job.rank, job.nope);
  if (error == 0) error = check_head_weights(job, kValueUp, job.value, job.rank);
  if (error != 0 || job.query_rank == 0) return error;
  error = check_gamma_of(t, kQueryGamma, job.query_rank, job.dtype);
  return error != 0 ? error : check_weight(t, kQuery, job.heads * job.head_dim(), job.query_rank, false);
}

// Checks the inputs that describe the step: counts, lengths, positions, slots and block tables. Fills job->attention,
// which then points into `starts`.
int read_step(const Tensors& t, LatentJob* job, std::vector<int64_t>* starts) {
  RotaryAttentionArgs& args = job->attention;
  job->tokens = rows_of(t, kCounts, 0, smaller(t.dim(kJoined, 0), t.dim(out_of(t), 0)));
  const int64_t seqs = rows_of(t, kCounts, 1, smaller(t.size(kQueryLens), t.size(kContextLens)));
  if (job->tokens < 0 || seqs < 0) return kBadArgument;
  args.table_width = t.as<int32_t>(kCounts)[2];
  if (args.table_width < 0 || seqs * args.table_width > t.size(kBlockTables) ||
      smaller(t.size(kPositions), t.size(kSlots)) < job->tokens) {
    return refuse_text(t.op, "counts asks for %lld tokens and %lld block tables of width %lld; there are %lld "
                       "positions, %lld slots and %lld entries of tables", static_cast<long long>(job->tokens),
                       static_cast<long long>(seqs), static_cast<long long>(args.table_width),
                       static_cast<long long>(t.size(kPositions)), static_cast<long long>(t.size(kSlots)),
                       static_cast<long long>(t.size(kBlockTables)));
  }
  args.ready = true;
  args.dtype = job->dtype;
  args.tokens = job->tokens;
  args.num_seqs = seqs;
  args.key_cache = args.value_cache = t.data[kCache];
  args.num_blocks = t.dim(kCache, 0);
  args.block_size = t.dim(kCache, 1);
  args.heads = job->heads;
  args.kv_heads = 1;
  args.dim = job->cache_dim();
  args.block_tables = t.as<int32_t>(kBlockTables);
  args.context_lens = t.as<int32_t>(kContextLens);
  args.query_lens = t.as<int32_t>(kQueryLens);
  args.scale = t.as<float>(kNumbers)[1];
  starts->resize(static_cast<size_t>(2 * seqs) + 1);
  int error = check_positions(t.op, t.as<int32_t>(kPositions), job->tokens, t.dim(kCos, 0));
  if (error != 0) return error;
  return check_slots(t.op, t.as<int32_t>(kSlots), job->tokens, args.num_blocks * args.block_size);
}

void norm_into(const LatentJob& job, const char* x, const void* gamma, int64_t width, char* out) {
  const NormInput in{x, nullptr, nullptr, gamma, job.epsilon, width, job.dtype, job.dtype};
  norm_row(in, 0, out);
}

// Applies the rotary embedding to `count` heads of one token. Consecutive heads are `stride` elements apart in `x` and
// `out_stride` elements apart in `out`.
void rotate(const LatentJob& job, int64_t token, const char* x, int64_t stride, int64_t count, const int32_t* zeros,
            char* out, int64_t out_stride) {
  const int64_t row = job.t.as<int32_t>(kPositions)[token] * job.rope;
  RotaryArgs args{};
  args.x = x;
  args.out = out;
  args.cos = job.t.as<float>(kCos) + row;
  args.sin = job.t.as<float>(kSin) + row;
  args.positions = zeros;
  args.tokens = count;
  args.heads = 1;
  args.dim = job.rope;
  args.x_stride = stride;
  args.out_stride = out_stride;
  args.dtype = job.dtype;
  args.table_dtype = DType::kFloat32;
  args.interleaved = job.interleaved;
  kernels().rotary(args);
}

// Writes the cache row of a token to the KV cache. If the slot of the token is negative, writes nothing.
void write_cache(const LatentJob& job, int64_t token, const int32_t* zeros) {
  const int64_t slot = job.t.as<int32_t>(kSlots)[token], element = job.element();
  if (slot < 0) return;
  const char* latent = job.t.as<char>(kJoined) + (token * job.joined_width() + job.first_width()) * element;
  char* row = job.t.as<char>(kCache) + slot * job.cache_dim() * element;
  norm_into(job, latent, job.t.data[kLatentGamma], job.rank, row);
  rotate(job, token, latent + job.rank * element, job.rope, 1, zeros, row + job.rank * element, job.rope);
}

// The input and output rows of a matrix product. Strides are in elements.
struct Rows {
  const char* x;
  int64_t x_stride;
  char* out;
  int64_t out_stride;
};

LinearArgs linear_args(const LatentJob& job, const void* weight, const Rows& rows, int64_t first, int64_t count) {
  LinearArgs args{};
  args.weight = weight;
  args.dtype = job.dtype;
  args.rows = count;
  args.x = rows.x + first * rows.x_stride * job.element();
  args.x_stride = rows.x_stride;
  args.out = rows.out + first * rows.out_stride * job.element();
  args.out_stride = rows.out_stride;
  args.epilogue = Epilogue::kStore;
  return args;
}

// Multiplies the rows of each head by the weight of that head. `x_step` and `out_step` are the distances from one head
// to the next in the rows of x and of the output, in elements.
int multiply_heads(const LatentJob& job, int weight, const Rows& rows, int64_t x_step, int64_t out_step) {
  int error = check_linear(job.t.op, linear_args(job, job.head_weight(weight, 0), rows, 0, 1));
  for (int64_t head = 1; error == 0 && head < job.heads; ++head) {
    error = check_linear(job.t.op, linear_args(job, job.head_weight(weight, head), rows, 0, 1));
  }
  if (error != 0) return error;
  const int64_t pieces = ceil_div(job.tokens, kPieceRows);
  parallel_for(job.heads * pieces, [&](int64_t task) {
    const int64_t head = task / pieces, first = task % pieces * kPieceRows;
    const Rows own{rows.x + head * x_step * job.element(), rows.x_stride, rows.out + head * out_step * job.element(),
                   rows.out_stride};
    kernels().linear(
        linear_args(job, job.head_weight(weight, head), own, first, smaller(kPieceRows, job.tokens - first)));
  });
  return 0;
}

// Writes the cache rows. If the inputs have only the latent vectors of the queries (query_rank above 0), also computes
// the queries. Sets `queries` to the place of the queries. Writes the rotated elements of every query to
// `memory.absorbed`.
int place_rows(const LatentJob& job, const LatentMemory& memory, Rows* queries) {
  const int64_t element = job.element(), width = job.heads * job.head_dim(), wide = job.heads * job.cache_dim();
  char* joined = job.t.as<char>(kJoined);
  *queries = {joined, job.joined_width(), memory.absorbed, wide};
  const std::vector<int32_t> zeros(static_cast<size_t>(job.heads), 0);
  parallel_for(job.tokens, [&](int64_t token) {
    write_cache(job, token, zeros.data());
    if (job.query_rank == 0) return;
    norm_into(job, joined + token * job.joined_width() * element, job.t.data[kQueryGamma], job.query_rank,
              memory.normed + token * job.query_rank * element);
  });
  if (job.query_rank > 0) {
    const LinearArgs args = linear_args(job, job.t.data[kQuery], {memory.normed, job.query_rank, memory.queries, width},
                                        0, job.tokens);
    const int error = check_linear(job.t.op, args);
    if (error != 0) return error;
    kernels().linear(args);
    queries->x = memory.queries;
    queries->x_stride = width;
  }
  parallel_for(job.tokens, [&](int64_t token) {
    const char* from = queries->x + (token * queries->x_stride + job.nope) * element;
    char* to = memory.absorbed + (token * wide + job.rank) * element;
    rotate(job, token, from, job.head_dim(), job.heads, zeros.data(), to, job.cache_dim());
  });
  return 0;
}

int latent_attention(const Tensors& t) {
  if (t.count <= kValueUp + 1) return refuse_text(t.op, "got %d arguments; there are at least 16", t.count);
  LatentJob job{t, t.dtype(kJoined), 0, 0, 0, 0, 0, 0, false, 0, 0, {}};
  std::vector<int64_t> starts;
  int error = check_float_type(t, kJoined);
  if (error == 0) error = read_form(t, &job);
  if (error == 0) error = check_dtypes(t, job.dtype);
  if (error == 0) error = read_shapes(t, &job);
  if (error == 0) error = check_weights(job);
  if (error == 0) error = read_step(t, &job, &starts);
  if (error != 0 || job.tokens == 0) return error;
  const LatentMemory memory = latent_memory(job);
  job.attention.qkv = memory.absorbed;
  job.attention.out = memory.attended;
  error = check_ready_attention(t.op, &job.attention, 0, starts.data());
  if (error != 0) return error;
  Rows queries{};
  error = place_rows(job, memory, &queries);
  if (error == 0) error = multiply_heads(job, kKeyUp, queries, job.head_dim(), job.cache_dim());
  if (error != 0) return error;
  kernels().rotary_attention(job.attention);
  const int64_t wide = job.heads * job.cache_dim();
  const Rows values{memory.attended, wide, t.as<char>(out_of(t)), job.heads * job.value};
  return multiply_heads(job, kValueUp, values, job.cache_dim(), job.value);
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(LatentAttention, 1, latent_attention(t))
