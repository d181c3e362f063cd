#include "launches.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

#include "../common/dtype_bytes.h"
#include "../common/floating_point.h"

namespace llmk {
namespace {

using mindspore::kernel::op_plugin::OpPluginOutputShapeInfo;
using mindspore::kernel::op_plugin::OpPluginTensorStorageInfo;

constexpr int64_t kAlignment = 64;
// What a kernel asks of MindSpore beside its tensors, and the answers, which are constants of the graph: MindSpore's
// own object may have other inputs by the time of the replay, or be gone.
class Answers : public KernelInputInfo {
 public:
  explicit Answers(KernelInputInfo* source) : source_(source), inputs_(source->GetInputSize()) {
    for (size_t i = 0; i < inputs_; ++i) scalars_.push_back(source->IsScalarInput(i));
  }
  // Of an operator whose inputs are all tensors.
  explicit Answers(size_t inputs) : source_(nullptr), inputs_(inputs), scalars_(inputs, false) {}
  void close() { source_ = nullptr; }
  int64_t held() const { return static_cast<int64_t>(sizeof(Answers) + answers_.capacity() * sizeof(Answer)); }

  bool IsScalarInput(size_t idx) override { return idx < inputs_ && scalars_[idx]; }
  size_t GetInputSize() override { return inputs_; }
  bool GetBoolInput(size_t idx) override {
    return of('b', idx, [&](Answer* a) { a->integer = source_->GetBoolInput(idx); }).integer != 0;
  }
  int64_t GetIntInput(size_t idx) override {
    return of('i', idx, [&](Answer* a) { a->integer = source_->GetIntInput(idx); }).integer;
  }
  double GetFloatInput(size_t idx) override {
    return of('f', idx, [&](Answer* a) { a->real = source_->GetFloatInput(idx); }).real;
  }
  std::vector<int64_t> GetIntVecInput(size_t idx) override {
    return of('v', idx, [&](Answer* a) { a->list = source_->GetIntVecInput(idx); }).list;
  }
  std::string GetStrInput(size_t) override { return unknown<std::string>(); }
  std::vector<double> GetFloatVecInput(size_t) override { return unknown<std::vector<double>>(); }
  std::vector<std::vector<int64_t>> GetInt2DVecInput(size_t) override {
    return unknown<std::vector<std::vector<int64_t>>>();
  }
  std::vector<std::vector<double>> GetFloat2DVecInput(size_t) override {
    return unknown<std::vector<std::vector<double>>>();
  }
  int GetInputTypeId(size_t) override { return unknown<int>(); }
  std::optional<OpPluginTensorStorageInfo> GetInputTensorLayout(size_t) override {
    return unknown<std::optional<OpPluginTensorStorageInfo>>();
  }
  OpPluginOutputShapeInfo* GetOutputShapeInfo() override { return unknown<OpPluginOutputShapeInfo*>(); }
  void SetOutputShapeInfo(std::unique_ptr<OpPluginOutputShapeInfo>) override { unknown<int>(); }

 private:
  struct Answer {
    char kind;
    size_t index;
    int64_t integer = 0;
    double real = 0;
    std::vector<int64_t> list;
  };

  template <class Ask>
  const Answer& of(char kind, size_t index, const Ask& ask) {
    for (const Answer& known : answers_) {
      if (known.kind == kind && known.index == index) return known;
    }
    if (source_ == nullptr) unknown<int>();
    answers_.push_back({kind, index, 0, 0, {}});
    ask(&answers_.back());
    return answers_.back();
  }

  // No primitive of ours asks for these, nor for anything at a replay that it did not ask for when it was recorded.
  template <class T>
  static T unknown() {
    throw std::logic_error("a primitive asks for what was not recorded");
  }

  KernelInputInfo* source_;
  size_t inputs_;
  std::vector<bool> scalars_;
  std::vector<Answer> answers_;
};

struct Range {
  const char* start;
  const char* end;
  int64_t place;  // of its start in the library's memory

  bool holds(const void* address) const { return address >= start && address < end; }
};

struct Launch {
  Primitive primitive;  // null: it is a custom operator
  CustomOp custom_op;
  bool is_shared;  // a collective: the other agents of the stage wait for it
  const char* op;
  std::vector<void*> data;      // where MindSpore had it
  std::vector<int64_t> places;  // in the library's memory; -1: it stays where it is
  std::vector<void*> placed;    // where a replay has it
  std::vector<int> ndims;
  std::vector<int64_t> sizes;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  std::unique_ptr<Answers> answers;
  std::vector<std::unique_ptr<char[]>> constants;
  int inputs;

  Tensors tensors() { return tensors_in(&data); }

  void find_places(char* memory) {
    placed = data;
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] >= 0) placed[i] = memory + places[i];
    }
  }

  int run() {
    const Tensors now = tensors_in(&placed);
    return primitive == nullptr ? custom_op(now) : primitive({now, answers.get()});
  }

 private:
  Tensors tensors_in(std::vector<void*>* where) {
    return {op, static_cast<int>(where->size()), where->data(), ndims.data(), shapes.data(), dtypes.data()};
  }
};

struct Recording {
  std::vector<Launch> launches;
  std::string problem;
  int64_t result = -1;
  int64_t bytes = 0;  // of what its launches write
  int64_t held = 0;   // by the recording itself, about
  char* memory = nullptr;  // that the launches' arguments were last placed in
};

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
  launch.places.assign(static_cast<size_t>(call.count), -1);
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

int64_t bytes_of(const Tensors& tensors, int i) { return tensors.size(i) * dtype_bytes(tensors.dtypes[i]); }

