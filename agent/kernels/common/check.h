// Functions that report a bad argument. Each function writes one line to standard error: the operator, the argument,
// its value and the limit. The function returns the error code that its caller must return.
#pragma once
#include <cstdint>

namespace llmk {

constexpr int kBadArgument = 1;
constexpr int kBadIndex = 2;

int refuse(const char* op, const char* argument, int64_t index, double value, const char* allowed);
int refuse_index(const char* op, const char* argument, int64_t index, int64_t value, int64_t limit);
int refuse_text(const char* op, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace llmk
