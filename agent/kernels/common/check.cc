#include "check.h"

#include <cstdarg>
#include <cstdio>

namespace llmk {

int refuse(const char* op, const char* argument, int64_t index, double value, const char* allowed) {
  std::fprintf(stderr, "llm_kernels: %s: %s[%lld] is %g; it must be %s\n", op, argument,
               static_cast<long long>(index), value, allowed);
  return kBadArgument;
}

int refuse_index(const char* op, const char* argument, int64_t index, int64_t value, int64_t limit) {
  std::fprintf(stderr, "llm_kernels: %s: %s[%lld] is %lld; it must be from 0 to %lld\n", op, argument,
               static_cast<long long>(index), static_cast<long long>(value), static_cast<long long>(limit - 1));
  return kBadIndex;
}

int refuse_text(const char* op, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "llm_kernels: %s: %s\n", op, text);
  return kBadArgument;
}

}  // namespace llmk
