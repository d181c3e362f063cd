#include "launches.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "../common/floating_point.h"
#include "fusion.h"
#include "recording.h"

namespace llmk {
namespace {

constexpr int64_t kAlignment = 64;

// The memory that replayed launches write. All recordings share this memory, because only one recording is replayed at
// a time.
struct Arena {
  char* memory = nullptr;
  int64_t bytes = 0;
  int users = 0;

  bool grow(int64_t wanted) {
    if (wanted <= bytes) return true;
    char* larger = static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(wanted)));
    if (larger == nullptr) return false;
    std::free(memory);
    memory = larger;
    bytes = wanted;
    return true;
  }
  void drop() {
    if (--users > 0) return;
    std::free(memory);
    memory = nullptr;
    bytes = 0;
  }
};

Arena arena;
int64_t recordings_held = 0;  // size of all recordings in bytes
std::mutex mutex;             // guards all variables of this file
std::atomic<Recording*> current{nullptr};

const char* interned(const char* name) {
  static std::set<std::string> names;
  return name == nullptr ? nullptr : names.insert(name).first->c_str();
}

Launch& record(Recording* recording, const Tensors& call, std::unique_ptr<ScalarInputs> scalars) {
  recording->launches.emplace_back();
  Launch& launch = recording->launches.back();
  launch.op = call.op;
  launch.data.assign(call.data, call.data + call.count);
  launch.values.assign(static_cast<size_t>(call.count), -1);
  launch.offsets.assign(static_cast<size_t>(call.count), 0);
  launch.ndims.assign(call.ndims, call.ndims + call.count);
  for (int i = 0; i < call.count; ++i) {
    launch.dtypes.push_back(interned(call.dtypes[i]));
    const int64_t* shape = call.shapes[i];
    if (shape != nullptr) launch.sizes.insert(launch.sizes.end(), shape, shape + call.ndims[i]);
  }
  int64_t* sizes = launch.sizes.data();
  for (int i = 0; i < call.count; ++i) {
    launch.shapes.push_back(call.shapes[i] == nullptr ? nullptr : sizes);
    if (call.shapes[i] != nullptr) sizes += call.ndims[i];
  }
  launch.inputs = static_cast<int>(scalars->GetInputSize());
  launch.is_skipped = false;
  launch.scalars = std::move(scalars);
  return launch;
}

// Adds the size of a recording to recordings_held, and grows the arena to the size that the recording needs. If there
// is not enough memory, stores the reason in recording->problem and returns false.
bool hold(Recording* recording) {
  recordings_held -= recording->held;
  recording->held = held_by(*recording);
  recordings_held += recording->held;
  if (arena.grow(recording->bytes())) return true;
  recordings_held -= recording->held;
  recording->held = 0;
  recording->problem = "there is no memory for what is between the operators";
  return false;
}

// Runs all launches of a recording. Returns false if a launch fails. Then the remaining launches do not run.
//
// If holds_failures (op_plugin.cc) is set, failing launches report success, so the result is true. The remaining
// launches do not run, either. But with `keeps_pace`, the remaining collectives run, because the other agents of the
// stage wait for them. Only primitives count as collectives here (`is_shared` in recording.h).
bool replay(Recording* recording, bool keeps_pace) {
  const StandardFloatingPoint scope;
  if (recording->memory != arena.memory) find_places(recording, arena.memory);
  for (size_t number = 0; number < recording->launches.size(); ++number) {
    Launch& launch = recording->launches[number];
    if (launch.is_skipped) continue;
    const int fused = recording->fused.empty() ? -1 : recording->fused[number];
    const Fusion* fusion = fused < 0 ? nullptr : &recording->fusions[static_cast<size_t>(fused)];
    if (fusion != nullptr && fusion->last() != static_cast<int>(number)) continue;
    if (has_failed() && !(keeps_pace && launch.is_shared)) continue;
    const int error = fusion == nullptr ? launch.run() : run_fusion(recording, *fusion);
    if (report_error(launch.op, error) != 0) return false;
    if (error != 0 && launch.is_shared) return true;  // a failed collective means that the group is down
  }
  return true;
}

}  // namespace

