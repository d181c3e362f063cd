// performance/ceilings: what this machine can do at most, as JSON on standard output.
//
//   performance/ceilings [seconds a measurement, default 0.4]
//
// Reads GB/s, rates in 10^9 operations a second, for one thread and for every processor. LLM_KERNELS_ISA picks the
// instruction set, as for the kernels.
#include <cstdio>
#include <cstdlib>

#include "common/kernel_table.h"
#include "common/thread_pool.h"

namespace {

void print_row(int threads, double seconds, bool last) {
  llmk::set_num_threads(threads);
  const double read = llmk::measure_read_bandwidth(seconds), paged = llmk::measure_paged_read_bandwidth(seconds);
  const double fp32 = llmk::measure_fma(seconds), bf16 = llmk::measure_dot_bf16(seconds);
  const double int8 = llmk::measure_dot_int8(seconds);
  std::printf("  {\"threads\": %d, \"read_gb_s\": %.2f, \"paged_read_gb_s\": %.2f, \"fp32_gflops\": %.1f, "
              "\"bf16_gflops\": %.1f, \"int8_gops\": %.1f}%s\n",
              threads, read, paged, fp32, bf16, int8, last ? "" : ",");
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0.4;
  if (seconds <= 0 || argc > 2) {
    std::fprintf(stderr, "usage: %s [seconds a measurement, more than 0]\n", argv[0]);
    return 2;
  }
  llmk::set_num_threads(0);
  const int processors = llmk::num_threads();
  std::printf("{\"isa\": \"%s\", \"ceilings\": [\n", llmk::kernels().isa);
  print_row(1, seconds, processors == 1);
  if (processors > 1) print_row(processors, seconds, true);
  std::printf("]}\n");
  return 0;
}
