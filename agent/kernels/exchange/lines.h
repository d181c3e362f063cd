// Flag lines of an exchange (llm_serving/ipc/exchange.py). A flag line is a counter that one process raises and others
// wait for.
#pragma once
#include <atomic>
#include <cstdint>

namespace llmk {

// One cache line in shared memory. The counter wraps around; a process may wait for a value at most 2^31 ahead.
struct alignas(64) FlagLine {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(FlagLine) == 64, "a flag has a cache line to itself");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share no locks");

constexpr int kGroupDown = 3;  // an error code that common/check.h does not have

static inline bool has_reached(const FlagLine& line, uint32_t target) {
  return static_cast<int32_t>(line.value.load(std::memory_order_acquire) - target) >= 0;
}

// Sets the counter and wakes the waiting processes. They then see everything that was written before.
void publish(FlagLine* line, uint32_t value);

// Waits until the counter has reached `target` and returns 0. Spins for a few microseconds, then sleeps, so that it
// takes no processor from the agent that it waits for. Returns kGroupDown if `down` gets set, or after `timeout_ms`;
// then it sets `down` itself, so that the others do not wait for this process. One line on standard error names the
// reason.
int wait_for(const char* op, FlagLine* line, uint32_t target, std::atomic<uint32_t>* down, int64_t timeout_ms);

}  // namespace llmk
