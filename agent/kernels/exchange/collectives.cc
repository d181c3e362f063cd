#include "collectives.h"

#include <chrono>
#include <cstring>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "lines.h"

namespace llmk {
namespace {

constexpr int kBuffers = 2;
constexpr int kMostAgents = 256;
constexpr int64_t kElementBytes = 4;  // bytes of an element in gather_rows_to_first()

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// This agent's access to the shared memory through which the agents of its pipeline stage add and gather arrays. Only
// the thread that runs graphs uses it.
class Stage {
 public:
  int open(const ExchangeArgs& args) {
    if (args.base == nullptr || args.size < 1 || args.size > kMostAgents || args.index < 0 || args.index >= args.size ||
        args.piece_bytes < 64 || args.piece_bytes % 64 != 0) {
      return refuse_text("exchange", "agent %d of %d with pieces of %lld bytes cannot be", args.index, args.size,
                         static_cast<long long>(args.piece_bytes));
    }
    args_ = args;
    sequence_ = line(args.index)->value.load(std::memory_order_acquire);
    is_open_ = true;
    return 0;
  }

  int size() const { return is_open_ ? args_.size : 1; }
  int index() const { return is_open_ ? args_.index : 0; }
  int64_t piece_bytes() const { return args_.piece_bytes; }
  const ExchangeTimes& times() const { return times_; }

  int check_open(const char* op) const {
    return is_open_ ? 0 : refuse_text(op, "this process has no exchange with other agents");
  }

  // Begins the next piece. Waits until all other agents have read the buffer that this agent is about to write, and
  // returns the buffer. Returns null if the group is down.
  void* begin_piece(const char* op) {
    begun_ns_ = now_ns();
    waited_ns_ = 0;
    ++sequence_;
    return wait_all(op, sequence_ - 1) == 0 ? const_cast<void*>(buffer(args_.index)) : nullptr;
  }
  void publish_piece(int64_t num_bytes) {
    auto* bell = args_.bell == 0 ? nullptr : reinterpret_cast<FlagLine*>(static_cast<char*>(args_.base) + args_.bell);
    publish(line(args_.index), sequence_, static_cast<uint32_t>(num_bytes), bell);
  }
  int wait_for_piece(const char* op) { return wait_all(op, sequence_); }
  void end_piece() {
    times_.total_ns += now_ns() - begun_ns_;
    times_.waiting_ns += waited_ns_;
    ++times_.pieces;
  }

  // Returns the buffer that agent r uses for the current piece.
  const void* buffer(int r) const {
    const int64_t number = int64_t{r} * kBuffers + sequence_ % kBuffers;
    return static_cast<char*>(args_.base) + args_.buffers + number * args_.piece_bytes;
  }

 private:
  FlagLine* line(int r) const { return reinterpret_cast<FlagLine*>(static_cast<char*>(args_.base) + args_.lines) + r; }

  int wait_all(const char* op, uint32_t target) {
    auto* down = reinterpret_cast<std::atomic<uint32_t>*>(static_cast<char*>(args_.base) + args_.down);
    for (int r = 0; r < args_.size; ++r) {
      if (r == args_.index || has_reached(*line(r), target)) continue;
      const int64_t start = now_ns();
      const int error = wait_for(op, line(r), target, down, args_.timeout_ms);
      waited_ns_ += now_ns() - start;
      if (error != 0) return error;
    }
    return 0;
  }

