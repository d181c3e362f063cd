// The custom operators of hybrid models: GatedDeltaNet (ops/gated_delta.h) and SigmoidGate.
//
// GatedDeltaNet. Tm and Sm are the numbers of tokens and sequences of the largest step, T the tokens of this step.
//
//   projected  [Tm, width]: queries, keys, values, output gates, then b and a of each value head
//   form       int32 [6] = {key heads, value heads, key size, value size, taps of the convolution, capacity of a log}
//   epsilon    float32 [1]
//   conv       float32 [channels, 1, taps]     log_rate, rate_bias  float32 [value heads]
//   gamma      float32 [value size]
//   states     float32 [states, size of a state], written in place
//   runs       int32 [Sm + 1, 10]: row 0 is the number of runs and nine zeros. Each further row is a run: consecutive
//              tokens of one sequence, and the states that the run reads and writes (struct DeltaRun)
//   counts     [4] = {T, ...}
//   -> out     [Tm, value heads * value size], of which the rows of the runs are written
//
// SigmoidGate: x, gate [Tm, width]   counts [4] = {T, ...}   ->   out [Tm, width] = x * sigmoid(gate)
#include <cstdint>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "custom_ops.h"
#include "ops/gated_delta.h"

namespace llmk {
namespace {

constexpr int64_t kLaneMultiple = 16, kMostTaps = 16, kMostLogged = 64;
constexpr int64_t kRunWidth = sizeof(DeltaRun) / sizeof(int32_t);

enum Argument {
  kProjected, kForm, kEpsilon, kConv, kLogRate, kRateBias, kGamma, kStates, kRuns, kCounts, kOut, kNumArguments
};

int read_form(const Tensors& t, GatedDeltaArgs* args) {
  if (!t.has_dtype(kForm, "int32") || t.size(kForm) != 6) return refuse_text(t.op, "form must be int32 [6]");
  const int32_t* form = t.as<int32_t>(kForm);
  args->key_heads = form[0];
  args->value_heads = form[1];
  args->key_dim = form[2];
  args->value_dim = form[3];
  args->taps = form[4];
  args->logged = form[5];
  if (form[0] < 1 || form[1] < 1 || form[1] % form[0] != 0 || form[2] < 1 || form[2] % kLaneMultiple != 0 ||
      form[3] < 1 || form[3] % kLaneMultiple != 0 || form[4] < 1 || form[4] > kMostTaps || form[5] < 0 ||
      form[5] > kMostLogged) {
    return refuse_text(t.op, "form has %d key heads of size %d, %d value heads of size %d, %d taps, %d logged tokens;"
                       " the number of key heads must divide that of value heads, sizes must be multiples of 16, taps "
                       "from 1 to 16, logged tokens from 0 to 64",
                       form[0], form[2], form[1], form[3], form[4], form[5]);
  }
  return 0;
}

int check_floats(const Tensors& t, int i, int64_t size) {
  if (t.has_dtype(i, "float32") && t.size(i) == size) return 0;
  return refuse_text(t.op, "argument %d has %lld elements of %s; it must have %lld of float32", i,
                     static_cast<long long>(t.size(i)), t.dtypes[i], static_cast<long long>(size));
}

int check_parameters(const Tensors& t, const GatedDeltaArgs& args) {
  int error = check_floats(t, kEpsilon, 1);
  if (error == 0) error = check_floats(t, kConv, args.channels() * args.taps);
  for (const int i : {kLogRate, kRateBias}) {
    if (error == 0) error = check_floats(t, i, args.value_heads);
  }
  return error == 0 ? check_floats(t, kGamma, args.value_dim) : error;
}

// Checks DeltaRun::saves, the states that a run saves in addition. Their numbers of tokens must ascend. The state that
// the run reads and the state that it writes must not be among them.
int check_saves(const Tensors& t, const DeltaRun& run, int64_t index, int64_t num_states) {
  int32_t last = 0;
  for (int i = 0; i < kDeltaSaves; ++i) {
    const auto& save = run.saves[i];
    if (save.after == 0) {
      last = run.tokens;  // so the check below refuses later elements that are used
      continue;
    }
    if (save.after <= last || save.after > run.tokens || save.to < 0 || save.to >= num_states || save.to == run.read ||
        save.to == run.write) {
      return refuse_text(t.op, "run %lld saves the state after %d of %d tokens in state %d of %lld; it must be another "
                         "state than those that it reads and writes, and later entries need more tokens",
                         static_cast<long long>(index), save.after, run.tokens, save.to,
                         static_cast<long long>(num_states));
    }
    last = save.after;
  }
  return 0;
}

// Checks how many drafts a run replays, from the log of the state that it reads, and how many drafts it logs
// (ops/gated_delta.h). Both numbers must be at most `logged`, the capacity of a log. A run that reads no state cannot
// replay drafts.
int check_log(const Tensors& t, const DeltaRun& run, int64_t index, int64_t logged) {
  const int64_t most = run.read < 0 ? 0 : logged;
  if (run.replayed >= 0 && run.replayed <= most && run.settled >= 1 && run.settled <= run.tokens &&
      run.tokens - run.settled <= logged) {
    return 0;
  }
  return refuse_text(t.op, "run %lld replays %d tokens and settles %d of its %d tokens; it may replay %lld, log %lld",
                     static_cast<long long>(index), run.replayed, run.settled, run.tokens,
                     static_cast<long long>(most), static_cast<long long>(logged));
}

// Checks that the runs follow each other, cover the step's tokens, and name states that exist. Does not check that all
// runs write different states: agent/sequence_states.py ensures this.
int check_runs(const Tensors& t, const GatedDeltaArgs& args, int64_t tokens, int64_t num_states) {
  int64_t next = 0;
  for (int64_t i = 0; i < args.num_runs; ++i) {
    const DeltaRun& run = args.runs[i];
    if (run.first_token != next || run.tokens < 1 || run.tokens > tokens - next) {
      return refuse_text(t.op, "run %lld has %d tokens from token %d on; it must begin at token %lld of %lld",
                         static_cast<long long>(i), run.tokens, run.first_token, static_cast<long long>(next),
                         static_cast<long long>(tokens));
    }
    if (run.read < -1 || run.read >= num_states || run.write < 0 || run.write >= num_states || run.read == run.write) {
      return refuse_text(t.op, "run %lld reads state %d and writes state %d of %lld; it must write another one",
                         static_cast<long long>(i), run.read, run.write, static_cast<long long>(num_states));
    }
    int error = check_saves(t, run, i, num_states);
    if (error == 0) error = check_log(t, run, i, args.logged);
    if (error != 0) return error;
    next += run.tokens;
  }
  if (next == tokens) return 0;
  return refuse_text(t.op, "the runs have %lld tokens; the step has %lld", static_cast<long long>(next),
                     static_cast<long long>(tokens));
}

int read_runs(const Tensors& t, GatedDeltaArgs* args, int64_t tokens) {
  if (!t.has_dtype(kRuns, "int32") || t.ndims[kRuns] != 2 || t.dim(kRuns, 0) < 1 || t.dim(kRuns, 1) != kRunWidth) {
    return refuse_text(t.op, "runs must be int32 [sequences + 1, %lld]", static_cast<long long>(kRunWidth));
  }
  const int32_t* runs = t.as<int32_t>(kRuns);
  args->num_runs = tokens == 0 ? 0 : runs[0];
  if (args->num_runs < 0 || args->num_runs >= t.dim(kRuns, 0)) {
    return refuse_index(t.op, "runs", 0, runs[0], t.dim(kRuns, 0));
  }
  args->runs = reinterpret_cast<const DeltaRun*>(runs + kRunWidth);
  if (t.ndims[kStates] != 2 || !t.has_dtype(kStates, "float32") || t.dim(kStates, 1) != args->state_floats()) {
    return refuse_text(t.op, "states must be float32 [states, %lld]", static_cast<long long>(args->state_floats()));
  }
  return check_runs(t, *args, tokens, t.dim(kStates, 0));
}

int gated_delta_net(const Tensors& t) {
  if (t.count != kNumArguments) {
    return refuse_text(t.op, "got %d arguments; it takes %d and gives 1", t.count, kNumArguments - 1);
  }
  int error = check_float_type(t, kProjected);
  if (error != 0) return error;
  GatedDeltaArgs args{};
  args.dtype = t.dtype(kProjected);
  const int64_t tokens = rows_of(t, kCounts, 0, t.dim(kProjected, 0));
  if (tokens < 0) return kBadArgument;
  error = read_form(t, &args);
  if (error == 0) error = check_matrix(t, kProjected, tokens, args.width(), args.dtype);
  if (error == 0) error = check_matrix(t, kOut, tokens, args.values(), args.dtype);
  if (error == 0) error = check_parameters(t, args);
  if (error == 0) error = read_runs(t, &args, tokens);
  if (error != 0) return error;
  args.projected = t.data[kProjected];
  args.out = t.data[kOut];
  args.epsilon = *t.as<float>(kEpsilon);
  args.conv = t.as<float>(kConv);
  args.log_rate = t.as<float>(kLogRate);
  args.rate_bias = t.as<float>(kRateBias);
  args.gamma = t.as<float>(kGamma);
  args.states = t.as<float>(kStates);
  kernels().gated_delta(args);
  return 0;
}

int sigmoid_gate(const Tensors& t) {
  if (t.count != 4) return refuse_text(t.op, "got %d arguments; it takes 3 and gives 1", t.count);
  int error = check_float_type(t, 0);
  if (error != 0) return error;
  const int64_t width = t.dim(0, -1), rows = rows_of(t, 2, 0, t.dim(0, 0));
  if (rows < 0) return kBadArgument;
  for (const int i : {0, 1, 3}) {
    if (error == 0) error = check_matrix(t, i, rows, width, t.dtype(0));
  }
  if (error == 0) kernels().sigmoid_gate({t.data[0], t.data[1], t.data[3], rows, width, t.dtype(0)});
  return error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(GatedDeltaNet, 1, gated_delta_net(t))
LLMK_CUSTOM_OP(SigmoidGate, 1, sigmoid_gate(t))
