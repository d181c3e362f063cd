// Defines Recording: the kernel launches of one run of a graph, and the buffers for their outputs in a replay.
// launches.h has an overview.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "scalar_inputs.h"
#include "launches.h"

namespace llmk {

// The sizes of a step: tokens, sequences, and the cache blocks that its graph gathers (0: none).
struct StepSizes {
  int64_t tokens, seqs, blocks;
};

// The rule for a length of an argument: a constant, or a factor times one of the step's sizes.
struct Length {
  int64_t fixed;
  StepSizes per;  // a factor for each of the step's sizes

  int64_t at(StepSizes sizes) const {
    return fixed + per.tokens * sizes.tokens + per.seqs * sizes.seqs + per.blocks * sizes.blocks;
  }
};

struct Launch {
  Primitive primitive;  // null: the launch is a custom operator
  CustomOp custom_op;
  bool is_shared;      // true for a primitive that is a collective, which all agents of the stage run together.
                       // false for all custom operators, even if they are collectives
  bool is_reshape;     // true for Reshape, whose result has the elements of its input in the same order
  bool writes_inputs;  // true if the launch may write to its inputs
  bool is_skipped;     // true for a Reshape whose result nothing reads, because its readers read its input
  const char* op;
  std::vector<void*> data;       // addresses of the arguments in the recorded run of MindSpore
  // For each argument, its index in Recording::values. -1 means that the caller owns the memory, which has the same
  // address in each replay.
  std::vector<int> values;
  std::vector<int64_t> offsets;  // for each argument: its byte offset in its Value
  std::vector<void*> placed;     // addresses of the arguments at a replay
  std::vector<int> ndims;
  std::vector<int64_t> sizes;
  std::vector<Length> lengths;  // the rule for each entry of `sizes`; empty: the sizes never change
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  std::unique_ptr<ScalarInputs> scalars;
  std::vector<std::unique_ptr<char[]>> constants;
  int inputs;

  Tensors tensors() { return tensors_in(&data); }
  Call call() { return {tensors_in(&placed), scalars.get()}; }  // Returns the call of the primitive at a replay.
  int64_t bytes_of(int argument);
  int run();

 private:
  Tensors tensors_in(std::vector<void*>* where) {
    return {op, static_cast<int>(where->size()), where->data(), ndims.data(), shapes.data(), dtypes.data()};
  }
};

// An output of a launch. In the recorded run, the output exists until a later launch writes to the same memory of
// MindSpore.
struct Value {
  const char* start;  // the output's memory in the recorded run by MindSpore; a replay uses its own buffers
  const char* end;
  int launch;
  int argument;
  int first;   // number of the first launch that needs the buffer
  int last;    // number of the last launch that reads the value
  int buffer;  // index of the buffer, which other values use at other times; -1: the launch is skipped
  // The memory of the caller of which the value is a Reshape. Null for all other values. Becomes null at a launch that
  // may write to this memory or to the value.
  char* source;
};

constexpr int kMostFused = 4;

struct Fusion;
using FusedFunction = int (*)(Launch* const* parts, const Fusion& fusion);

// Several launches that one function replaces (fusion.h). The function runs where the last of these launches ran.
// `keeps` marks the intermediate results that a later launch reads.
struct Fusion {
  const char* name;  // the operators, joined by '+'; find_fusions() sets it last
  int count;
  int parts[kMostFused];  // the numbers of the launches, ascending
  FusedFunction run;
  bool keeps[2];

  int first() const { return parts[0]; }
  int last() const { return parts[count - 1]; }
};

// A result of the graph: `value` is an index in Recording::values, `offset` a byte offset in this value.
struct Result {
  int value;
  int64_t offset;
};

struct Recording {
  std::vector<Launch> launches;
  std::vector<Fusion> fusions;
  std::vector<int> fused;  // for each launch: the fusion that computes it, or -1; empty: there are no fusions
  std::string problem;
  std::vector<Value> values;
  std::vector<int64_t> buffers;  // byte offset of each buffer in `memory`, then the end of the last buffer
  std::vector<Result> results;   // results of the graph, in the graph's order
  int64_t held = 0;        // approximate bytes of the recording itself
  char* memory = nullptr;  // the library's memory to which the addresses in `placed` point

  int64_t bytes() const { return buffers.empty() ? 0 : buffers.back(); }
};

// Completes a recording: finds the memory of every argument and assigns buffers to the outputs. `results` are the
// addresses of the graph's results. `staying` lists the caller's memory, whose addresses never change. If the memory of
// an argument is unknown, sets the recording's problem and returns false.
bool complete(Recording* recording, const std::vector<const void*>& results, const std::vector<Range>& staying);

// Generalizes a recording of one step to steps of any size up to `largest`. `other` is a recording of the same graph
// for another step.
//
// A length that is equal in both steps is constant. Any other length must be a multiple of the tokens, of the sequences
// or of the gathered blocks. To distinguish these cases, tokens, sequences and blocks must grow by three different
// factors from one step to the other. If a length follows no rule, or if the launches differ in another way, sets the
// recording's problem and returns false. With `fuses`, launches are fused (fusion.h).
bool generalise(Recording* recording, const Recording& other, StepSizes of_this, StepSizes of_other, StepSizes largest,
                bool fuses);

// Sets the size of the next step for a generalized recording.
void resize(Recording* recording, StepSizes sizes);

void find_places(Recording* recording, char* memory);
int64_t held_by(const Recording& recording);

}  // namespace llmk
