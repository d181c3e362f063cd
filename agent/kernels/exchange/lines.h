// Flag lines of an exchange (llm_serving/ipc/exchange.py). A flag line is a counter that one process raises and other
// processes wait for.
#pragma once
#include <atomic>
#include <cstdint>

namespace llmk {

// A counter in shared memory that has a cache line to itself. The counter may wrap around. So a process may wait only
// for a value that is at most 2^31 above the current value.
struct alignas(64) FlagLine {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  uint32_t num_bytes[2];  // sizes of the last two pieces of data that the counter announced; index: value % 2
};
static_assert(sizeof(FlagLine) == 64, "a flag has a cache line to itself");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share no locks");

constexpr int kGroupDown = 3;  // error code: the group is down. common/check.h defines the codes below 3.

static inline bool has_reached(const FlagLine& line, uint32_t target) {
  return static_cast<int32_t>(line.value.load(std::memory_order_acquire) - target) >= 0;
}

// Sets the counter and wakes the waiting processes. They then see everything that this process wrote before the call.
// `num_bytes` is the size of the data that the counter announces. If the agents of the group are on several machines,
// `bell` is the line that wakes the process that copies the data to other machines. Otherwise `bell` is null.
void publish(FlagLine* line, uint32_t value, uint32_t num_bytes, FlagLine* bell);

// Waits until the counter has reached `target` and returns 0. Tests the counter in a loop for 50 us, then sleeps, so
// that the other agents can use the processor. Returns kGroupDown if another process sets `down`, or after
// `timeout_ms`. A timeout also sets `down`, so that other agents do not wait for this process. One line on standard
// error names the reason.
int wait_for(const char* op, FlagLine* line, uint32_t target, std::atomic<uint32_t>* down, int64_t timeout_ms);

}  // namespace llmk
