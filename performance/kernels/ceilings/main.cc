// performance/ceilings: measures the maximum rates of this machine, and prints them as JSON on standard output.
//
//   performance/ceilings [seconds [threads]]
//
// Each figure is the best of 5 attempts, each of which takes `seconds` (default 0.1). Read bandwidth is in 10^9
// bytes/s. Rates are in 10^9 operations/s; a multiply-add is two operations. Without `threads`, the output has a row
// for 1 thread and a row for as many threads as processors. LLM_KERNELS_ISA picks the instruction set, as for the
// kernels.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "../../../agent/kernels/common/floating_point.h"
#include "../../../agent/kernels/common/kernel_table.h"
#include "../../../agent/kernels/common/thread_pool.h"
#include "loops.h"

namespace llmk {

// tools/kernel_build.py defines LLMK_INSTRUCTION_SETS(X), a list of X(isa, parts) for each instruction set that was
// compiled.
#define LLMK_DECLARE_LOOPS(isa, ...) namespace isa { extern const CeilingLoops kCeilingLoops; }
LLMK_INSTRUCTION_SETS(LLMK_DECLARE_LOOPS)

namespace {

struct NamedLoops {
  const char* isa;
  const CeilingLoops* loops;
};

#define LLMK_NAMED_LOOPS(isa, ...) {#isa, &isa::kCeilingLoops},
const NamedLoops kCompiled[] = {LLMK_INSTRUCTION_SETS(LLMK_NAMED_LOOPS)};

const CeilingLoops& ceiling_loops() {
  for (const NamedLoops& each : kCompiled) {
    if (std::strcmp(each.isa, kernels().isa) == 0) return *each.loops;
  }
  std::fprintf(stderr, "ceilings: no loops for %s\n", kernels().isa);
  std::exit(1);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs `loop` in all threads, in short rounds for about `seconds` seconds. Returns the rate of the fastest round, in
// 10^9 operations per second, for all threads together. Other processes can only slow a round down, so the fastest
// round is nearest to the machine's limit.
double measure_rate(int64_t (*loop)(int64_t), double seconds) {
  constexpr int64_t kSteps = 200000;  // number of steps of a round, which takes about a millisecond
  const StandardFloatingPoint scope;
  const double operations = static_cast<double>(loop(1)) * kSteps * num_threads() * 1e-9;
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  do {
    const auto round = std::chrono::steady_clock::now();
    parallel_for(num_threads(), [&](int64_t) { loop(kSteps); });
    best = std::max(best, operations / seconds_since(round));
  } while (seconds_since(start) < seconds);
  return best;
}

// Reads `bytes` bytes with all threads and returns the rate in GB/s. The function read(thread) reads the part of one
// thread and returns the sum of its data.
template <class Read>
double timed_reads(int64_t bytes, const Read& read) {
  int32_t total = 0;
  const auto start = std::chrono::steady_clock::now();
  parallel_for(num_threads(), [&](int64_t thread) { __atomic_fetch_add(&total, read(thread), __ATOMIC_RELAXED); });
  const double rate = static_cast<double>(bytes) / seconds_since(start) * 1e-9;
  volatile int32_t sink = total;
  static_cast<void>(sink);
  return rate;
}

// Megabytes of memory that are read by default.
constexpr int kReadMegabytes = 256;
int64_t read_bytes = int64_t{kReadMegabytes} << 20;

// Returns the read bandwidth of `read_bytes` bytes of memory in GB/s. The memory is in huge pages if the system has
// them. A call of round(memory, method) reads the whole memory once and returns the rate. There are several methods to
// read it, with the numbers 0 to `methods` - 1. First, three rounds run with each method, and the method with the best
// median is chosen. Then rounds with this method run for about `seconds` seconds, and the upper quartile of their rates
// is returned. The best round would be misleading, because a virtual machine may get twice its usual rate for a short
// time.
template <class Round>
double measure_reads(double seconds, int methods, const Round& round) {
  constexpr int64_t kHugePage = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, static_cast<size_t>(read_bytes)) != 0) std::abort();
  madvise(memory, static_cast<size_t>(read_bytes), MADV_HUGEPAGE);
  std::memset(memory, 1, static_cast<size_t>(read_bytes));
  const auto quantile = [](std::vector<double> rates, size_t quarters) {
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() * quarters / 4];
  };
  std::vector<std::vector<double>> tried(static_cast<size_t>(methods));
  for (int i = 0; i < 3 * methods; ++i) {
    tried[static_cast<size_t>(i % methods)].push_back(round(static_cast<const char*>(memory), i % methods));
  }
  int best = 0;
  for (int method = 1; method < methods; ++method) {
    if (quantile(tried[static_cast<size_t>(method)], 2) > quantile(tried[static_cast<size_t>(best)], 2)) best = method;
  }
  std::vector<double> rates;
  const auto start = std::chrono::steady_clock::now();
  do {
    rates.push_back(round(static_cast<const char*>(memory), best));
  } while (seconds_since(start) < seconds);
  std::free(memory);
  return quantile(rates, 3);
}

