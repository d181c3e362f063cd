// Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention. Instead of all keys and values of a sequence,
// it keeps one matrix of fixed size for each value head.
//
// For each token, `projected` has the channels of queries, keys and values, then the output gate z. Then come the
// numbers b, one for each value head, and the numbers a, one for each value head. The number b determines the strength,
// and the number a determines the decay. A key head serves `value_heads / key_heads` consecutive value heads. For each
// token t and value head:
//
//   x         silu(sum over j of conv[channel][j] * input[t - taps + 1 + j]). Its channels are those of q, k and v.
//   q, k      q / |q| / sqrt(key_dim) and k / |k|. |x| is sqrt(sum of squares + 1e-6).
//   decay     exp(-exp(log_rate) * softplus(a + rate_bias))
//   strength  sigmoid(b)
//   delta     (v - decay * S^T k) * strength
//   S         decay * S + k delta^T
//   out       norm(S^T q) * gamma * silu(z)
//
// S is the matrix [key_dim, value_dim]. Everything is float32 until the output is rounded once. Each sum over key_dim
// is computed in one lane per value column, and adds its terms in ascending order. So a token gets the same bits in a
// prompt, a chunk or a decode step.
//
// The state of a sequence is the matrices of all value heads, then the inputs of the last `taps` - 1 tokens:
// [value_heads][key_dim][value_dim], [taps - 1][channels]. A run of tokens reads one state and writes another. The same
// step can therefore run twice. A run can also save the states after some of its tokens. The prefix cache needs them at
// the ends of blocks, in the middle of a prompt. The sizes `key_dim` and `value_dim` are multiples of 16.
//
// The last tokens of a run may be drafts, which the server may reject. The state that the run writes then ends before
// the drafts. For each draft, the run stores the inputs of the recurrence in a log. The log follows the state in
// memory: inputs [logged][channels], then decay and strength [logged][value_heads][2]. The next run of the sequence
// first replays the logged tokens that were accepted. A replay repeats the same operations, so it gives the same bits.
// The log takes some KB for each draft. A further state for each draft would take as much memory as the matrices.
#pragma once
#include <cmath>
#include <cstring>

#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

constexpr int kDeltaSaves = 2;  // maximum number of states that a run saves in addition to the one that it writes

// A run: consecutive tokens of one sequence, and the states that it reads and writes.
struct DeltaRun {
  int32_t first_token, tokens;
  int32_t read, write;  // indices of two states; `read` is -1 if the run has the first token of its sequence
  // Saved states: the state number `to` receives the state after the run's first `after` tokens. Used elements of the
  // array come first, in ascending order of `after`. In an unused element, `after` is 0.
  struct {
    int32_t after, to;
  } saves[kDeltaSaves];
  int32_t replayed;  // number of accepted drafts in the log of the state `read`; the run first replays them
  int32_t settled;   // number of tokens that the state `write` includes; the later tokens are drafts and are logged
};

struct GatedDeltaArgs {
  const void* projected;   // [tokens, width]
  void* out;               // [tokens, value_heads * value_dim]
  const float* conv;       // [channels, taps]
  const float* log_rate;   // [value_heads]
  const float* rate_bias;  // [value_heads]
  const float* gamma;      // [value_dim]
  float* states;           // [states, state_floats()]
  const DeltaRun* runs;
  int64_t num_runs, key_heads, value_heads, key_dim, value_dim, taps;
  int64_t logged;  // maximum number of tokens in the log of a state
  float epsilon;
  DType dtype;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t width() const { return channels() + values() + 2 * value_heads; }
  int64_t matrix() const { return key_dim * value_dim; }
  int64_t state_floats() const {
    return value_heads * matrix() + (taps - 1 + logged) * channels() + 2 * logged * value_heads;
  }
  float* matrix_of(int64_t state, int64_t head) const { return states + state * state_floats() + head * matrix(); }
  // The inputs of the last taps - 1 tokens, then those of the logged tokens: [taps - 1 + logged, channels].
  float* inputs_of(int64_t state) const { return matrix_of(state, value_heads); }
  // Decay and strength of the logged tokens: [logged, value_heads, 2].
  float* gates_of(int64_t state) const { return inputs_of(state) + (taps - 1 + logged) * channels(); }
};