  ExchangeArgs args_{};
  bool is_open_ = false;
  uint32_t sequence_ = 0;
  int64_t begun_ns_ = 0, waited_ns_ = 0;
  ExchangeTimes times_{};
};

Stage stage;

}  // namespace

int open_exchange(const ExchangeArgs& args) { return stage.open(args); }
int exchange_size() { return stage.size(); }
int exchange_index() { return stage.index(); }
ExchangeTimes exchange_times() { return stage.times(); }

int all_reduce(const char* op, DType dtype, const void* in, DType out_dtype, void* out, int64_t count) {
  int error = stage.check_open(op);
  if (error != 0) return error;
  if (dtype == DType::kUnsupported || (out_dtype != dtype && dtype != DType::kFloat32)) {
    return refuse_text(op, "sums float32, float16 and bfloat16 only, and float32 alone to another type");
  }
  const int64_t element = size_of(dtype), per_piece = stage.piece_bytes() / element;
  const void* parts[kMostAgents];
  for (int64_t begin = 0; begin < count; begin += per_piece) {
    const int64_t piece = smaller(per_piece, count - begin);
    const char* own = static_cast<const char*>(in) + begin * element;
    void* buffer = stage.begin_piece(op);
    if (buffer == nullptr) return kGroupDown;
    std::memcpy(buffer, own, static_cast<size_t>(piece * element));
    stage.publish_piece(piece * element);
    error = stage.wait_for_piece(op);
    if (error != 0) return error;
    for (int r = 0; r < stage.size(); ++r) parts[r] = r == stage.index() ? own : stage.buffer(r);
    char* to = static_cast<char*>(out) + begin * size_of(out_dtype);
    kernels().sum_parts(dtype, parts, stage.size(), out_dtype, to, piece);
    stage.end_piece();
  }
  return 0;
}

int all_gather(const char* op, const void* in, void* out, int64_t bytes) {
  int error = stage.check_open(op);
  if (error != 0) return error;
  for (int64_t begin = 0; begin < bytes; begin += stage.piece_bytes()) {
    const size_t piece = static_cast<size_t>(smaller(stage.piece_bytes(), bytes - begin));
    const char* own = static_cast<const char*>(in) + begin;
    void* buffer = stage.begin_piece(op);
    if (buffer == nullptr) return kGroupDown;
    std::memcpy(buffer, own, piece);
    stage.publish_piece(static_cast<int64_t>(piece));
    error = stage.wait_for_piece(op);
    if (error != 0) return error;
    for (int r = 0; r < stage.size(); ++r) {
      std::memcpy(static_cast<char*>(out) + r * bytes + begin, r == stage.index() ? own : stage.buffer(r), piece);
    }
    stage.end_piece();
  }
  return 0;
}

namespace {

// Transfers one piece of gather_rows_to_first(): rows [row, row + rows) and columns [column, column + columns) of every
// agent's matrix.
int gather_tile(const char* op, const GatherRowsArgs& args, int64_t row, int64_t rows, int64_t column,
                int64_t columns) {
  const bool first = stage.index() == 0;
  void* buffer = stage.begin_piece(op);
  if (buffer == nullptr) return kGroupDown;
  const auto columns_of = [&](int r) {  // returns how many columns of agent r are in this piece
    return larger(0, smaller(columns, smaller(args.stride, args.whole - r * args.stride) - column));
  };
  int64_t own = 0;
  if (!first) {
    own = columns_of(stage.index());
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(static_cast<char*>(buffer) + i * own * kElementBytes,
                  static_cast<const char*>(args.in) + ((row + i) * args.in_width + column) * kElementBytes,
                  static_cast<size_t>(own * kElementBytes));
    }
  }
  stage.publish_piece(rows * own * kElementBytes);
  if (first) {
    const int error = stage.wait_for_piece(op);
    if (error != 0) return error;
    for (int r = 1; r < stage.size(); ++r) {
      const int64_t theirs = columns_of(r), at = row * args.out_stride + r * args.stride + column;
      for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(static_cast<char*>(args.out) + (at + i * args.out_stride) * kElementBytes,
                    static_cast<const char*>(stage.buffer(r)) + i * theirs * kElementBytes,
                    static_cast<size_t>(theirs * kElementBytes));
      }
    }
  }
  stage.end_piece();
  return 0;
}

}  // namespace

int gather_rows_to_first(const char* op, const GatherRowsArgs& args) {
  int error = stage.check_open(op);
  const int64_t most = stage.piece_bytes() / kElementBytes, per_tile = smaller(args.stride, most);
  const int64_t rows_per_tile = larger(1, most / per_tile);
  for (int64_t row = 0; row < args.rows && error == 0; row += rows_per_tile) {
    const int64_t rows = smaller(rows_per_tile, args.rows - row);
    for (int64_t column = 0; column < args.stride && error == 0; column += per_tile) {
      error = gather_tile(op, args, row, rows, column, smaller(per_tile, args.stride - column));
    }
  }
  return error;
}

}  // namespace llmk
