// C entries of the exchange between agents for ctypes (agent/group/exchange.py, agent/kernels/collectives.py).
#include <chrono>

#include "common/check.h"
#include "common/floating_point.h"
#include "exchange/collectives.h"
#include "exchange/lines.h"
#include "exchange/sum.h"

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

#define LLMK_ENTRY __attribute__((visibility("default")))

extern "C" {

LLMK_ENTRY int llmk_exchange_open(const llmk::ExchangeArgs* args) { return llmk::open_exchange(*args); }

LLMK_ENTRY void llmk_line_publish(void* line, uint32_t value) {
  llmk::publish(static_cast<llmk::FlagLine*>(line), value);
}

LLMK_ENTRY int llmk_line_wait(const char* what, void* line, uint32_t target, void* down, int64_t timeout_ms) {
  return llmk::wait_for(what, static_cast<llmk::FlagLine*>(line), target, static_cast<std::atomic<uint32_t>*>(down),
                        timeout_ms);
}

LLMK_ENTRY void llmk_exchange_times(llmk::ExchangeTimes* out) { *out = llmk::exchange_times(); }

LLMK_ENTRY int llmk_all_reduce(int dtype, const void* in, void* out, int64_t count) {
  const llmk::StandardFloatingPoint scope;
  const auto type = static_cast<llmk::DType>(dtype);
  return llmk::all_reduce("AllReduce", type, in, type, out, count);
}

LLMK_ENTRY int llmk_all_gather(const void* in, void* out, int64_t bytes) {
  return llmk::all_gather("AllGather", in, out, bytes);
}

LLMK_ENTRY int llmk_gather_rows_to_first(const llmk::GatherRowsArgs* args) {
  return llmk::gather_rows_to_first("GatherRows", *args);
}

// Nanoseconds of each of `times` sums of `count` elements, for performance/bench_collectives.py.
LLMK_ENTRY int llmk_measure_all_reduce(int dtype, const void* in, void* out, int64_t count, int64_t times,
                                       int64_t* nanoseconds) {
  const llmk::StandardFloatingPoint scope;
  const auto type = static_cast<llmk::DType>(dtype);
  for (int64_t i = 0; i < times; ++i) {
    const int64_t start = now_ns();
    const int error = llmk::all_reduce("AllReduce", type, in, type, out, count);
    if (error != 0) return error;
    nanoseconds[i] = now_ns() - start;
  }
  return 0;
}

// The ceiling of that: nanoseconds of each of `times` turns of a ball between two processes, there and back, no more
// being handed over than the two counters, nobody sleeping. The lines hold 0 at the start; `serves`: this process
// begins.
LLMK_ENTRY void llmk_measure_ping_pong(void* own, void* other, int serves, int64_t times, int64_t* nanoseconds) {
  auto* mine = static_cast<llmk::FlagLine*>(own);
  auto* theirs = static_cast<llmk::FlagLine*>(other);
  for (int64_t i = 0; i < times; ++i) {
    const int64_t start = now_ns();
    const auto turn = static_cast<uint32_t>(i + 1);
    if (serves != 0) llmk::publish(mine, turn);
    while (!llmk::has_reached(*theirs, turn)) {
    }
    if (serves == 0) llmk::publish(mine, turn);
    nanoseconds[i] = now_ns() - start;
  }
}

LLMK_ENTRY void llmk_test_sum_parts(int dtype, const void* const* parts, int num_parts, int out_dtype, void* out,
                                    int64_t count, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  const auto in = static_cast<llmk::DType>(dtype), to = static_cast<llmk::DType>(out_dtype);
  use_reference != 0 ? llmk::reference::sum_parts(in, parts, num_parts, to, out, count)
                     : llmk::sum_parts(in, parts, num_parts, to, out, count);
}

}  // extern "C"
