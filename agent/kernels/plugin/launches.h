// Launches of primitives and custom operators, remembered as MindSpore makes them, and made again without it.
//
// A graph launches the same primitives in the same order every time it runs; what changes is what lies in its inputs'
// memory, and how long they are. So a run is recorded, as an Ascend captures what a step launches, and replayed: in
// place of MindSpore's work for every operator and parameter there is a loop. Two runs of other shapes tell what each
// length is made of, and make a recording of steps of any size.
//
// What a recorded launch reads must be one of four: memory that stays, which the caller names (inputs of the graph,
// weights, caches); what a recorded launch wrote; a single number of the graph, which is copied; or a list that
// MindSpore has read from a named input, which a replay reads there. What recorded launches write gets memory of the
// library's own, which those share that are not needed at the same time. Whether anything is missing,
// such as a kernel of MindSpore's own between two of ours, is for the caller to find out: he fills that memory with
// what no kernel writes, replays, and compares the result.
#pragma once
#include "../custom_ops.h"
#include "call.h"

namespace llmk {

using Primitive = int (*)(const Call& call);

// Whether agents of a stage run the primitive together (op_plugin.cc).
bool is_collective(Primitive primitive);

// Runs the primitive; remembers the call where launches are being recorded.
int launch(Primitive primitive, const Call& call);

// What MindSpore would be told of a kernel's error: see op_plugin.cc.
int answer(const char* op, int error);
bool has_failed();

}  // namespace llmk