// Multiplies each element of `x` by the sigmoid of the same element of `gate`, in float32, and rounds once.
struct SigmoidGateArgs {
  const void* x;
  const void* gate;
  void* out;
  int64_t rows, width;
  DType dtype;
};

#ifdef LLMK_ARCH
namespace LLMK_ARCH {

constexpr int64_t kDeltaPiece = 16;  // tokens that a task takes from `projected` at a time
constexpr int64_t kDeltaColumns = 4;  // vectors of value columns that the recurrence keeps in registers

// The buffers of a task. A task computes one value head of one run, at most kDeltaPiece tokens at a time (a piece). A
// row of `inputs` and `mixed` has the head's channels: query, key, value. The first rows of `inputs` are the taps - 1
// tokens before the piece.
struct DeltaPiece {
  float* inputs;   // [taps - 1 + kDeltaPiece, head channels]
  float* mixed;    // [kDeltaPiece, head channels]
  float* weights;  // [taps, head channels]
  float* results;  // [kDeltaPiece, value_dim]
  float* matrix;   // [key_dim, value_dim]: the head's matrix after the latest draft; only if states have a log
  float decay[kDeltaPiece], strength[kDeltaPiece];
};

// The channels that one value head uses, as three ranges: query, key, value.
struct HeadChannels {
  int64_t first[3], count[3];
  int64_t total() const { return count[0] + count[1] + count[2]; }
};

static inline HeadChannels head_channels(const GatedDeltaArgs& args, int64_t head) {
  const int64_t key = head / (args.value_heads / args.key_heads) * args.key_dim;
  return {{key, args.keys() + key, 2 * args.keys() + head * args.value_dim},
          {args.key_dim, args.key_dim, args.value_dim}};
}

static inline DeltaPiece delta_piece(const GatedDeltaArgs& args, int64_t channels) {
  const int64_t before = args.taps - 1;
  const int64_t matrix = args.logged > 0 ? args.matrix() : 0;
  const int64_t floats = (before + 2 * kDeltaPiece + args.taps) * channels + kDeltaPiece * args.value_dim + matrix;
  float* next = static_cast<float*>(thread_scratch(kScratchDelta, floats * 4));
  DeltaPiece piece{};
  piece.inputs = next;
  piece.mixed = piece.inputs + (before + kDeltaPiece) * channels;
  piece.weights = piece.mixed + kDeltaPiece * channels;
  piece.results = piece.weights + args.taps * channels;
  piece.matrix = piece.results + kDeltaPiece * args.value_dim;
  return piece;
}

// Fills piece.weights with the convolution weights of the head's channels, one row for each tap. Fills the first rows
// of piece.inputs with the taps - 1 tokens before the run, or with zeros if the run begins the sequence.
static inline void begin_run(const GatedDeltaArgs& args, const DeltaRun& run, const HeadChannels& own,
                             const DeltaPiece& piece) {
  const int64_t channels = own.total(), before = args.taps - 1;
  const float* old = run.read < 0 ? nullptr : args.inputs_of(run.read);
  int64_t at = 0;
  for (int part = 0; part < 3; at += own.count[part++]) {
    for (int64_t tap = 0; tap < args.taps; ++tap) {
      const float* conv = args.conv + own.first[part] * args.taps + tap;
      for (int64_t i = 0; i < own.count[part]; ++i) piece.weights[tap * channels + at + i] = conv[i * args.taps];
    }
    for (int64_t row = 0; row < before; ++row) {
      float* to = piece.inputs + row * channels + at;
      const size_t bytes = static_cast<size_t>(own.count[part]) * 4;
      if (old == nullptr) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, old + row * args.channels() + own.first[part], bytes);
      }
    }
  }
}

