// The floating-point mode of a thread while it runs a kernel: round to nearest even, keep subnormals.
//
// Another library may have switched some threads of the process to flush-to-zero. Without a fixed mode, a result would
// depend on the thread that computed it.
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
  static constexpr uint32_t kModeBits = 0xE040;  // mode bits: rounding control, flush to zero, denormals are zero
  uint32_t saved_;
#else
  StandardFloatingPoint() {}
#endif
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;
};

#if defined(__x86_64__)
// While an object of this class exists, its thread treats subnormal inputs and results as zeros, as AMX does in
// products of bfloat16. The compiler does not know about this mode and could move code out of its scope. So code that
// needs the mode must be in a function that is not inlined.
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