int launch(Primitive primitive, const Call& call) {
  if (current.load(std::memory_order_acquire) == nullptr) return primitive(call);
  const std::lock_guard<std::mutex> lock(mutex);
  Recording* recording = current.load(std::memory_order_relaxed);
  if (recording == nullptr) return primitive(call);
  Launch& launch = record(recording, call, std::make_unique<ScalarInputs>(call.info));
  launch.primitive = primitive;
  launch.custom_op = nullptr;
  launch.is_shared = is_collective(primitive);
  launch.is_reshape = is_reshape(primitive);
  launch.writes_inputs = writes_inputs(primitive);
  ScalarInputs* scalars = launch.scalars.get();
  const int error = primitive({static_cast<const Tensors&>(call), scalars});
  scalars->close();
  if (error != 0) recording->problem = std::string(call.op) + " refused its inputs";
  return error;
}

int launch(CustomOp custom_op, int outputs, const Tensors& tensors) {
  if (current.load(std::memory_order_acquire) == nullptr) return custom_op(tensors);
  const std::lock_guard<std::mutex> lock(mutex);
  Recording* recording = current.load(std::memory_order_relaxed);
  if (recording == nullptr) return custom_op(tensors);
  const size_t inputs = static_cast<size_t>(tensors.count - outputs);
  Launch& launch = record(recording, tensors, std::make_unique<ScalarInputs>(inputs));
  launch.primitive = nullptr;
  launch.custom_op = custom_op;
  // Some custom operators are collectives, too, for example AllReduceRows. Their is_shared is false nevertheless: a
  // replay reads it only after a held failure (op_plugin.cc), and graphs of custom operators do not hold failures.
  launch.is_shared = launch.is_reshape = false;
  launch.writes_inputs = true;
  const int error = custom_op(tensors);
  if (error != 0) recording->problem = std::string(tensors.op) + " refused its inputs";
  return error;
}

}  // namespace llmk

extern "C" {

// Begins to record the launches of MindSpore.
LLMK_ENTRY void llmk_begin_recording() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  delete llmk::current.exchange(new llmk::Recording);
}

// Ends recording. Returns the recording, which llmk_forget_recording() frees. If the launches cannot be replayed,
// returns null and sets `problem` to the reason. This text is valid until the next call.
//
// The caller names `count` ranges of memory whose addresses must not change while the recording exists. Range i has
// sizes[i] bytes and begins at starts[i]. `results` are the addresses of the graph's results.
LLMK_ENTRY void* llmk_end_recording(const void* const* starts, const int64_t* sizes, int64_t count,
                                    const void* const* results, int64_t num_results, const char** problem) {
  static std::string reason;
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  std::unique_ptr<llmk::Recording> recording(llmk::current.exchange(nullptr));
  std::vector<llmk::Range> staying;
  for (int64_t i = 0; i < count; ++i) {
    const char* start = static_cast<const char*>(starts[i]);
    staying.push_back({start, start + sizes[i]});
  }
  const std::vector<const void*> addresses(results, results + num_results);
  *problem = nullptr;
  if (llmk::complete(recording.get(), addresses, staying) && llmk::hold(recording.get())) {
    ++llmk::arena.users;
    return recording.release();
  }
  reason = recording->problem;
  *problem = reason.c_str();
  return nullptr;
}

