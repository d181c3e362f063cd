// Fusion of recorded launches: one function computes the results of several launches. It skips results that no other
// launch reads. Every result has the same bits as with separate launches.
#pragma once
#include "recording.h"

namespace llmk {

// Finds the launches of a recording that can be fused. A fused function may access its values in any order. Therefore
// this function extends the lifetimes of these values. The caller must assign buffers to the values afterwards.
void find_fusions(Recording* recording);

// Runs the function of a fusion. Returns 0, or the error code of a launch.
int run_fusion(Recording* recording, const Fusion& fusion);

}  // namespace llmk
