// The library's own threads. MindSpore calls kernels from threads of its own choice, so the pool belongs to the
// library and the calling thread takes part in the work.
#pragma once
#include <cstdint>

namespace llmk {

using TaskFunction = void (*)(void* context, int64_t index);

// Calls function(context, i) once for each i in [0, count), spread over the pool's threads by a shared counter, and
// returns when all calls have returned. Safe from any thread; a second caller at the same time works alone, as does a
// caller that is in such a function itself.
void run_parallel(int64_t count, TaskFunction function, void* context);

// The same with each thread walking a stretch of its own in order, so that what follows in memory is worth fetching; a
// thread that is done takes from the ends of the others' stretches.
void run_stretches(int64_t count, TaskFunction function, void* context);

// Sets the number of threads (the caller counts as one); 0 means all processors the process may use.
void set_num_threads(int num_threads);
int num_threads();

// While attentive, threads that have nothing to do stay awake for 200 us and not for 20 only: between the operators of
// one step, where the next is sure to come. To be taken back when the step ends, so that others have the processors.
void set_attentive(bool attentive);

// A buffer of this thread, 64-byte aligned, contents undefined; valid until the same slot is asked for a larger one.
void* thread_scratch(int slot, int64_t bytes);

// Bytes that all threads hold so: what lies between operators (of a layer, of experts), or all the rest.
int64_t scratch_bytes(bool between_operators);
void count_scratch(int64_t bytes);  // of the rest, taken elsewhere; negative when it is given back

// `static`, so that each instruction set's object file keeps its own instance.
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

// Scratch slots: one per simultaneous use within one thread.
enum ScratchSlot : int {
  kScratchDriver = 0,
  kScratchTile = 1,
  kScratchRows = 2,
  kScratchHistory = 3,
  kScratchLinearRows = 4,  // linear: rows converted or quantised, by the caller
  kScratchLinearTile = 5,  // linear: sums of a panel, by each thread
  kScratchLinearBest = 6,  // linear: best of each row, by the caller
  kScratchNormed = 7,      // rows after the norm, by the caller or each thread
  kScratchQuantized = 8,   // the same quantised, by the caller
  kScratchInner = 9,       // between the layers of an operator, by the caller
  kScratchBest = 10,       // largest logit of each row, by the caller
  kScratchLayer = 11,      // between the operators of a layer, by the caller
  kScratchExperts = 12,    // rows grouped by expert, by the caller
  kScratchParts = 13,      // products of a weight's parts, by the caller
  kScratchLaidOut = 14,    // a sequence's keys and values as a cache holds them, by the caller
  kScratchLengths = 15,    // of sequences, by the caller
  kScratchSlots = 16
};

}  // namespace llmk
