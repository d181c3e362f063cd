#include "ceilings.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <random>
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

// GB/s at which the threads together read `bytes`: read(thread) returns the sum of what it has read.
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

constexpr int64_t kReadBytes = 256 << 20;

// The upper quartile of what round(memory) gives in about `seconds` seconds. Not the best: a virtual machine may be let
// through at twice its rate for a moment.
template <class Round>
double measure_reads(double seconds, const Round& round) {
  constexpr int64_t kHugePage = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, kReadBytes) != 0) std::abort();
  madvise(memory, kReadBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kReadBytes);
  std::vector<double> rates;
  const auto start = std::chrono::steady_clock::now();
  do {
    rates.push_back(round(static_cast<const char*>(memory)));
  } while (seconds_since(start) < seconds);
  std::free(memory);
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() * 3 / 4];
}

}  // namespace

double measure_fma(double seconds) { return measure_loop(kernels().ceilings.fma, seconds); }

double measure_dot_bf16(double seconds) { return measure_loop(kernels().ceilings.dot_bf16, seconds); }

double measure_dot_int8(double seconds) { return measure_loop(kernels().ceilings.dot_int8, seconds); }

double measure_read(const void* data, int64_t bytes) {
  const int64_t piece = bytes / num_threads() / 1024 * 1024;
  const char* from = static_cast<const char*>(data);
  return timed_reads(piece * num_threads(),
                     [&](int64_t thread) { return kernels().ceilings.read(from + thread * piece, piece); });
}

double measure_read_bandwidth(double seconds) {
  return measure_reads(seconds, [](const char* memory) { return measure_read(memory, kReadBytes); });
}

double measure_paged_read_bandwidth(double seconds) {
  constexpr int64_t kPiece = 12 << 10, kPieces = kReadBytes / kPiece;
  std::vector<int64_t> order(kPieces);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  return measure_reads(seconds, [&](const char* memory) {
    return timed_reads(kPieces * kPiece, [&](int64_t thread) {
      int32_t sum = 0;
      for (int64_t i = thread; i < kPieces; i += num_threads()) {
        sum += kernels().ceilings.read(memory + order[static_cast<size_t>(i)] * kPiece, kPiece);
      }
      return sum;
    });
  });
}

}  // namespace llmk
