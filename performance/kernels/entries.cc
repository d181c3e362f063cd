// The C entries of libllm_kernels_testing.so, for tests and benchmarks. Each entry runs a single kernel outside any
// graph. With `use_reference` 1, an entry runs the scalar reference instead of the kernel.
//
// The testing library is linked from the object files of the product library, so the entries run the shipped kernels.
#include <chrono>
#include <vector>

#include "../../agent/kernels/common/floating_point.h"
#include "../../agent/kernels/custom_ops.h"
#include "../../agent/kernels/exchange/lines.h"
#include "../../agent/kernels/ops/experts.h"
#include "../../agent/kernels/ops/sampler.h"
#include "reference.h"

namespace llmk {
namespace {

// Owns the memory for the quantised activations of a linear layer, and fills it with the kernel or with the reference.
struct OwnRows {
  OwnRows(const LinearArgs& args, bool use_reference) {
    if (!wants_quantized_rows(args.weight)) return;
    memory.resize(static_cast<size_t>(quantized_rows_bytes(args.weight, args.rows)) + 64);
    char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    rows = quantized_rows(args.weight, args.rows, aligned);
    for (int64_t row = 0; row < args.rows; ++row) {
      const char* x = static_cast<const char*>(args.x) + row * args.x_stride * size_of(args.dtype);
      if (use_reference) {
        reference::quantize_row(args.dtype, x, rows, row, header_of(args.weight));
      } else {
        kernels().quantize_row(args.dtype, x, rows, row, args.weight);
      }
    }
  }
  std::vector<char> memory;
  QuantizedRows rows{};
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class Args>
void run(void (*kernel)(const Args&), const Args& args) {
  const StandardFloatingPoint scope;
  kernel(args);
}

}  // namespace
}  // namespace llmk

extern "C" {

LLMK_ENTRY void llmk_test_rms_norm(const llmk::RmsNormArgs* args) { llmk::run(llmk::kernels().rms_norm, *args); }
LLMK_ENTRY void llmk_test_swiglu(const llmk::SwigluArgs* args) { llmk::run(llmk::kernels().swiglu, *args); }
LLMK_ENTRY void llmk_test_silu(const llmk::SiluArgs* args) { llmk::run(llmk::kernels().silu, *args); }
LLMK_ENTRY void llmk_test_rotary(const llmk::RotaryArgs* args) { llmk::run(llmk::kernels().rotary, *args); }
LLMK_ENTRY void llmk_test_matmul(const llmk::MatMulArgs* args) { llmk::run(llmk::kernels().matmul, *args); }
LLMK_ENTRY void llmk_test_route_tokens(const llmk::RoutingArgs* args) { llmk::run(llmk::route_tokens, *args); }

// Runs attention on queries and keys that are already rotated, as for the native primitives. Without block tables, the
// keys are an array with `key_rows` rows.
LLMK_ENTRY int llmk_test_attention(const llmk::RotaryAttentionArgs* given, int64_t key_rows, int use_reference) {
  llmk::RotaryAttentionArgs args = *given;
  std::vector<int64_t> starts(static_cast<size_t>(2 * args.num_seqs) + 1);
  const int error = llmk::check_ready_attention("Attention", &args, key_rows, starts.data());
  if (error != 0) return error;
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::reference::rotary_attention(args) : llmk::kernels().rotary_attention(args);
  return 0;
}

// Runs the scalar reference of the custom op RotaryAttention. The arguments are the same as for the custom op.
LLMK_ENTRY int llmk_reference_rotary_attention(int nparam, void** params, int* ndims, int64_t** shapes,
                                               const char** dtypes) {
  const llmk::StandardFloatingPoint scope;
  llmk::RotaryAttentionArgs args{};
  std::vector<int64_t> query_starts;
  const int error =
      llmk::read_rotary_attention({"RotaryAttention", nparam, params, ndims, shapes, dtypes}, &args, &query_starts);
  if (error == 0) llmk::reference::rotary_attention(args);
  return error;
}

// Runs a linear layer. In mode 0, the kernel quantizes the rows of x. In mode 1, this entry quantizes the rows before
// it calls the kernel, as fused operators do. In mode 2, it runs the reference.
LLMK_ENTRY int llmk_test_linear(const llmk::LinearArgs* given, int64_t blob_bytes, int mode) {
  const llmk::StandardFloatingPoint scope;
  llmk::LinearArgs args = *given;
  int error = llmk::check_packed_weight("Linear", args.weight, blob_bytes);
  if (error == 0) error = llmk::check_linear("Linear", args);
  if (error != 0) return error;
  if (mode == 0) {
    llmk::kernels().linear(args);
    return 0;
  }
  const llmk::OwnRows own(args, mode == 2);
  if (mode == 2) {
    llmk::reference::linear(args, own.rows);
  } else {
    args.quantized = llmk::wants_quantized_rows(args.weight) ? &own.rows : nullptr;
    llmk::kernels().linear(args);
  }
  return 0;
}

LLMK_ENTRY void llmk_test_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  llmk::philox(counter, key, out);
}

LLMK_ENTRY void llmk_test_sum_parts(int dtype, const void* const* parts, int num_parts, int out_dtype, void* out,
                                    int64_t count) {
  const llmk::StandardFloatingPoint scope;
  const auto in = static_cast<llmk::DType>(dtype), to = static_cast<llmk::DType>(out_dtype);
  llmk::kernels().sum_parts(in, parts, num_parts, to, out, count);
}

// Runs `times` all-reduces of `count` elements and writes the nanoseconds of each one to `nanoseconds`. `all_reduce` is
// the entry llmk_all_reduce of the product library, in which the caller must have opened the exchange.
LLMK_ENTRY int llmk_measure_all_reduce(int (*all_reduce)(int, const void*, void*, int64_t), int dtype, const void* in,
                                       void* out, int64_t count, int64_t times, int64_t* nanoseconds) {
  for (int64_t i = 0; i < times; ++i) {
    const int64_t start = llmk::now_ns();
    const int error = all_reduce(dtype, in, out, count);
    if (error != 0) return error;
    nanoseconds[i] = llmk::now_ns() - start;
  }
  return 0;
}

// Passes a counter `times` times between two processes that never sleep, and writes the nanoseconds of each round trip
// to `nanoseconds`. An all-reduce cannot be faster than half of a round trip. `own` and `other` are counters in shared
// memory (FlagLine): this process writes `own`, and the other process writes `other`. Both must be 0 at the start. The
// process whose argument `serves` is 1 writes first.
LLMK_ENTRY void llmk_measure_ping_pong(void* own, void* other, int serves, int64_t times, int64_t* nanoseconds) {
  auto* mine = static_cast<llmk::FlagLine*>(own);
  auto* theirs = static_cast<llmk::FlagLine*>(other);
  for (int64_t i = 0; i < times; ++i) {
    const int64_t start = llmk::now_ns();
    const auto round = static_cast<uint32_t>(i + 1);
    if (serves != 0) llmk::publish(mine, round, 0, nullptr);
    while (!llmk::has_reached(*theirs, round)) {
    }
    if (serves == 0) llmk::publish(mine, round, 0, nullptr);
    nanoseconds[i] = llmk::now_ns() - start;
  }
}

}  // extern "C"