// Copies the inputs of the head's channels for `count` tokens from `projected` to piece.inputs, as floats.
template <class T>
static inline void read_inputs(const GatedDeltaArgs& args, const HeadChannels& own, const DeltaPiece& piece,
                               int64_t token, int64_t count) {
  const int64_t channels = own.total();
  for (int64_t row = 0; row < count; ++row) {
    const T* from = static_cast<const T*>(args.projected) + (token + row) * args.width();
    float* to = piece.inputs + (args.taps - 1 + row) * channels;
    for (int part = 0; part < 3; to += own.count[part++]) {
      for (int64_t i = 0; i < own.count[part]; i += kLanes) store(to + i, load(from + own.first[part] + i));
    }
  }
}

// Divides the vector of `width` elements at `x` by its Euclidean length and multiplies it by `scale`, in place.
static inline void to_length(float* x, int64_t width, float scale) {
  Vec squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const Vec factor = broadcast(scale / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < width; i += kLanes) store(x + i, mul(load(x + i), factor));
}

// Fills piece.mixed: applies the convolution and SiLU to all channels, then normalises the lengths of queries and keys.
static inline void mix_inputs(const GatedDeltaArgs& args, const HeadChannels& own, const DeltaPiece& piece,
                              int64_t count) {
  const int64_t channels = own.total();
  for (int64_t row = 0; row < count; ++row) {
    float* mixed = piece.mixed + row * channels;
    for (int64_t i = 0; i < channels; i += kLanes) {
      const float* input = piece.inputs + row * channels + i;
      Vec total = mul(load(piece.weights + i), load(input));
      for (int64_t tap = 1; tap < args.taps; ++tap) {
        total = fma(load(piece.weights + tap * channels + i), load(input + tap * channels), total);
      }
      store(mixed + i, mul(total, sigmoid(total)));
    }
    to_length(mixed, args.key_dim, 1.0f / std::sqrt(static_cast<float>(args.key_dim)));
    to_length(mixed + args.key_dim, args.key_dim, 1.0f);
  }
}

// Computes decay and strength of `count` tokens, with the formulas at the start of this file.
template <class T>
static inline void read_gates(const GatedDeltaArgs& args, int64_t head, int64_t token, int64_t count,
                              DeltaPiece* piece) {
  const int64_t strength_at = args.channels() + args.values() + head, rate_at = strength_at + args.value_heads;
  for (int64_t row = 0; row < count; ++row) {
    const T* from = static_cast<const T*>(args.projected) + (token + row) * args.width();
    const float a = to_float(from[rate_at]) + args.rate_bias[head];
    const float softplus = a > 20.0f ? a : std::log1p(std::exp(a));
    piece->decay[row] = std::exp(-std::exp(args.log_rate[head]) * softplus);
    piece->strength[row] = 1.0f / (1.0f + std::exp(-to_float(from[strength_at])));
  }
}

// Runs the recurrence over `count` tokens for N * kLanes value columns, from number `column` on. The first token reads
// the state `from`. Each token writes the state `to`, which the next token reads. Both are matrices, whose rows are
// value_dim floats apart.
template <int64_t N>
static inline void recur_columns(const GatedDeltaArgs& args, const DeltaPiece& piece, int64_t count, int64_t column,
                                 const float* from, float* to) {
  const int64_t keys = args.key_dim, stride = args.value_dim, channels = 2 * keys + stride;
  for (int64_t row = 0; row < count; ++row) {
    const float* query = piece.mixed + row * channels;
    const float* key = query + keys;
    const float* value = key + keys + column;
    const Vec decay = broadcast(piece.decay[row]), strength = broadcast(piece.strength[row]);
    Vec known[N], delta[N], result[N];
    for (int64_t n = 0; n < N; ++n) known[n] = result[n] = zero();
    for (int64_t i = 0; i < keys; ++i) {
      const Vec each = broadcast(key[i]);
      for (int64_t n = 0; n < N; ++n) known[n] = fma(each, load(from + i * stride + n * kLanes), known[n]);
    }
    for (int64_t n = 0; n < N; ++n) {
      delta[n] = mul(sub(load(value + n * kLanes), mul(decay, known[n])), strength);
    }
    for (int64_t i = 0; i < keys; ++i) {
      const Vec each = broadcast(key[i]), asked = broadcast(query[i]);
      for (int64_t n = 0; n < N; ++n) {
        const Vec state = fma(each, delta[n], mul(decay, load(from + i * stride + n * kLanes)));
        store(to + i * stride + n * kLanes, state);
        result[n] = fma(asked, state, result[n]);
      }
    }
    for (int64_t n = 0; n < N; ++n) store(piece.results + row * stride + column + n * kLanes, result[n]);
    from = to;
  }
}

