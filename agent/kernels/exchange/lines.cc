// Waits for flag lines (lines.h). A waiting thread spins for a short time. Then it sleeps until another process wakes
// it with the system call futex.
#include "lines.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "../common/check.h"
#include "../common/pause_cpu.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpinTime = std::chrono::microseconds(50);
// How long a waiting process sleeps, in nanoseconds, before it checks again whether the group is down.
constexpr long kSleepNanoseconds = 20'000'000;

// Sleeps until publish() wakes this word or the timeout expires. Does not sleep if `*word` is no longer `expected`. The
// futex call does not use FUTEX_PRIVATE_FLAG, because several processes share the word.
void sleep_on(std::atomic<uint32_t>* word, uint32_t expected) {
  const timespec timeout{0, kSleepNanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool spin(const FlagLine& line, uint32_t target) {
  const auto deadline = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (has_reached(line, target)) return true;
      pause_cpu();
    }
  } while (Clock::now() < deadline);
  return false;
}

}  // namespace

void publish(FlagLine* line, uint32_t value, uint32_t num_bytes, FlagLine* bell) {
  line->num_bytes[value % 2] = num_bytes;
  line->value.store(value, std::memory_order_seq_cst);
  if (line->sleepers.load(std::memory_order_seq_cst) > 0) wake_all(&line->value);
  if (bell != nullptr) {
    bell->value.fetch_add(1, std::memory_order_seq_cst);
    wake_all(&bell->value);
  }
}

int wait_for(const char* op, FlagLine* line, uint32_t target, std::atomic<uint32_t>* down, int64_t timeout_ms) {
  if (has_reached(*line, target) || (may_spin() && spin(*line, target))) return 0;
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    line->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line->value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - target) < 0) sleep_on(&line->value, seen);
    line->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (has_reached(*line, target)) return 0;
    if (down->load(std::memory_order_acquire) != 0) {
      refuse_text(op, "another agent of this group has ended");
      return kGroupDown;
    }
    if (Clock::now() >= deadline) {
      down->store(1, std::memory_order_release);
      refuse_text(op, "another agent of this group did not arrive within %lld ms", static_cast<long long>(timeout_ms));
      return kGroupDown;
    }
  }
}

}  // namespace llmk
