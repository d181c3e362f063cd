// Plain C entries for ctypes: the check of a step, the sampler, block copies, threads, the ceilings of the machine, and
// per kernel an entry for tests and benchmarks. Those take the kernel's own argument struct and `use_reference`: 1 runs
// the scalar reference instead.
#include <vector>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "ops/copy_blocks.h"
#include "ops/experts.h"
#include "ops/gather.h"
#include "ops/reshape_and_cache.h"
#include "ops/sampler.h"
#include "ops/step_copy.h"

namespace llmk {
namespace {

template <template <class> class Reference, class Args>
void run_reference(const Args& args) {
  if (args.dtype == DType::kFloat32) Reference<float>::run(args);
  if (args.dtype == DType::kFloat16) Reference<half_t>::run(args);
  if (args.dtype == DType::kBFloat16) Reference<bfloat_t>::run(args);
}

template <class T>
struct RmsNormReference {
  static void run(const RmsNormArgs& args) {
    if (args.gamma_dtype == DType::kFloat32) reference::rms_norm<T, float>(args);
    if (args.gamma_dtype == DType::kFloat16) reference::rms_norm<T, half_t>(args);
    if (args.gamma_dtype == DType::kBFloat16) reference::rms_norm<T, bfloat_t>(args);
  }
};

template <class T>
struct RotaryReference {
  static void run(const RotaryArgs& args) {
    if (args.table_dtype == DType::kFloat32) reference::rotary<T, float>(args);
    if (args.table_dtype == DType::kFloat16) reference::rotary<T, half_t>(args);
    if (args.table_dtype == DType::kBFloat16) reference::rotary<T, bfloat_t>(args);
  }
};

template <class T>
struct SwigluReference {
  static void run(const SwigluArgs& args) { reference::swiglu<T>(args); }
};

template <class T>
struct SiluReference {
  static void run(const SiluArgs& args) { reference::silu<T>(args); }
};

template <class T>
struct MatMulReference {
  static void run(const MatMulArgs& args) { reference::matmul<T>(args); }
};

}  // namespace
}  // namespace llmk

#define LLMK_ENTRY __attribute__((visibility("default")))

extern "C" {

LLMK_ENTRY void llmk_set_threads(int num_threads) { llmk::set_num_threads(num_threads); }
LLMK_ENTRY void llmk_set_attentive(int attentive) { llmk::set_attentive(attentive != 0); }

LLMK_ENTRY int llmk_num_threads() { return llmk::num_threads(); }

LLMK_ENTRY int64_t llmk_scratch_bytes(int between_operators) { return llmk::scratch_bytes(between_operators != 0); }

LLMK_ENTRY const char* llmk_isa() { return llmk::kernels().isa; }

LLMK_ENTRY int llmk_sample(const llmk::SampleArgs* args) {
  const llmk::StandardFloatingPoint scope;
  return llmk::sample(*args);
}

LLMK_ENTRY int llmk_has_penalties(const llmk::SampleArgs* args) { return llmk::has_penalties(*args) ? 1 : 0; }

LLMK_ENTRY int llmk_copy_step(const llmk::StepCopyArgs* args) { return static_cast<int>(llmk::copy_step(*args)); }

LLMK_ENTRY int llmk_copy_blocks(const llmk::CopyBlocksArgs* args) { return llmk::copy_blocks("CopyBlocks", *args); }

// The float32 of `count` bfloat16.
LLMK_ENTRY void llmk_widen_bfloat16(const uint16_t* values, uint32_t* out, int64_t count) {
  constexpr int64_t kSpan = 1 << 15;  // of a task
  llmk::parallel_for(llmk::ceil_div(count, kSpan), [&](int64_t task) {
    const int64_t end = llmk::smaller((task + 1) * kSpan, count);
    for (int64_t i = task * kSpan; i < end; ++i) out[i] = static_cast<uint32_t>(values[i]) << 16;
  });
}

LLMK_ENTRY void llmk_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  llmk::philox(counter, key, out);
}

// Ceilings of the machine with the threads of llmk_set_threads, in 10^9 a second; see ops/ceilings.h.
LLMK_ENTRY double llmk_measure_fma(double seconds) { return llmk::measure_fma(seconds); }
LLMK_ENTRY double llmk_measure_dot_bf16(double seconds) { return llmk::measure_dot_bf16(seconds); }
LLMK_ENTRY double llmk_measure_dot_int8(double seconds) { return llmk::measure_dot_int8(seconds); }
LLMK_ENTRY double llmk_measure_read_bandwidth(double seconds) { return llmk::measure_read_bandwidth(seconds); }
LLMK_ENTRY double llmk_measure_paged_read_bandwidth(double seconds) {
  return llmk::measure_paged_read_bandwidth(seconds);
}
LLMK_ENTRY double llmk_measure_read(const void* data, int64_t bytes) { return llmk::measure_read(data, bytes); }

LLMK_ENTRY int llmk_test_rms_norm(const llmk::RmsNormArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::run_reference<llmk::RmsNormReference>(*args) : llmk::kernels().rms_norm(*args);
  return 0;
}

LLMK_ENTRY int llmk_test_swiglu(const llmk::SwigluArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::run_reference<llmk::SwigluReference>(*args) : llmk::kernels().swiglu(*args);
  return 0;
}

LLMK_ENTRY int llmk_test_silu(const llmk::SiluArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::run_reference<llmk::SiluReference>(*args) : llmk::kernels().silu(*args);
  return 0;
}

LLMK_ENTRY int llmk_test_rotary(const llmk::RotaryArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::run_reference<llmk::RotaryReference>(*args) : llmk::kernels().rotary(*args);
  return 0;
}

LLMK_ENTRY int llmk_test_matmul(const llmk::MatMulArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::run_reference<llmk::MatMulReference>(*args) : llmk::kernels().matmul(*args);
  return 0;
}

// Attention over ready queries and keys, as the native primitives run it. `key_rows`: rows of keys if block_tables is
// null.
LLMK_ENTRY int llmk_test_attention(const llmk::RotaryAttentionArgs* given, int64_t key_rows, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  llmk::RotaryAttentionArgs args = *given;
  std::vector<int64_t> starts(static_cast<size_t>(2 * args.num_seqs) + 1);
  const int error = llmk::check_ready_attention("Attention", &args, key_rows, starts.data());
  if (error != 0) return error;
  use_reference != 0 ? llmk::reference::rotary_attention(args) : llmk::kernels().rotary_attention(args);
  return 0;
}

LLMK_ENTRY void llmk_test_route_tokens(const llmk::RoutingArgs* args, int use_reference) {
  const llmk::StandardFloatingPoint scope;
  use_reference != 0 ? llmk::reference::route_tokens(*args) : llmk::route_tokens(*args);
}

LLMK_ENTRY int llmk_test_gather(const llmk::GatherArgs* args) { return llmk::gather_rows("Gather", *args); }

LLMK_ENTRY void llmk_test_scatter_rows(const void* rows, void* cache, const int32_t* slots, int64_t tokens,
                                       int64_t row_bytes) {
  llmk::scatter_rows(rows, cache, slots, tokens, row_bytes);
}

}  // extern "C"