// What the launches write, overlapping pieces as one, each with a place that keeps its alignment.
std::vector<Range> written_by(std::vector<Launch>* launches, int64_t* total) {
  std::vector<Range> pieces, ranges;
  for (Launch& launch : *launches) {
    const Tensors tensors = launch.tensors();
    for (int i = launch.inputs; i < tensors.count; ++i) {
      const char* start = tensors.as<char>(i);
      if (start != nullptr) pieces.push_back({start, start + larger(1, bytes_of(tensors, i)), 0});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
  for (const Range& piece : pieces) {
    if (!ranges.empty() && piece.start < ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, piece.end);
    } else {
      ranges.push_back(piece);
    }
  }
  *total = 0;
  for (Range& range : ranges) {
    range.place = *total + static_cast<int64_t>(reinterpret_cast<uintptr_t>(range.start) % kAlignment);
    *total = ceil_div(range.place + (range.end - range.start), kAlignment) * kAlignment;
  }
  return ranges;
}

const Range* holder(const std::vector<Range>& ranges, const void* address) {
  for (const Range& range : ranges) {
    if (range.holds(address)) return &range;
  }
  return nullptr;
}

// Of what nobody wrote or named: a single number. Not a row of integers, which is what a graph's inputs are.
bool is_constant(const Tensors& tensors, int i) {
  return tensors.size(i) == 1 && (tensors.ndims[i] == 0 || tensors.dtype(i) != DType::kUnsupported);
}

// Where each argument is at a replay; false, and the recording's problem, where that is not known.
bool place(Recording* recording, Launch* launch, const std::vector<Range>& written, const std::vector<Range>& staying) {
  const Tensors tensors = launch->tensors();
  for (int i = 0; i < tensors.count; ++i) {
    const size_t at = static_cast<size_t>(i);
    if (tensors.data[i] == nullptr || launch->answers->IsScalarInput(at)) continue;
    if (const Range* range = holder(written, tensors.data[i])) {
      launch->places[at] = range->place + (tensors.as<char>(i) - range->start);
    } else if (holder(staying, tensors.data[i]) != nullptr) {
      continue;
    } else if (is_constant(tensors, i)) {
      const size_t bytes = static_cast<size_t>(larger(1, bytes_of(tensors, i)));
      launch->constants.emplace_back(new char[bytes]);
      std::memcpy(launch->constants.back().get(), tensors.data[i], bytes);
      launch->data[at] = launch->constants.back().get();
    } else {
      recording->problem = std::string(tensors.op) + " reads what none of our kernels wrote, as its argument " +
                           std::to_string(i) + " of " + std::to_string(tensors.count);
      return false;
    }
  }
  return true;
}

bool settle(Recording* recording, const void* result, const std::vector<Range>& staying) {
  if (recording->launches.empty()) recording->problem = "nothing was launched";
  if (!recording->problem.empty()) return false;
  const std::vector<Range> written = written_by(&recording->launches, &recording->bytes);
  for (Launch& launch : recording->launches) {
    if (!place(recording, &launch, written, staying)) return false;
  }
  const Range* range = holder(written, result);
  if (range == nullptr) {
    recording->problem = "none of our kernels wrote the result";
    return false;
  }
  recording->result = range->place + (static_cast<const char*>(result) - range->start);
  if (arena.grow(recording->bytes)) return true;
  recording->problem = "there is no memory for what is between the operators";
  return false;
}

template <class T>
int64_t held_by(const std::vector<T>& values) {
  return static_cast<int64_t>(values.capacity() * sizeof(T));
}

int64_t held_by(const Recording& recording) {
  constexpr int64_t kAllocation = 16;  // beside what is asked for
  int64_t total = static_cast<int64_t>(sizeof(Recording)) + held_by(recording.launches);
  for (const Launch& launch : recording.launches) {
    total += 2 * held_by(launch.data) + held_by(launch.places) + held_by(launch.ndims) + held_by(launch.sizes) +
             held_by(launch.shapes) + held_by(launch.dtypes) + launch.answers->held() + 9 * kAllocation;
    total += static_cast<int64_t>(launch.constants.size()) * 2 * kAllocation;
  }
  return total;
}

// After a refusal nothing is launched; with `keeps_pace` what other agents wait for is, so that the next collective is
// the same for all, whatever it sums. False where the refusal is not held back: nothing else was launched then.
bool replay(Recording* recording, bool keeps_pace) {
  const StandardFloatingPoint scope;
  if (recording->memory != arena.memory) {
    for (Launch& launch : recording->launches) launch.find_places(arena.memory);
    recording->memory = arena.memory;
  }
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

#define LLMK_ENTRY __attribute__((visibility("default")))

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
    staying.push_back({start, start + sizes[i], 0});
  }
  *problem = nullptr;
  if (llmk::settle(recording.get(), result, staying)) {
    ++llmk::arena.users;
    recording->held = llmk::held_by(*recording);
    llmk::recordings_held += recording->held;
    return recording.release();
  }
  reason = recording->problem;
  *problem = reason.c_str();
  return nullptr;
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
  return llmk::replay(replayed, keeps_pace != 0) ? llmk::arena.memory + replayed->result : nullptr;
}

// Bytes that all recordings hold, and what they are replayed in.
LLMK_ENTRY int64_t llmk_recordings_bytes() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  return llmk::recordings_held + llmk::arena.bytes;
}

// Fills the memory between operators with bytes that make no float a number.
LLMK_ENTRY void llmk_spoil_memory() {
  const std::lock_guard<std::mutex> lock(llmk::mutex);
  if (llmk::arena.memory != nullptr) std::memset(llmk::arena.memory, 0xFF, static_cast<size_t>(llmk::arena.bytes));
}

}  // extern "C"
