// Launches of one run of a graph, and where what they write is at a replay (recording.cc, launches.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "answers.h"
#include "launches.h"

namespace llmk {

// A length of an argument, in a step of T tokens and S sequences: one of the three is not 0.
struct Length {
  int64_t fixed, per_token, per_seq;

  int64_t at(int64_t tokens, int64_t seqs) const { return fixed + per_token * tokens + per_seq * seqs; }
};

struct Launch {
  Primitive primitive;  // null: it is a custom operator
  CustomOp custom_op;
  bool is_shared;  // a collective: the other agents of the stage wait for it
  const char* op;
  std::vector<void*> data;       // where MindSpore had it
  std::vector<int> values;       // which of the recording's it is; -1: it stays where it is
  std::vector<int64_t> offsets;  // in the value
  std::vector<void*> placed;     // where a replay has it
  std::vector<int> ndims;
  std::vector<int64_t> sizes;
  std::vector<Length> lengths;  // what the sizes are made of; empty: they are always the same
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  std::unique_ptr<Answers> answers;
  std::vector<std::unique_ptr<char[]>> constants;
  int inputs;

  Tensors tensors() { return tensors_in(&data); }
  int64_t bytes_of(int argument);
  int run();

 private:
  Tensors tensors_in(std::vector<void*>* where) {
    return {op, static_cast<int>(where->size()), where->data(), ndims.data(), shapes.data(), dtypes.data()};
  }
};

// What a launch writes, until another writes to the same memory of MindSpore's.
struct Value {
  const char* start;  // where MindSpore had it
  const char* end;
  int launch;
  int argument;
  int last;  // launch that reads it
  int room;  // which it shares with values that are not needed at the same time
};

struct Recording {
  std::vector<Launch> launches;
  std::string problem;
  std::vector<Value> values;
  std::vector<int64_t> rooms;  // their places in the library's memory, and the end of the last
  int result = -1;             // a value
  int64_t result_offset = 0;
  int64_t held = 0;        // by the recording itself, about
  char* memory = nullptr;  // that the launches' arguments were last placed in

  int64_t bytes() const { return rooms.empty() ? 0 : rooms.back(); }
};

// Tells what the launches write from what stays where it is, and gives it places. False, and the recording's problem,
// where that cannot be.
bool settle(Recording* recording, const void* result, const std::vector<Range>& staying);

struct StepSizes {
  int64_t tokens, seqs;
};

// Makes of a recording of a step one of any step up to `largest`, by `other`, one of the same graph: what is as long in
// both always is, and what is not must be a multiple of the tokens or of the sequences, whose ratio in both steps must
// not be the same. False, and the recording's problem, where it is neither, or the launches differ in anything else.
bool generalise(Recording* recording, const Recording& other, StepSizes of_this, StepSizes of_other, StepSizes largest);

// Of a recording of any step: the next replays are of this one.
void resize(Recording* recording, StepSizes sizes);

void find_places(Recording* recording, char* memory);
int64_t held_by(const Recording& recording);

}  // namespace llmk
