#include "recording.h"

#include <algorithm>

#include "../common/dtype_bytes.h"
#include "fusion.h"

namespace llmk {
namespace {

constexpr int64_t kAlignment = 64;

bool is_written(const Launch& launch, size_t argument) {
  return static_cast<int>(argument) >= launch.inputs && launch.data[argument] != nullptr;
}

bool stays(const std::vector<Range>& staying, const void* address) {
  return std::any_of(staying.begin(), staying.end(),
                     [&](const Range& range) { return address >= range.start && address < range.end; });
}

// Returns the index of the last value whose memory contains this address, or -1.
int holder(const std::vector<Value>& values, const void* address) {
  for (size_t i = values.size(); i-- > 0;) {
    if (address >= values[i].start && address < values[i].end) return static_cast<int>(i);
  }
  return -1;
}

// Returns true if an input is a constant of the graph. Constants are single numbers. Arrays of integers are inputs of
// the graph. Call this function only for an input that no launch wrote and whose memory the caller did not name.
bool is_constant(const Tensors& tensors, int i) {
  return tensors.size(i) == 1 && (tensors.ndims[i] == 0 || tensors.dtype(i) != DType::kUnsupported);
}

// Determines the memory from which a replay reads an input. If this memory is unknown, stores the reason in
// recording->problem and returns false.
bool find_input(Recording* recording, int number, size_t at, const std::vector<Range>& staying) {
  Launch& launch = recording->launches[static_cast<size_t>(number)];
  const int argument = static_cast<int>(at), value = holder(recording->values, launch.data[at]);
  if (launch.data[at] == nullptr || launch.scalars->IsScalarInput(at) || stays(staying, launch.data[at])) return true;
  if (value >= 0) {
    Value& found = recording->values[static_cast<size_t>(value)];
    if (launch.writes_inputs) found.source = nullptr;
    if (found.source != nullptr && launch.data[at] == found.start) {
      launch.data[at] = found.source;
      return true;
    }
    launch.values[at] = value;
    launch.offsets[at] = static_cast<const char*>(launch.data[at]) - found.start;
    found.last = number;
    return true;
  }
  if (is_constant(launch.tensors(), argument)) {
    const size_t bytes = static_cast<size_t>(launch.bytes_of(argument));
    launch.constants.emplace_back(new char[bytes]);
    std::memcpy(launch.constants.back().get(), launch.data[at], bytes);
    launch.data[at] = launch.constants.back().get();
    return true;
  }
  recording->problem = std::string(launch.op) + " reads what none of our kernels wrote, as its argument " +
                       std::to_string(argument) + " of " + std::to_string(launch.data.size());
  return false;
}

void find_outputs(Recording* recording, int number, const std::vector<Range>& staying) {
  Launch& launch = recording->launches[static_cast<size_t>(number)];
  for (size_t at = 0; at < launch.data.size(); ++at) {
    if (!is_written(launch, at) || stays(staying, launch.data[at])) continue;
    const int argument = static_cast<int>(at);
    const char* start = static_cast<const char*>(launch.data[at]);
    char* source = launch.is_reshape && stays(staying, launch.data[0]) ? static_cast<char*>(launch.data[0]) : nullptr;
    launch.values[at] = static_cast<int>(recording->values.size());
    const char* end = start + launch.bytes_of(argument);
    recording->values.push_back({start, end, number, argument, number, number, -1, source});
  }
}

// Returns true if a launch may write to the memory from `start` to `end`.
bool may_write(Launch* launch, const char* start, const char* end) {
  if (launch->primitive == nullptr) return true;  // a custom operator may write to any memory of the caller
  for (size_t at = 0; at < launch->data.size(); ++at) {
    const bool is_input = static_cast<int>(at) < launch->inputs;
    if (launch->data[at] == nullptr || launch->scalars->IsScalarInput(at) || (is_input && !launch->writes_inputs)) {
      continue;
    }
    const char* first = static_cast<const char*>(launch->data[at]);
    if (first < end && start < first + launch->bytes_of(static_cast<int>(at))) return true;
  }
  return false;
}

// Clears Value::source of each Reshape whose input this launch may change. Later readers of the Reshape then read its
// result, not its input.
void forget_written_sources(Recording* recording, Launch* launch) {
  for (Value& value : recording->values) {
    if (value.source != nullptr && may_write(launch, value.source, value.source + (value.end - value.start))) {
      value.source = nullptr;
    }
  }
}

// Marks each Reshape whose result no launch reads. A replay then does not copy its input. For example, attention with
// sinks reads the KV cache with another shape, and a copy would take time in proportion to the whole cache.
void skip_unread_reshapes(Recording* recording) {
  for (const Value& value : recording->values) {
    Launch& launch = recording->launches[static_cast<size_t>(value.launch)];
    launch.is_skipped = launch.is_reshape && value.last == value.launch;
  }
}

int64_t bytes_of(Recording* recording, const Value& value) {
  return recording->launches[static_cast<size_t>(value.launch)].bytes_of(value.argument);
}

// Computes the offsets of all buffers for the current sizes of the step. A buffer is as large as the largest value that
// uses it.
void lay_out(Recording* recording) {
  std::vector<int64_t> bytes(recording->buffers.size() - 1, 0);
  for (const Value& value : recording->values) {
    if (value.buffer < 0) continue;
    int64_t& buffer = bytes[static_cast<size_t>(value.buffer)];
    buffer = larger(buffer, bytes_of(recording, value));
  }
  int64_t place = 0;
  for (size_t buffer = 0; buffer < bytes.size(); ++buffer) {
    recording->buffers[buffer] = place;
    place += ceil_div(bytes[buffer], kAlignment) * kAlignment;
  }
  recording->buffers.back() = place;
  recording->memory = nullptr;
}

bool overlap(const Value& a, const Value& b) { return a.first <= b.last && b.first <= a.last; }

// Assigns a buffer to each value, beginning with the largest value. Values that are not needed at the same time share a
// buffer. The result of a skipped launch gets no buffer.
void assign_buffers(Recording* recording) {
  std::vector<std::pair<int64_t, Value*>> by_size;
  for (Value& value : recording->values) {
    if (recording->launches[static_cast<size_t>(value.launch)].is_skipped) continue;
    by_size.push_back({bytes_of(recording, value), &value});
  }
  std::stable_sort(by_size.begin(), by_size.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::vector<const Value*>> buffers;
  for (const auto& [bytes, value] : by_size) {
    const auto has_place = [each = value](const std::vector<const Value*>& buffer) {
      return std::none_of(buffer.begin(), buffer.end(), [each](const Value* other) { return overlap(*other, *each); });
    };
    const auto found = std::find_if(buffers.begin(), buffers.end(), has_place);
    value->buffer = static_cast<int>(found - buffers.begin());
    if (found == buffers.end()) buffers.emplace_back();
    buffers[static_cast<size_t>(value->buffer)].push_back(value);
  }
  recording->buffers.assign(buffers.size() + 1, 0);
  lay_out(recording);
}

// Finds the rule (Length) for a length that was `a` in one recorded step and `b` in the other. A rule is a constant, or
// a multiple of the tokens, sequences or blocks. Returns false if no rule gives both lengths.
bool length_of(int64_t a, int64_t b, StepSizes of_a, StepSizes of_b, Length* length) {
  *length = {a, {0, 0, 0}};
  if (a == b) return true;
  for (int64_t StepSizes::*size : {&StepSizes::tokens, &StepSizes::seqs, &StepSizes::blocks}) {
    if (of_a.*size == 0) continue;
    *length = {0, {0, 0, 0}};
    length->per.*size = a / (of_a.*size);
    if (length->at(of_a) == a && length->at(of_b) == b) return true;
  }
  return false;
}

bool is_same(const Launch& a, const Launch& b) {
  if (a.primitive != b.primitive || a.custom_op != b.custom_op || a.is_skipped != b.is_skipped ||
      a.inputs != b.inputs || a.values != b.values || a.offsets != b.offsets || a.ndims != b.ndims ||
      a.sizes.size() != b.sizes.size() || a.dtypes != b.dtypes || !(*a.scalars == *b.scalars) ||
      a.constants.size() != b.constants.size()) {
    return false;
  }
  return std::all_of(a.offsets.begin(), a.offsets.end(), [](int64_t offset) { return offset == 0; });
}

// Returns true if two launches read equal constants and the same memory of the caller. The caller must have called
// is_same() for them, with the result true.
bool reads_the_same(Launch* a, const Launch& b) {
  size_t constants = 0;
  for (size_t at = 0; at < a->data.size(); ++at) {
    if (a->values[at] >= 0 || a->data[at] == b.data[at] || a->scalars->IsScalarInput(at)) continue;
    const bool both = constants < a->constants.size() && a->data[at] == a->constants[constants].get() &&
                      b.data[at] == b.constants[constants].get();
    if (!both) return false;
    const size_t bytes = static_cast<size_t>(a->bytes_of(static_cast<int>(at)));
    if (std::memcmp(a->data[at], b.data[at], bytes) != 0) return false;
    ++constants;
  }
  return true;
}

template <class T>
int64_t held_by(const std::vector<T>& values) {
  return static_cast<int64_t>(values.capacity() * sizeof(T));
}

}  // namespace

int64_t Launch::bytes_of(int argument) {
  const Tensors all = tensors();
  return larger(1, all.size(argument) * dtype_bytes(all.dtypes[argument]));
}

int Launch::run() {
  const Tensors now = tensors_in(&placed);
  return primitive == nullptr ? custom_op(now) : primitive({now, scalars.get()});
}

bool complete(Recording* recording, const std::vector<const void*>& results, const std::vector<Range>& staying) {
  if (recording->launches.empty()) recording->problem = "nothing was launched";
  if (!recording->problem.empty()) return false;
  for (size_t number = 0; number < recording->launches.size(); ++number) {
    const size_t inputs = static_cast<size_t>(recording->launches[number].inputs);
    for (size_t at = 0; at < inputs; ++at) {
      if (!find_input(recording, static_cast<int>(number), at, staying)) return false;
    }
    find_outputs(recording, static_cast<int>(number), staying);
    forget_written_sources(recording, &recording->launches[number]);
    recording->launches[number].scalars->find_lists(staying);
  }
  for (const void* result : results) {
    const int number = stays(staying, result) ? -1 : holder(recording->values, result);
    if (number < 0) {
      recording->problem = "none of our kernels wrote the result";
      return false;
    }
    Value& value = recording->values[static_cast<size_t>(number)];
    recording->results.push_back({number, static_cast<const char*>(result) - value.start});
    value.last = static_cast<int>(recording->launches.size());
  }
  skip_unread_reshapes(recording);
  assign_buffers(recording);
  return true;
}

bool generalise(Recording* recording, const Recording& other, StepSizes of_this, StepSizes of_other,
                StepSizes largest, bool fuses) {
  const auto are_same = [](const Result& a, const Result& b) {
    return a.value == b.value && a.offset == 0 && b.offset == 0;
  };
  if (recording->launches.size() != other.launches.size() ||
      !std::equal(recording->results.begin(), recording->results.end(), other.results.begin(), other.results.end(),
                  are_same)) {
    recording->problem = "steps of other sizes launch something else";
    return false;
  }
  for (size_t number = 0; number < other.launches.size(); ++number) {
    Launch& launch = recording->launches[number];
    const Launch& same = other.launches[number];
    if (!is_same(launch, same) || !reads_the_same(&launch, same)) {
      recording->problem = std::string(launch.op) + " is another launch in steps of other sizes";
      return false;
    }
    launch.lengths.resize(launch.sizes.size());
    for (size_t i = 0; i < launch.sizes.size(); ++i) {
      if (length_of(launch.sizes[i], same.sizes[i], of_this, of_other, &launch.lengths[i])) continue;
      recording->problem = std::string(launch.op) + " has a length of " + std::to_string(launch.sizes[i]) +
                           " in one step and of " + std::to_string(same.sizes[i]) + " in another";
      return false;
    }
  }
  resize(recording, largest);
  if (fuses) find_fusions(recording);
  assign_buffers(recording);
  return true;
}

void resize(Recording* recording, StepSizes sizes) {
  for (Launch& launch : recording->launches) {
    for (size_t i = 0; i < launch.lengths.size(); ++i) launch.sizes[i] = launch.lengths[i].at(sizes);
  }
  lay_out(recording);
}

void find_places(Recording* recording, char* memory) {
  for (Launch& launch : recording->launches) {
    launch.placed = launch.data;
    for (size_t at = 0; at < launch.values.size(); ++at) {
      if (launch.values[at] < 0) continue;
      const Value& value = recording->values[static_cast<size_t>(launch.values[at])];
      if (value.buffer < 0) continue;
      launch.placed[at] = memory + recording->buffers[static_cast<size_t>(value.buffer)] + launch.offsets[at];
    }
  }
  recording->memory = memory;
}

int64_t held_by(const Recording& recording) {
  constexpr int64_t kAllocation = 16;  // estimated overhead of a memory allocation in bytes
  int64_t total = static_cast<int64_t>(sizeof(Recording)) + held_by(recording.launches) + held_by(recording.values) +
                  held_by(recording.buffers);
  for (const Launch& launch : recording.launches) {
    total += 2 * held_by(launch.data) + held_by(launch.values) + held_by(launch.offsets) + held_by(launch.ndims) +
             held_by(launch.sizes) + held_by(launch.lengths) + held_by(launch.shapes) + held_by(launch.dtypes) +
             launch.scalars->held() + 11 * kAllocation;
    total += static_cast<int64_t>(launch.constants.size()) * 2 * kAllocation;
  }
  return total;
}

}  // namespace llmk
