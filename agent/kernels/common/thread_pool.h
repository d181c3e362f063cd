// The threads of the library, and their scratch memory.
//
// MindSpore may call a kernel from any of its threads. The calling thread works together with the threads of the pool.
#pragma once
#include <cstdint>

namespace llmk {

using TaskFunction = void (*)(void* context, int64_t index);

// Calls function(context, i) once for each i in [0, count) and returns when all calls have returned. The threads take
// the indices from a shared counter. Any thread may call this. If the pool is busy, or the caller is such a function
// itself, the caller makes all calls alone.
void run_parallel(int64_t count, TaskFunction function, void* context);

// The same, but each thread has a range of consecutive indices. So a prefetch of the memory that follows pays off. A
// thread that has finished its range takes indices from the ends of the other ranges.
void run_stretches(int64_t count, TaskFunction function, void* context);

// Sets the number of threads, including the caller; 0 means every processor that the process may use.
void set_num_threads(int num_threads);
int num_threads();

// While attentive, idle threads spin for 200 us instead of 20 us before they sleep. Set it during a step, when another
// operator follows soon. Reset it when the step ends, so that other processes get the processors.
void set_attentive(bool attentive);

// Returns a buffer of this thread, aligned to 64 bytes, with undefined contents. It stays valid until the thread asks
// the same slot for a larger buffer.
void* thread_scratch(int slot, int64_t bytes);

// Returns the bytes of scratch memory of all threads: either the data between operators (kScratchLayer and
// kScratchExperts) or the rest.
int64_t scratch_bytes(bool between_operators);
// Adds memory that was allocated elsewhere to the rest; negative bytes when it is freed.
void count_scratch(int64_t bytes);

// Both are `static`, so that the object file of each instruction set keeps its own instance.
template <class Function>
static void parallel_for(int64_t count, const Function& function) {
  if (count == 1) {
    function(0);
    return;
  }
  run_parallel(
      count, [](void* context, int64_t index) { (*static_cast<const Function*>(context))(index); },
      const_cast<Function*>(&function));
}

template <class Function>
static void parallel_stretches(int64_t count, const Function& function) {
  run_stretches(
      count, [](void* context, int64_t index) { (*static_cast<const Function*>(context))(index); },
      const_cast<Function*>(&function));
}

// Scratch slots. Buffers that one thread uses at the same time need different slots. "Caller" is the thread that calls
// the kernel.
enum ScratchSlot : int {
  kScratchDriver = 0,
  kScratchTile = 1,
  kScratchRows = 2,
  kScratchHistory = 3,
  kScratchLinearRows = 4,  // linear layer: converted or quantized rows (caller)
  kScratchLinearTile = 5,  // linear layer: sums of a panel (each thread)
  kScratchLinearBest = 6,  // linear layer: largest result of each row (caller)
  kScratchNormed = 7,      // rows after a norm (caller or each thread)
  kScratchQuantized = 8,   // the same rows quantized (caller)
  kScratchInner = 9,       // data between the linear layers of an operator (caller)
  kScratchBest = 10,       // largest logit of each row (caller)
  kScratchLayer = 11,      // data between the operators of a layer (caller)
  kScratchExperts = 12,    // rows grouped by expert (caller)
  kScratchParts = 13,      // products of the parts of a weight (caller)
  kScratchLaidOut = 14,    // keys and values of a sequence in the layout of the cache (caller)
  kScratchLengths = 15,    // lengths of sequences (caller)
  kScratchSlots = 16
};

}  // namespace llmk
