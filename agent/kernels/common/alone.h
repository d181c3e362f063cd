// Computing without the other threads of the pool (thread_pool.h).
#pragma once

namespace llmk {

// If `is_alone`, the calling thread makes all calls of its parallel loops alone, and no other thread wakes up. The
// quiet mode uses this for small steps. The results have the same bits.
void set_alone(bool is_alone);

}  // namespace llmk
