#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "alone.h"
#include "floating_point.h"
#include "pause_cpu.h"

namespace llmk {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(20);
// How long idle threads spin while a step runs (set_attentive()).
constexpr auto kAttentiveTime = std::chrono::microseconds(200);
constexpr int kMaxThreads = 256;

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

std::atomic<bool> spinning{true};
std::atomic<bool> alone{false};

// Calls `done` in a loop until it returns true, for at most kSpinTime, or kAttentiveTime while `attentive` is set. If
// spinning is not allowed, calls it only once. Returns the last result of `done`.
template <class Condition>
bool spin_until(const Condition& done, const std::atomic<bool>& attentive) {
  if (!may_spin()) return done();
  const auto start = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration spent;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause_cpu();
    }
    spent = std::chrono::steady_clock::now() - start;
  } while (spent < kSpinTime || (attentive.load(std::memory_order_relaxed) && spent < kAttentiveTime));
  return false;
}

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

int clamp_threads(int wanted) {
  if (wanted <= 0) wanted = available_processors();
  return wanted < 1 ? 1 : wanted > kMaxThreads ? kMaxThreads : wanted;
}

bool runs_alone() { return alone.load(std::memory_order_relaxed); }

// True while this thread runs a task. If a task starts another parallel loop, this thread runs the whole loop alone.
thread_local bool inside_task = false;

// A pool of threads, which runs one parallel loop at a time. A parallel loop calls a function for each index of a
// range.
//
// `state_` has three parts: epoch << 17 | open << 16 | workers. `epoch` is the number of loops that have begun, and
// `workers` is the number of workers that run the current loop. A worker may join a loop only while `open` is 1. So the
// caller does not wait for workers that wake after the loop has closed, and these workers cannot enter a finished loop.
class ThreadPool {
 public:
  ThreadPool() {
    const char* text = std::getenv("LLM_KERNELS_THREADS");
    num_threads_ = clamp_threads(text == nullptr ? 0 : std::atoi(text));
  }

  int num_threads() const { return num_threads_; }

  void resize(int wanted) {
    std::lock_guard<std::mutex> lock(caller_);
    stop_workers();
    num_threads_ = clamp_threads(wanted);
  }

  void set_attentive(bool attentive) { attentive_.store(attentive, std::memory_order_relaxed); }

  void run(int64_t count, TaskFunction function, void* context) {
    const StandardFloatingPoint scope;
    std::unique_lock<std::mutex> lock(caller_, std::defer_lock);
    if (inside_task || runs_alone() || num_threads_ == 1 || count <= 1 || !lock.try_lock()) {
      for (int64_t i = 0; i < count; ++i) function(context, i);
      return;
    }
    start_workers();
    function_ = function;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    state_.store((++epoch_ << 17) | kOpen, std::memory_order_seq_cst);
    wake_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(&wake_, INT_MAX);
    take_tasks();
    wait_for_workers();
  }

 private:
  static constexpr uint64_t kOpen = 1u << 16;
  static constexpr uint64_t kInside = kOpen - 1;

  void take_tasks() {
    inside_task = true;
    for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) function_(context_, index);
    inside_task = false;
  }

  void wait_for_workers() {
    const auto idle = [this] { return (state_.load(std::memory_order_acquire) & kInside) == 0; };
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    while (!idle() && !spin_until(idle, attentive_)) {
      const uint32_t seen = finished_.load(std::memory_order_seq_cst);
      waiting_.store(true, std::memory_order_seq_cst);
      if (!idle()) futex_wait(&finished_, seen);
      waiting_.store(false, std::memory_order_relaxed);
    }
  }

  void worker_loop() {
    const StandardFloatingPoint scope;
    uint64_t last_epoch = 0;
    for (;;) {
      const uint32_t seen = wake_.load(std::memory_order_seq_cst);
      uint64_t state = state_.load(std::memory_order_acquire);
      if (stopping_.load(std::memory_order_acquire)) return;
      if ((state & kOpen) != 0 && state >> 17 != last_epoch) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        last_epoch = state >> 17;
        take_tasks();
        leave_job();
        continue;
      }
      sleep_until_woken(seen);
    }
  }

  void leave_job() {
    const uint64_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kInside) == 1 && (before & kOpen) == 0) {
      finished_.fetch_add(1, std::memory_order_seq_cst);
      if (waiting_.load(std::memory_order_seq_cst)) futex_wake(&finished_, 1);
    }
  }

  void sleep_until_woken(uint32_t seen) {
    const auto woken = [this, seen] { return wake_.load(std::memory_order_acquire) != seen; };
    if (spin_until(woken, attentive_)) return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!woken()) futex_wait(&wake_, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void start_workers() {
    while (static_cast<int>(workers_.size()) < num_threads_ - 1) workers_.emplace_back([this] { worker_loop(); });
  }

  void stop_workers() {
    stopping_.store(true, std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(&wake_, INT_MAX);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_release);
  }

  std::mutex caller_;
  std::vector<std::thread> workers_;
  int num_threads_ = 1;
  uint64_t epoch_ = 0;
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
  std::atomic<bool> waiting_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> attentive_{false};
};

