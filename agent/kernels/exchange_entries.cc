// C entries of the exchange between agents for ctypes (agent/exchange.py, agent/kernels/collectives.py).
#include "common/check.h"
#include "common/floating_point.h"
#include "exchange/collectives.h"
#include "exchange/lines.h"
#include "exchange/sum.h"

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
  return llmk::all_reduce("AllReduce", static_cast<llmk::DType>(dtype), in, out, count);
}

LLMK_ENTRY int llmk_all_gather(const void* in, void* out, int64_t bytes) {
  return llmk::all_gather("AllGather", in, out, bytes);
}

LLMK_ENTRY int llmk_gather_rows_to_first(const llmk::GatherRowsArgs* args) {
  return llmk::gather_rows_to_first("GatherRows", *args);
}

LLMK_ENTRY void llmk_test_sum_parts(int dtype, const void* const* parts, int num_parts, void* out, int64_t count,
                                    int use_reference) {
  const llmk::StandardFloatingPoint scope;
  const auto type = static_cast<llmk::DType>(dtype);
  use_reference != 0 ? llmk::reference::sum_parts(type, parts, num_parts, out, count)
                     : llmk::sum_parts(type, parts, num_parts, out, count);
}

}  // extern "C"
