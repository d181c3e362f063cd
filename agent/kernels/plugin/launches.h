// Records the launches of primitives and custom operators while MindSpore runs a graph, and replays them without
// MindSpore.
//
// A graph launches the same operators in the same order every time. Only the contents and the lengths of its inputs
// change. So the library records one run, and a loop repeats the recorded launches, as an Ascend replays captured
// graphs. This saves the work of MindSpore for each operator and parameter. From two recorded runs of different sizes,
// the library infers how each length depends on the size of the step. So two runs give one recording for steps of any
// size.
//
// A recorded launch may read four kinds of memory:
//  - memory whose address never changes, which the caller names: inputs of the graph, weights, caches
//  - the output of a recorded launch
//  - a single number that is a constant of the graph; the recording has a copy
//  - a list that MindSpore read from an input that the caller named; a replay reads the list from this input
//
// The library has its own memory for the outputs of recorded launches. Outputs that are not needed at the same time
// share memory.
//
// A replay skips a Reshape of the caller's memory, because it would only copy. The readers of its result then read the
// caller's memory. But if a launch between the Reshape and a reader may write to this memory, the replay runs the
// Reshape.
//
// If a kernel of MindSpore itself runs between two kernels of this library, it is missing in the recording. Therefore
// the caller must check that the recording is complete. The caller fills the memory of the outputs with NaN, replays,
// and compares the results with those of the graph.
#pragma once
#include "../custom_ops.h"
#include "call.h"

namespace llmk {

using Primitive = int (*)(const Call& call);

// Returns true if the agents of a stage run the primitive together (AllReduce and AllGather).
bool is_collective(Primitive primitive);

bool is_reshape(Primitive primitive);

// Returns true if the primitive writes to one of its inputs (ReshapeAndCache writes to the caches).
bool writes_inputs(Primitive primitive);

// Runs the primitive. Also records the call while a recording is open.
int launch(Primitive primitive, const Call& call);

// Returns the error code that MindSpore gets: `error`, or 0 if failures are held (holds_failures in op_plugin.cc).
int report_error(const char* op, int error);
bool has_failed();

}  // namespace llmk
