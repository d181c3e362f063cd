#include "launches.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "../common/floating_point.h"
#include "recording.h"

namespace llmk {
namespace {

constexpr int64_t kAlignment = 64;

// Memory for what launches write, of all recordings: one is replayed at a time.
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
int64_t recordings_held = 0;  // by all recordings
std::mutex mutex;  // of what follows; launches of one graph come one after the other
std::atomic<Recording*> current{nullptr};

const char* interned(const char* name) {
  static std::set<std::string> names;
  return name == nullptr ? nullptr : names.insert(name).first->c_str();
}

Launch& remember(Recording* recording, const Tensors& call, std::unique_ptr<Answers> answers) {
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
  launch.inputs = static_cast<int>(answers->GetInputSize());
  launch.answers = std::move(answers);
  return launch;
}

// Counts what a recording holds, and sees to it that there is memory for its replays; false, and its problem, else.
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

// After a refusal nothing is launched; with `keeps_pace` what other agents wait for is, so that the next collective is
// the same for all, whatever it sums. False where the refusal is not held back: nothing else was launched then.
bool replay(Recording* recording, bool keeps_pace) {
  const StandardFloatingPoint scope;
  if (recording->memory != arena.memory) find_places(recording, arena.memory);
  for (Launch& launch : recording->launches) {
    if (has_failed() && !(keeps_pace && launch.is_shared)) continue;
    const int error = launch.run();
    if (answer(launch.op, error) != 0) return false;
    if (error != 0 && launch.is_shared) return true;  // the group is gone
  }
  return true;
}

}  // namespace

int launch(Primitive primitive, const Call& call) {
  if (current.load(std::memory_order_acquire) == nullptr) return primitive(call);
  const std::lock_guard<std::mutex> lock(mutex);
  Recording* recording = current.load(std::memory_order_relaxed);
  if (recording == nullptr) return primitive(call);
  Launch& launch = remember(recording, call, std::make_unique<Answers>(call.info));
  launch.primitive = primitive;
  launch.custom_op = nullptr;
  launch.is_shared = is_collective(primitive);
  Answers* answers = launch.answers.get();
  const int error = primitive({static_cast<const Tensors&>(call), answers});
  answers->close();
  if (error != 0) recording->problem = std::string(call.op) + " refused its inputs";
  return error;
}

int launch(CustomOp custom_op, int outputs, const Tensors& tensors) {
  if (current.load(std::memory_order_acquire) == nullptr) return custom_op(tensors);
  const std::lock_guard<std::mutex> lock(mutex);
  Recording* recording = current.load(std::memory_order_relaxed);
  if (recording == nullptr) return custom_op(tensors);
  const size_t inputs = static_cast<size_t>(tensors.count - outputs);
  Launch& launch = remember(recording, tensors, std::make_unique<Answers>(inputs));
  launch.primitive = nullptr;
  launch.custom_op = custom_op;
  launch.is_shared = false;  // an error of one is not held back
  const int error = custom_op(tensors);
  if (error != 0) recording->problem = std::string(tensors.op) + " refused its inputs";
  return error;
}

}  // namespace llmk

extern "C" {

// From here on what MindSpore launches is remembered.
LLMK_ENTRY void llmk_begin_recording() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  delete llmk::current.exchange(new llmk::Recording);
}

// The end of it: a recording, which llmk_forget_recording ends, where `problem` becomes null, or none and a reason,
// valid until the next call. The memory from starts[i] on, sizes[i] bytes, stays where it is as long as the recording;
// `result` is where the graph's result is now.
LLMK_ENTRY void* llmk_end_recording(const void* const* starts, const int64_t* sizes, int64_t count, const void* result,
                                    const char** problem) {
  static std::string reason;
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  std::unique_ptr<llmk::Recording> recording(llmk::current.exchange(nullptr));
  std::vector<llmk::Range> staying;
  for (int64_t i = 0; i < count; ++i) {
    const char* start = static_cast<const char*>(starts[i]);
    staying.push_back({start, start + sizes[i]});
  }
  *problem = nullptr;
  if (llmk::settle(recording.get(), result, staying) && llmk::hold(recording.get())) {
    ++llmk::arena.users;
    return recording.release();
  }
  reason = recording->problem;
  *problem = reason.c_str();
  return nullptr;
}

// Makes of the recording of a step one of any step, by `other`, one of the same graph. `sizes`: tokens and sequences of
// its step, of the other's, and of the largest there will be. 1, where `problem` becomes null, or 0 and a reason, valid
// until the next call; the recording is good for nothing then.
LLMK_ENTRY int llmk_generalise_recording(void* recording, const void* other, const int64_t* sizes,
                                         const char** problem) {
  static std::string reason;
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* made = static_cast<llmk::Recording*>(recording);
  const llmk::Recording& same = *static_cast<const llmk::Recording*>(other);
  const bool is_made = llmk::generalise(made, same, {sizes[0], sizes[1]}, {sizes[2], sizes[3]}, {sizes[4], sizes[5]});
  *problem = nullptr;
  if (is_made && llmk::hold(made)) return 1;
  reason = made->problem;
  *problem = reason.c_str();
  return 0;
}

// Of a recording of any step: its next replays are of a step of these sizes. Gives the bytes of its result.
LLMK_ENTRY int64_t llmk_resize_recording(void* recording, int64_t tokens, int64_t seqs) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* resized = static_cast<llmk::Recording*>(recording);
  llmk::resize(resized, {tokens, seqs});
  const llmk::Value& result = resized->values[static_cast<size_t>(resized->result)];
  return resized->launches[static_cast<size_t>(result.launch)].bytes_of(result.argument);
}

LLMK_ENTRY void llmk_forget_recording(void* recording) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::recordings_held -= static_cast<llmk::Recording*>(recording)->held;
  delete static_cast<llmk::Recording*>(recording);
  llmk::arena.drop();
}

// Makes the launches again, and gives the place of the result, valid until the next call of any of these functions, or
// null after an error that is not held back.
// After an operator's refusal none does anything, see llmk_take_failure, but sums and gathers with other agents where
// `keeps_pace` is set: who goes on after a refusal, as the others do that know nothing of it, must have made as many.
LLMK_ENTRY const void* llmk_replay(void* recording, int keeps_pace) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  llmk::Recording* replayed = static_cast<llmk::Recording*>(recording);
  if (!llmk::replay(replayed, keeps_pace != 0)) return nullptr;
  const llmk::Value& result = replayed->values[static_cast<size_t>(replayed->result)];
  return llmk::arena.memory + replayed->rooms[static_cast<size_t>(result.room)] + replayed->result_offset;
}

// Bytes that all recordings hold, and what they are replayed in.
LLMK_ENTRY int64_t llmk_recordings_bytes() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  return llmk::recordings_held + llmk::arena.bytes;
}

// Fills what is between the operators of a replay with bytes that make no float a number.
LLMK_ENTRY void llmk_spoil_memory(const void* recording) {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  const int64_t bytes = static_cast<const llmk::Recording*>(recording)->bytes();
  std::memset(llmk::arena.memory, 0xFF, static_cast<size_t>(bytes));
}

}  // extern "C"