// Returns the bandwidth in GB/s of reads in the order of the addresses. Each thread reads its own part of the memory.
// The read loops differ in the number of streams: one loop reads a part from start to end. Another divides the part
// into several streams and reads one line of each stream after the other.
double measure_read_bandwidth(double seconds) {
  return measure_reads(seconds, kReadLoops, [](const char* memory, int method) {
    const int64_t part = read_bytes / num_threads() / 1024 * 1024;
    const auto read = ceiling_loops().read[method];
    return timed_reads(part * num_threads(),
                       [&](int64_t thread) { return read(memory + thread * part, part, nullptr); });
  });
}

// Returns the bandwidth in GB/s of reads of 12 KB pieces in random order, as a step reads the blocks of a KV cache. A
// piece has the size of the int8 keys of 16 tokens, with 12 heads of 64 numbers. Half of the methods also prefetch the
// piece that the thread reads next.
double measure_paged_read_bandwidth(double seconds) {
  constexpr int64_t kPiece = 12 << 10;
  const int64_t pieces = read_bytes / kPiece;
  std::vector<int64_t> order(static_cast<size_t>(pieces));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  return measure_reads(seconds, 2 * kReadLoops, [&](const char* memory, int method) {
    const auto read = ceiling_loops().read[method % kReadLoops];
    const bool fetches = method >= kReadLoops;
    const auto piece = [&](int64_t i) { return memory + order[static_cast<size_t>(i)] * kPiece; };
    return timed_reads(pieces * kPiece, [&](int64_t thread) {
      const int64_t step = num_threads();
      int32_t sum = 0;
      for (int64_t i = thread; i < pieces; i += step) {
        sum += read(piece(i), kPiece, fetches && i + step < pieces ? piece(i + step) : nullptr);
      }
      return sum;
    });
  });
}

template <class Measure>
double best_of_attempts(const Measure& measure) {
  constexpr int kAttempts = 5;
  double best = 0;
  for (int i = 0; i < kAttempts; ++i) best = std::max(best, measure());
  return best;
}

void print_row(int threads, double seconds, bool last) {
  set_num_threads(threads);
  const CeilingLoops& loops = ceiling_loops();
  const auto rate = [&](int64_t (*loop)(int64_t)) {
    return best_of_attempts([&] { return measure_rate(loop, seconds); });
  };
  const double read = best_of_attempts([&] { return measure_read_bandwidth(seconds); });
  const double paged = best_of_attempts([&] { return measure_paged_read_bandwidth(seconds); });
  std::printf("  {\"threads\": %d, \"read_gb_s\": %.2f, \"paged_read_gb_s\": %.2f, \"fp32_gflops\": %.1f, "
              "\"bf16_gflops\": %.1f, \"int8_gops\": %.1f}%s\n",
              num_threads(), read, paged, rate(loops.fma), rate(loops.dot_bf16), rate(loops.dot_int8),
              last ? "" : ",");
}

}  // namespace
}  // namespace llmk

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0.1;
  const int threads = argc > 2 ? std::atoi(argv[2]) : -1;
  const int megabytes = argc > 3 ? std::atoi(argv[3]) : llmk::kReadMegabytes;
  if (seconds <= 0 || megabytes < 1 || argc > 4 || (argc > 2 && threads < 0)) {
    std::fprintf(stderr,
                 "usage: %s [seconds of an attempt, more than 0 [threads, 0 for every processor [MB of memory that is "
                 "read, default 256]]]\n",
                 argv[0]);
    return 2;
  }
  llmk::read_bytes = static_cast<int64_t>(megabytes) << 20;
  std::printf("{\"isa\": \"%s\", \"ceilings\": [\n", llmk::kernels().isa);
  if (threads < 0) llmk::print_row(1, seconds, false);
  llmk::print_row(threads < 0 ? 0 : threads, seconds, true);
  std::printf("]}\n");
  return 0;
}