static inline void recur(const GatedDeltaArgs& args, const DeltaPiece& piece, int64_t count, const float* from,
                         float* to) {
  int64_t column = 0;
  for (; column + kDeltaColumns * kLanes <= args.value_dim; column += kDeltaColumns * kLanes) {
    recur_columns<kDeltaColumns>(args, piece, count, column, from + column, to + column);
  }
  for (; column < args.value_dim; column += kLanes) {
    recur_columns<1>(args, piece, count, column, from + column, to + column);
  }
}

// Writes the output of `count` tokens: normalises the results, and multiplies them by gamma and by the output gate.
template <class T>
static inline void write_results(const GatedDeltaArgs& args, const DeltaPiece& piece, int64_t head, int64_t token,
                                 int64_t count) {
  const int64_t width = args.value_dim;
  for (int64_t row = 0; row < count; ++row) {
    const float* x = piece.results + row * width;
    const T* gate = static_cast<const T*>(args.projected) + (token + row) * args.width() + args.channels() +
                    head * width;
    T* out = static_cast<T*>(args.out) + (token + row) * args.values() + head * width;
    Vec squares = zero();
    for (int64_t i = 0; i < width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + args.epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec z = load(gate + i), normed = mul(mul(load(x + i), scale), load(args.gamma + i));
      store(out + i, mul(normed, mul(z, sigmoid(z))));
    }
  }
}

// Stores `count` rows of `from` as the inputs of state number `state`, from input row `row` on. If several value heads
// share a key head, only the first of them stores the channels of query and key.
static inline void store_inputs(const GatedDeltaArgs& args, int64_t state, const HeadChannels& own, int64_t head,
                                int64_t row, const float* from, int64_t count) {
  const bool is_first = head % (args.value_heads / args.key_heads) == 0;
  int64_t at = is_first ? 0 : own.count[0] + own.count[1];
  for (int part = is_first ? 0 : 2; part < 3; at += own.count[part++]) {
    float* to = args.inputs_of(state) + row * args.channels() + own.first[part];
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * args.channels(), from + i * own.total() + at, static_cast<size_t>(own.count[part]) * 4);
    }
  }
}

// Appends the piece's tokens, which are drafts, to the log of the state `state`: their inputs, decays and strengths.
// The log already has `logged` tokens.
static inline void log_tokens(const GatedDeltaArgs& args, int64_t state, const HeadChannels& own, int64_t head,
                              int64_t logged, const DeltaPiece& piece, int64_t count) {
  const int64_t before = args.taps - 1;
  store_inputs(args, state, own, head, before + logged, piece.inputs + before * own.total(), count);
  for (int64_t row = 0; row < count; ++row) {
    float* gates = args.gates_of(state) + ((logged + row) * args.value_heads + head) * 2;
    gates[0] = piece.decay[row];
    gates[1] = piece.strength[row];
  }
}

// Copies the inputs, decays and strengths of `count` tokens from the log of state number `state` to `piece`. `first` is
// the index of the first of these tokens in the log.
static inline void read_log(const GatedDeltaArgs& args, int64_t state, const HeadChannels& own, int64_t head,
                            int64_t first, int64_t count, DeltaPiece* piece) {
  const int64_t before = args.taps - 1;
  for (int64_t row = 0; row < count; ++row) {
    const float* from = args.inputs_of(state) + (before + first + row) * args.channels();
    float* to = piece->inputs + (before + row) * own.total();
    for (int part = 0; part < 3; to += own.count[part++]) {
      std::memcpy(to, from + own.first[part], static_cast<size_t>(own.count[part]) * 4);
    }
    const float* gates = args.gates_of(state) + ((first + row) * args.value_heads + head) * 2;
    piece->decay[row] = gates[0];
    piece->strength[row] = gates[1];
  }
}

