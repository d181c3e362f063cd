#include "ceilings.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "../common/floating_point.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best rate of one round: a round that another process disturbed says nothing about the machine.
double measure_loop(int64_t (*loop)(int64_t), double seconds) {
  constexpr int64_t kSteps = 200000;  // about a millisecond
  const StandardFloatingPoint scope;
  const double operations = static_cast<double>(loop(1)) * kSteps * num_threads() * 1e-9;
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  do {
    const auto round = std::chrono::steady_clock::now();
    parallel_for(num_threads(), [&](int64_t) { loop(kSteps); });
    const double rate = operations / seconds_since(round);
    best = rate > best ? rate : best;
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace

double measure_fma(double seconds) { return measure_loop(kernels().ceilings.fma, seconds); }

double measure_dot_bf16(double seconds) { return measure_loop(kernels().ceilings.dot_bf16, seconds); }

double measure_dot_int8(double seconds) { return measure_loop(kernels().ceilings.dot_int8, seconds); }

double measure_read(const void* data, int64_t bytes) {
  const int64_t pieces = num_threads(), piece = bytes / pieces / 1024 * 1024;
  const char* from = static_cast<const char*>(data);
  int32_t total = 0;
  const auto start = std::chrono::steady_clock::now();
  parallel_for(pieces, [&](int64_t i) {
    __atomic_fetch_add(&total, kernels().ceilings.read(from + i * piece, piece), __ATOMIC_RELAXED);
  });
  const double rate = static_cast<double>(piece * pieces) / seconds_since(start) * 1e-9;
  volatile int32_t sink = total;
  static_cast<void>(sink);
  return rate;
}

double measure_read_bandwidth(double seconds) {
  constexpr int64_t kBytes = 256 << 20, kHugePage = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, kBytes) != 0) std::abort();
  madvise(memory, kBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kBytes);
  std::vector<double> rates;
  const auto start = std::chrono::steady_clock::now();
  do {
    rates.push_back(measure_read(memory, kBytes));
  } while (seconds_since(start) < seconds);
  std::free(memory);
  // Not the best: a virtual machine may be let through at twice its rate for a moment.
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() * 3 / 4];
}

}  // namespace llmk
