// A hint to the processor that a loop waits for another thread or process.
#pragma once

namespace llmk {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace llmk
