// Records the launches of primitives and custom operators while MindSpore runs a graph, and replays them without
// MindSpore.
//
// A graph launches the same operators in the same order every time. Only the contents of its inputs and their lengths
// change. So one run is recorded, as an Ascend captures the launches of a step, and replayed by a loop. This saves
// MindSpore's work for every operator and parameter. Two runs with different lengths show what each length depends on.
// They make a recording for steps of any size.
//
// A recorded launch may read four kinds of memory:
//   - memory whose address never changes, which the caller names: inputs of the graph, weights, caches
//   - the output of a recorded launch
//   - a single number of the graph, which is copied
//   - a list that MindSpore read from a named input; a replay reads it from there
// The outputs of recorded launches get memory of the library. Outputs that are not needed at the same time share it.
//
// The caller must check that the recording is complete: a kernel of MindSpore between two kernels of this library would
// be missing. Therefore the caller fills the memory with NaN, replays, and compares the results with those of the
// graph.
#pragma once
#include "../custom_ops.h"
#include "call.h"

namespace llmk {

using Primitive = int (*)(const Call& call);

// Returns whether the agents of a stage run the primitive together (op_plugin.cc).
bool is_collective(Primitive primitive);

// Runs the primitive. Also records the call while a recording is open.
int launch(Primitive primitive, const Call& call);

// Returns the error code for MindSpore: `error`, or 0 if the caller stores errors (holds_failures in op_plugin.cc).
int report_error(const char* op, int error);
bool has_failed();

}  // namespace llmk
