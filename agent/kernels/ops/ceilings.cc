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

// The upper quartile of what round(memory, way) gives in about `seconds` seconds, in the one of `ways` ways that is
// the fastest in the middle of three rounds each. Not the best: a virtual machine may be let through at twice its rate
// for a moment.
template <class Round>
double measure_reads(double seconds, int ways, const Round& round) {
  constexpr int64_t kHugePage = 2 << 20;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHugePage, kReadBytes) != 0) std::abort();
  madvise(memory, kReadBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kReadBytes);
  const auto quantile = [](std::vector<double> rates, size_t quarters) {
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() * quarters / 4];
  };
  std::vector<std::vector<double>> tried(static_cast<size_t>(ways));
  for (int i = 0; i < 3 * ways; ++i) {
    tried[static_cast<size_t>(i % ways)].push_back(round(static_cast<const char*>(memory), i % ways));
  }
  int best = 0;
  for (int way = 1; way < ways; ++way) {
    if (quantile(tried[static_cast<size_t>(way)], 2) > quantile(tried[static_cast<size_t>(best)], 2)) best = way;
  }
  std::vector<double> rates;
  const auto start = std::chrono::steady_clock::now();
  do {
    rates.push_back(round(static_cast<const char*>(memory), best));
  } while (seconds_since(start) < seconds);
  std::free(memory);
  return quantile(rates, 3);
}

// Once over `bytes`, by all threads, each its share.
double read_once(const void* data, int64_t bytes, int way) {
  const int64_t share = bytes / num_threads() / 1024 * 1024;
  const char* from = static_cast<const char*>(data);
  const auto read = kernels().ceilings.read[way];
  return timed_reads(share * num_threads(),
                     [&](int64_t thread) { return read(from + thread * share, share, nullptr); });
}

}  // namespace

double measure_fma(double seconds) { return measure_loop(kernels().ceilings.fma, seconds); }

double measure_dot_bf16(double seconds) { return measure_loop(kernels().ceilings.dot_bf16, seconds); }

double measure_dot_int8(double seconds) { return measure_loop(kernels().ceilings.dot_int8, seconds); }

double measure_read(const void* data, int64_t bytes) { return read_once(data, bytes, 0); }

double measure_read_bandwidth(double seconds) {
  return measure_reads(seconds, kReadLoops,
                       [](const char* memory, int way) { return read_once(memory, kReadBytes, way); });
}

double measure_paged_read_bandwidth(double seconds) {
  constexpr int64_t kPiece = 12 << 10, kPieces = kReadBytes / kPiece;
  std::vector<int64_t> order(kPieces);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  return measure_reads(seconds, 2 * kReadLoops, [&](const char* memory, int way) {
    const auto read = kernels().ceilings.read[way % kReadLoops];
    const bool fetches = way >= kReadLoops;
    const auto piece = [&](int64_t i) { return memory + order[static_cast<size_t>(i)] * kPiece; };
    return timed_reads(kPieces * kPiece, [&](int64_t thread) {
      const int64_t step = num_threads();
      int32_t sum = 0;
      for (int64_t i = thread; i < kPieces; i += step) {
        sum += read(piece(i), kPiece, fetches && i + step < kPieces ? piece(i + step) : nullptr);
      }
      return sum;
    });
  });
}

}  // namespace llmk
