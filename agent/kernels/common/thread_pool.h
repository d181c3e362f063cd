// The threads of the library, and their scratch memory.
//
// MindSpore may call a kernel from any of its threads. The calling thread and the threads of the pool share the work.
#pragma once
#include <cstdint>

namespace llmk {

using TaskFunction = void (*)(void* context, int64_t index);

// Calls function(context, i) once for each i in [0, count) and returns when all calls have returned. The threads take
// the indices from a shared counter. Any thread may call run_parallel(). If the pool is busy, or the calling thread
// already runs a task of the pool, the calling thread makes all calls alone.
void run_parallel(int64_t count, TaskFunction function, void* context);

// Makes the same calls as run_parallel(), but gives each thread a range of consecutive indices. So a call can prefetch
// the memory that the thread needs for its next index. A thread that has finished its range takes indices from the ends
// of the other threads' ranges.
void run_stretches(int64_t count, TaskFunction function, void* context);

// Returns the number of threads among which run_stretches() divides a range: 1 if this thread would make all calls.
int64_t threads_of_loop();

// Sets the number of threads, including the calling thread. 0 means one thread for every processor that the process may
// use.
void set_num_threads(int num_threads);
int num_threads();

// Sets how long idle threads wait in a loop before they sleep: 200 us if `attentive`, otherwise 20 us. The caller
// passes true at the start of a step, because the next operator follows soon. At the end of the step the caller passes
// false, so that other processes get the processors.
void set_attentive(bool attentive);

// Sets whether threads may wait in a loop. If not, waiting threads sleep immediately. This saves energy, but each
// wake-up takes some microseconds.
void set_spinning(bool allowed);
bool may_spin();

// Returns scratch buffer number `slot` of this thread, aligned to 64 bytes, with undefined contents. The buffer stays
// valid until the thread requests more bytes for the same `slot`.
void* thread_scratch(int slot, int64_t bytes);

// Returns the bytes of scratch memory of all threads. If `between_operators`, counts only the buffers kScratchLayer and
// kScratchExperts, which hold results of a layer between its operators. Otherwise counts all buffers except these two.
int64_t scratch_bytes(bool between_operators);
// Adds `bytes` of memory from another allocator to the result of scratch_bytes(false). Negative bytes mean freed
// memory.
void count_scratch(int64_t bytes);

// Calls function(i) once for each i in [0, count), like run_parallel(), but takes any C++ function object. The function
// parallel_stretches() does the same for run_stretches(). Both functions are `static`, so that the object file of each
// instruction set has its own copy.
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

// The numbers of a thread's scratch buffers, for thread_scratch(). Buffers that a thread uses at the same time have
// different numbers. In the comments below, the calling thread is the thread that calls the kernel.
enum ScratchSlot : int {
  kScratchDriver = 0,
  kScratchTile = 1,
  kScratchRows = 2,
  kScratchHistory = 3,
  kScratchLinearRows = 4,  // linear layer: converted or quantised activations (used by the calling thread)
  kScratchLinearTile = 5,  // linear layer: sums of a panel (used by each thread)
  kScratchLinearBest = 6,  // linear layer: largest output of each row (used by the calling thread)
  kScratchNormed = 7,      // results of a norm (used by the calling thread or by each thread)
  kScratchQuantized = 8,   // results of a norm, quantised (used by the calling thread)
  kScratchInner = 9,       // data between the linear layers of an operator (used by the calling thread)
  kScratchBest = 10,       // largest logit of each row (used by the calling thread)
  kScratchLayer = 11,      // data between the operators of a layer (used by the calling thread)
  kScratchExperts = 12,    // activations sorted by expert (used by the calling thread)
  kScratchParts = 13,      // products with each part of a weight that is stored in parts (used by the calling thread)
  kScratchLaidOut = 14,    // keys and values of a sequence in the layout of the cache (used by the calling thread)
  kScratchLengths = 15,    // lengths of sequences (used by the calling thread)
  kScratchStatic = 16,     // calibrated scales and offsets of inputs, and scales of rows (used by the calling thread)
  kScratchLora = 17,         // products with the matrices A of adapters (used by the calling thread)
  kScratchLoraWeights = 18,  // the adapter of each row of a linear layer (used by the calling thread)
  kScratchLoraSplit = 19,    // products with A as two bfloat16 numbers each (used by the calling thread)
  kScratchLoraRows = 20,     // copied activations, for the products with A (used by each thread)
  kScratchDelta = 21,        // buffers for a value head of gated linear attention (used by each thread)
  kScratchLinearWords = 22,  // int8 activations, widened to 16 bits (used by the calling thread)
  kScratchExpanded = 23,     // int8 weights as 16-bit numbers, or int4 weights as bytes (used by each thread)
  kScratchSlots = 24
};

}  // namespace llmk
