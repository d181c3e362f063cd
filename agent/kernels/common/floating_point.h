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

}  // namespace llmk