// Generalizes the recording of one step to steps of any size. `other` is a recording of the same graph for another
// step. `sizes` [9] has the numbers of tokens, sequences and gathered blocks of three steps: the step of `recording`,
// the step of `other` and the largest step. With `fuses`, launches are fused (fusion.h).
//
// Returns 1 if this succeeds. Otherwise returns 0 and sets `problem` to the reason, which is valid until the next call.
// Then the recording must not be replayed.
LLMK_ENTRY int llmk_generalise_recording(void* recording, const void* other, const int64_t* sizes, int fuses,
                                         const char** problem) {
  static std::string reason;
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* made = static_cast<llmk::Recording*>(recording);
  const llmk::Recording& same = *static_cast<const llmk::Recording*>(other);
  const bool is_made = llmk::generalise(made, same, {sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]},
                                        {sizes[6], sizes[7], sizes[8]}, fuses != 0);
  *problem = nullptr;
  if (is_made && llmk::hold(made)) return 1;
  reason = made->problem;
  *problem = reason.c_str();
  return 0;
}

// Sets the size of the next step for a generalized recording. Writes the size in bytes of each result to `bytes`.
LLMK_ENTRY void llmk_resize_recording(void* recording, int64_t tokens, int64_t seqs, int64_t blocks, int64_t* bytes) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* resized = static_cast<llmk::Recording*>(recording);
  llmk::resize(resized, {tokens, seqs, blocks});
  for (const llmk::Result& result : resized->results) {
    const llmk::Value& value = resized->values[static_cast<size_t>(result.value)];
    *bytes++ = resized->launches[static_cast<size_t>(value.launch)].bytes_of(value.argument);
  }
}

// Returns the number of launches of a recording. A fused launch counts as the launches that it replaces, and a skipped
// Reshape also counts.
LLMK_ENTRY int64_t llmk_recorded_launches(const void* recording) {
  return static_cast<int64_t>(static_cast<const llmk::Recording*>(recording)->launches.size());
}

// Returns the name of fusion number `number`: its operators, joined by '+'. Returns null if the recording has no fusion
// of this number.
LLMK_ENTRY const char* llmk_recorded_fusion(const void* recording, int64_t number) {
  const std::vector<llmk::Fusion>& fusions = static_cast<const llmk::Recording*>(recording)->fusions;
  return number < static_cast<int64_t>(fusions.size()) ? fusions[static_cast<size_t>(number)].name : nullptr;
}

LLMK_ENTRY void llmk_forget_recording(void* recording) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::recordings_held -= static_cast<llmk::Recording*>(recording)->held;
  delete static_cast<llmk::Recording*>(recording);
  llmk::arena.drop();
}

// Replays the launches, writes the addresses of the results and returns 1. The addresses are valid until the next call
// of a function of this file. If a launch fails, returns 0. After llmk_hold_failures(1), returns 1 even if a launch
// fails, and the following kernels do nothing until llmk_take_failure() is called.
//
// With `keeps_pace`, the collectives run even after a held failure. The other agents do not know of the failure, and
// all agents must run the same number of collectives. If failures are not held, as in graphs of custom operators, no
// launch runs after a failure. Then the caller must end the group.
LLMK_ENTRY int llmk_replay(void* recording, int keeps_pace, const void** addresses) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* replayed = static_cast<llmk::Recording*>(recording);
  if (!llmk::replay(replayed, keeps_pace != 0)) return 0;
  for (const llmk::Result& result : replayed->results) {
    const llmk::Value& value = replayed->values[static_cast<size_t>(result.value)];
    *addresses++ = llmk::arena.memory + replayed->buffers[static_cast<size_t>(value.buffer)] + result.offset;
  }
  return 1;
}

// Returns the size in bytes of all recordings, including the memory that replays write.
LLMK_ENTRY int64_t llmk_recordings_bytes() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  return llmk::recordings_held + llmk::arena.bytes;
}

// Fills the memory that replays write with bytes that make every float a NaN.
LLMK_ENTRY void llmk_spoil_memory(const void* recording) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  const int64_t bytes = static_cast<const llmk::Recording*>(recording)->bytes();
  std::memset(llmk::arena.memory, 0xFF, static_cast<size_t>(bytes));
}

}  // extern "C"
