// The inputs of a launch that are not tensors: numbers and lists. This file records them, so that a replay can read
// them.
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

// The arguments of a launch that are numbers or lists. While the launch is recorded, this class reads them from
// MindSpore's object and stores copies. A replay reads the copies, because MindSpore's object may no longer exist then,
// or may describe another call. The copies stay valid, because these arguments are constants of the graph.
class ScalarInputs : public KernelInputInfo {
 public:
  explicit ScalarInputs(KernelInputInfo* source) : source_(source), inputs_(source->GetInputSize()) {
    for (size_t i = 0; i < inputs_; ++i) scalars_.push_back(source->IsScalarInput(i));
  }
  // This constructor is for an operator whose `inputs` inputs are all tensors.
  explicit ScalarInputs(size_t inputs) : source_(nullptr), inputs_(inputs), scalars_(inputs, false) {}
  void close() { source_ = nullptr; }
  // Finds the lists that MindSpore has read from an input of the graph. The contents of an input can change, so a
  // replay reads these lists from the input itself and not from a copy.
  void find_lists(const std::vector<Range>& staying) {
    for (Scalar& scalar : known_) {
      const size_t bytes = scalar.list.size() * sizeof(int64_t);
      for (const Range& range : staying) {
        if (bytes == 0 || range.start + bytes != range.end) continue;
        if (std::memcmp(range.start, scalar.list.data(), bytes) == 0) scalar.place = range.start;
      }
    }
  }
  bool operator==(const ScalarInputs& other) const { return scalars_ == other.scalars_ && known_ == other.known_; }
  int64_t held() const { return static_cast<int64_t>(sizeof(ScalarInputs) + known_.capacity() * sizeof(Scalar)); }

  bool IsScalarInput(size_t idx) override { return idx < inputs_ && scalars_[idx]; }
  size_t GetInputSize() override { return inputs_; }
  bool GetBoolInput(size_t idx) override {
    return of('b', idx, [&](Scalar* a) { a->integer = source_->GetBoolInput(idx); }).integer != 0;
  }
  int64_t GetIntInput(size_t idx) override {
    return of('i', idx, [&](Scalar* a) { a->integer = source_->GetIntInput(idx); }).integer;
  }
  double GetFloatInput(size_t idx) override {
    return of('f', idx, [&](Scalar* a) { a->real = source_->GetFloatInput(idx); }).real;
  }
  std::vector<int64_t> GetIntVecInput(size_t idx) override {
    const Scalar& scalar = of('v', idx, [&](Scalar* a) { a->list = source_->GetIntVecInput(idx); });
    std::vector<int64_t> list = scalar.list;
    if (scalar.place != nullptr) std::memcpy(list.data(), scalar.place, list.size() * sizeof(int64_t));
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
  struct Scalar {
    char kind;
    size_t index;
    int64_t integer = 0;
    double real = 0;
    std::vector<int64_t> list;
    const char* place = nullptr;  // the memory of the list; null: the list is a constant

    bool operator==(const Scalar& other) const {
      return kind == other.kind && index == other.index && integer == other.integer && real == other.real &&
             place == other.place && list.size() == other.list.size() && (place != nullptr || list == other.list);
    }
  };

  template <class Read>
  const Scalar& of(char kind, size_t index, const Read& read) {
    for (const Scalar& scalar : known_) {
      if (scalar.kind == kind && scalar.index == index) return scalar;
    }
    if (source_ == nullptr) unknown<int>();
    known_.push_back({kind, index, 0, 0, {}, nullptr});
    read(&known_.back());
    return known_.back();
  }

  // Throws an exception for an input that was not recorded. Either the primitive did not read the input while the
  // launch was recorded, or no kernel of this library uses inputs of this type.
  template <class T>
  static T unknown() {
    throw std::logic_error("a primitive reads an input that was not recorded");
  }

  KernelInputInfo* source_;
  size_t inputs_;
  std::vector<bool> scalars_;
  std::vector<Scalar> known_;
};

}  // namespace llmk