// The pool is never destroyed. When the process exits, its sleeping workers end with it.
ThreadPool& pool() {
  static ThreadPool* instance = new ThreadPool;
  return *instance;
}

// The indices that one thread still has to process: a range, stored as begin << 32 | end. The thread takes indices from
// the front. Other threads that have finished their own range take indices from the back.
class alignas(64) Stretch {
 public:
  void set(int64_t begin, int64_t end) {
    left_.store(static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end), std::memory_order_relaxed);
  }
  // Removes an index from the range and returns it: the first index if `front`, otherwise the last. Returns -1 if the
  // range is empty.
  int64_t take(bool front) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = left >> 32, end = left & 0xFFFFFFFFu;
      if (begin >= end) return -1;
      const uint64_t rest = front ? left + (uint64_t{1} << 32) : left - 1;
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
        return static_cast<int64_t>(front ? begin : end - 1);
      }
    }
  }

 private:
  std::atomic<uint64_t> left_;  // undefined until set() is called
};

// The bytes of scratch memory of all threads. Element 1 is the size of the buffers kScratchLayer and kScratchExperts,
// element 0 the size of all other buffers.
std::atomic<int64_t> scratch_total[2];

std::atomic<int64_t>& total_of(int slot) { return scratch_total[slot == kScratchLayer || slot == kScratchExperts]; }

struct Scratch {
  void* data[kScratchSlots] = {};
  int64_t bytes[kScratchSlots] = {};

  void hold(int slot, void* pointer, int64_t size) {
    std::free(data[slot]);
    total_of(slot).fetch_add(size - bytes[slot], std::memory_order_relaxed);
    data[slot] = pointer;
    bytes[slot] = size;
  }
  ~Scratch() {
    for (int slot = 0; slot < kScratchSlots; ++slot) hold(slot, nullptr, 0);
  }
};

}  // namespace

void run_parallel(int64_t count, TaskFunction function, void* context) { pool().run(count, function, context); }

int64_t threads_of_loop() { return inside_task || runs_alone() ? 1 : num_threads(); }

void run_stretches(int64_t count, TaskFunction function, void* context) {
  const int64_t most = threads_of_loop(), threads = count < most ? count : most;
  if (threads <= 1) return run_parallel(count, function, context);
  Stretch stretches[kMaxThreads];
  for (int64_t i = 0; i < threads; ++i) stretches[i].set(count * i / threads, count * (i + 1) / threads);
  parallel_for(threads, [&](int64_t own) {
    for (int64_t i = 0; i < threads; ++i) {
      Stretch& stretch = stretches[(own + i) % threads];
      for (int64_t task; (task = stretch.take(i == 0)) >= 0;) function(context, task);
    }
  });
}

void set_num_threads(int num_threads) { pool().resize(num_threads); }

int num_threads() { return pool().num_threads(); }

void set_attentive(bool attentive) { pool().set_attentive(attentive); }

void set_spinning(bool allowed) { spinning.store(allowed, std::memory_order_relaxed); }

bool may_spin() { return spinning.load(std::memory_order_relaxed); }

void set_alone(bool is_alone) { alone.store(is_alone, std::memory_order_relaxed); }

void* thread_scratch(int slot, int64_t bytes) {
  thread_local Scratch scratch;
  if (bytes > scratch.bytes[slot]) {
    scratch.hold(slot, nullptr, 0);
    const int64_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    void* memory = std::aligned_alloc(4096, static_cast<size_t>(rounded));
    if (memory == nullptr) std::abort();
    scratch.hold(slot, memory, rounded);
  }
  return scratch.data[slot];
}

int64_t scratch_bytes(bool between_operators) {
  return scratch_total[between_operators].load(std::memory_order_relaxed);
}

void count_scratch(int64_t bytes) { scratch_total[0].fetch_add(bytes, std::memory_order_relaxed); }

}  // namespace llmk
