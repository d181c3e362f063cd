// The floating-point mode every kernel runs in: round to nearest even, subnormals kept. A process that some other
// library switched to flush-to-zero would otherwise get results that depend on which thread did the work.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace llmk {

class StandardFloatingPoint {
 public:
#if defined(__x86_64__)
  StandardFloatingPoint() : saved_(_mm_getcsr()) {
    if ((saved_ & kModeBits) != 0) _mm_setcsr(saved_ & ~kModeBits);
  }
  ~StandardFloatingPoint() {
    if ((saved_ & kModeBits) != 0) _mm_setcsr(saved_);
  }

 private:
  static constexpr uint32_t kModeBits = 0xE040;  // rounding control, flush to zero, denormals are zero
  uint32_t saved_;
#else
  StandardFloatingPoint() {}
#endif
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;
};

#if defined(__x86_64__)
// As products of bfloat16 tiles are: denormal numbers are taken for zeros, and become zeros. The compiler does not know
// of the mode: what is to run in it goes to a function that is not inlined.
class FlushedFloatingPoint {
 public:
  FlushedFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlush); }
  ~FlushedFloatingPoint() { _mm_setcsr(saved_); }

 private:
  static constexpr uint32_t kFlush = 0x8040;
  uint32_t saved_;
  FlushedFloatingPoint(const FlushedFloatingPoint&) = delete;
  FlushedFloatingPoint& operator=(const FlushedFloatingPoint&) = delete;
};
#endif

}  // namespace llmk