// Computes the piece's results from its inputs and gates. Reads the matrix `from` and writes the matrix `to`.
static inline void compute_piece(const GatedDeltaArgs& args, const HeadChannels& own, const DeltaPiece& piece,
                                 int64_t count, const float* from, float* to) {
  mix_inputs(args, own, piece, count);
  recur(args, piece, count, from, to);
  const size_t before = static_cast<size_t>((args.taps - 1) * own.total());
  std::memmove(piece.inputs, piece.inputs + count * own.total(), before * 4);
}

// Returns the number of tokens of the next piece. A piece ends where the run saves a state, and before the drafts.
static inline int64_t piece_tokens(const DeltaRun& run, int64_t done) {
  int64_t end = smaller(done + kDeltaPiece, run.tokens);
  if (done < run.settled) end = smaller(end, run.settled);
  for (const auto& save : run.saves) {
    if (save.after > done) end = smaller(end, save.after);
  }
  return end - done;
}

// Stores the states that the run must store after its first `done` tokens. A state consists of the head's `matrix` and
// the last taps - 1 inputs, which are the first rows of piece.inputs. If the run saves a state after these tokens,
// copies both parts. If the state run.write is the state after these tokens, copies only the inputs, because its matrix
// is already in place.
static inline void end_states(const GatedDeltaArgs& args, const DeltaRun& run, const HeadChannels& own, int64_t head,
                              const DeltaPiece& piece, int64_t done, const float* matrix) {
  for (const auto& save : run.saves) {
    if (save.after != done) continue;
    std::memcpy(args.matrix_of(save.to, head), matrix, static_cast<size_t>(args.matrix()) * 4);
    store_inputs(args, save.to, own, head, 0, piece.inputs, args.taps - 1);
  }
  if (done == run.settled) store_inputs(args, run.write, own, head, 0, piece.inputs, args.taps - 1);
}

// Computes one value head of a run. First replays the accepted drafts of the log, then computes the run's own tokens.
template <class T>
static inline void delta_head(const GatedDeltaArgs& args, const DeltaRun& run, int64_t head) {
  const HeadChannels own = head_channels(args, head);
  DeltaPiece piece = delta_piece(args, own.total());
  float* to = args.matrix_of(run.write, head);
  const float* from = to;
  if (run.read < 0) {
    std::memset(to, 0, static_cast<size_t>(args.matrix()) * 4);
  } else {
    from = args.matrix_of(run.read, head);
  }
  begin_run(args, run, own, piece);
  for (int64_t done = 0; done < run.replayed; done += kDeltaPiece) {
    const int64_t count = smaller(kDeltaPiece, run.replayed - done);
    read_log(args, run.read, own, head, done, count, &piece);
    compute_piece(args, own, piece, count, from, to);
    from = to;
  }
  for (int64_t done = 0; done < run.tokens;) {
    const int64_t token = run.first_token + done, count = piece_tokens(run, done);
    read_inputs<T>(args, own, piece, token, count);
    read_gates<T>(args, head, token, count, &piece);
    if (done == run.settled) to = piece.matrix;
    if (done >= run.settled) log_tokens(args, run.write, own, head, done - run.settled, piece, count);
    compute_piece(args, own, piece, count, from, to);
    write_results<T>(args, piece, head, token, count);
    from = to;
    done += count;
    end_states(args, run, own, head, piece, done, to);
  }
}

static void gated_delta(const GatedDeltaArgs& args) {
  with_element_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(args.num_runs * args.value_heads, [&](int64_t task) {
      delta_head<T>(args, args.runs[task / args.value_heads], task % args.value_heads);
    });
  });
}

static void sigmoid_gate(const SigmoidGateArgs& args) {
  with_element_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(args.rows, [&](int64_t row) {
      const T* x = static_cast<const T*>(args.x) + row * args.width;
      const T* gate = static_cast<const T*>(args.gate) + row * args.width;
      T* out = static_cast<T*>(args.out) + row * args.width;
      for (int64_t i = 0; i < args.width; i += kLanes) {
        const int64_t left = args.width - i;
        store_part(out + i, mul(load_part(x + i, left), sigmoid(load_part(gate + i, left))), left);
      }
    });
  });
}

}  // namespace LLMK_ARCH
#endif

}  // namespace llmk
