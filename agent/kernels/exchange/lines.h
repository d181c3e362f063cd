// Flag lines of an exchange (llm_serving/ipc/exchange.py): a counter that one process raises and others wait for.
#pragma once
#include <atomic>
#include <cstdint>

namespace llmk {

// A cache line in memory that processes share. The counter wraps around; what is waited for is at most 2^31 ahead.
struct alignas(64) FlagLine {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(FlagLine) == 64, "a flag has a cache line to itself");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share no locks");

constexpr int kGroupDown = 3;  // beside the codes of common/check.h

static inline bool has_reached(const FlagLine& line, uint32_t target) {
  return static_cast<int32_t>(line.value.load(std::memory_order_acquire) - target) >= 0;
}

// Sets the counter and wakes who sleeps. What was written before is seen by whoever has waited for it.
void publish(FlagLine* line, uint32_t value);

// Returns 0 once the counter has reached `target`. Spins for a few microseconds, then sleeps in the kernel: an agent
// that waits takes no processor from the one it waits for. kGroupDown when `down` is set meanwhile, or after
// `timeout_ms`, which sets it: then nobody waits for this process either. One line on standard error says which.
int wait_for(const char* op, FlagLine* line, uint32_t target, std::atomic<uint32_t>* down, int64_t timeout_ms);

}  // namespace llmk
