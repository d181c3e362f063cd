// What a recorded launch asks of MindSpore beside its tensors, remembered.
#pragma once
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"

namespace llmk {

using mindspore::kernel::op_plugin::OpPluginOutputShapeInfo;
using mindspore::kernel::op_plugin::OpPluginTensorStorageInfo;

struct Range {
  const char* start;
  const char* end;
};

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
  // A list that is an input of the graph, which MindSpore has read: a replay reads it where it stays.
  void find_lists(const std::vector<Range>& staying) {
    for (Answer& answer : answers_) {
      const size_t bytes = answer.list.size() * sizeof(int64_t);
      for (const Range& range : staying) {
        if (bytes == 0 || range.start + bytes != range.end) continue;
        if (std::memcmp(range.start, answer.list.data(), bytes) == 0) answer.place = range.start;
      }
    }
  }
  bool operator==(const Answers& other) const { return scalars_ == other.scalars_ && answers_ == other.answers_; }
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
    const Answer& answer = of('v', idx, [&](Answer* a) { a->list = source_->GetIntVecInput(idx); });
    std::vector<int64_t> list = answer.list;
    if (answer.place != nullptr) std::memcpy(list.data(), answer.place, list.size() * sizeof(int64_t));
    return list;
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
    const char* place = nullptr;  // null: the list is a constant

    bool operator==(const Answer& other) const {
      return kind == other.kind && index == other.index && integer == other.integer && real == other.real &&
             place == other.place && list.size() == other.list.size() && (place != nullptr || list == other.list);
    }
  };

  template <class Ask>
  const Answer& of(char kind, size_t index, const Ask& ask) {
    for (const Answer& known : answers_) {
      if (known.kind == kind && known.index == index) return known;
    }
    if (source_ == nullptr) unknown<int>();
    answers_.push_back({kind, index, 0, 0, {}, nullptr});
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

}  // namespace llmk
