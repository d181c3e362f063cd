// The C entries that the agent calls through ctypes: threads, sampling, copies, packed weights and the exchange between
// agents. An entry that can fail returns 0 if it succeeds. Otherwise it writes one line to standard error and returns
// an error code.
#include "common/alone.h"
#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "exchange/collectives.h"
#include "exchange/lines.h"
#include "ops/candidates.h"
#include "ops/copy_blocks.h"
#include "ops/hand_blocks.h"
#include "ops/laid_out_caches.h"
#include "ops/lora.h"
#include "ops/primitive_weight.h"
#include "ops/sampler.h"
#include "ops/sampler_row.h"
#include "ops/step_copy.h"

extern "C" {

LLMK_ENTRY void llmk_set_threads(int num_threads) { llmk::set_num_threads(num_threads); }
LLMK_ENTRY void llmk_set_attentive(int attentive) { llmk::set_attentive(attentive != 0); }
LLMK_ENTRY void llmk_set_spinning(int allowed) { llmk::set_spinning(allowed != 0); }
LLMK_ENTRY void llmk_set_alone(int is_alone) { llmk::set_alone(is_alone != 0); }
LLMK_ENTRY int llmk_num_threads() { return llmk::num_threads(); }
LLMK_ENTRY int64_t llmk_scratch_bytes(int between_operators) { return llmk::scratch_bytes(between_operators != 0); }
LLMK_ENTRY const char* llmk_compiled_sets() { return llmk::compiled_sets(); }
LLMK_ENTRY const char* llmk_isa() { return llmk::kernels().isa; }

// Entries for sampling, and for copies of step inputs and cache blocks.

LLMK_ENTRY int llmk_sample(const llmk::SampleArgs* args) {
  const llmk::StandardFloatingPoint scope;
  return llmk::sample(*args);
}

// Samples each row from its candidates: the tokens with its largest logits, which a device has found. Sets undecided[i]
// to 1 if row i needs all of its logits, otherwise to 0.
LLMK_ENTRY int llmk_sample_candidates(const llmk::SampleArgs* args, const llmk::CandidateArgs* candidates,
                                      int32_t* undecided) {
  const llmk::StandardFloatingPoint scope;
  return llmk::sample_candidates(*args, *candidates, undecided);
}

LLMK_ENTRY int llmk_has_penalties(const llmk::SampleArgs* args) { return llmk::has_penalties(*args) ? 1 : 0; }

// Writes to `out` one random number for each pair of a seed and a position. sampler_row.h describes these numbers.
LLMK_ENTRY void llmk_uniform(const uint64_t* seeds, const int32_t* positions, int64_t count, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = llmk::uniform(seeds[i], positions[i]);
}

LLMK_ENTRY int llmk_copy_step(const llmk::StepCopyArgs* args) { return static_cast<int>(llmk::copy_step(*args)); }

LLMK_ENTRY int llmk_copy_blocks(const llmk::CopyBlocksArgs* args) { return llmk::copy_blocks("CopyBlocks", *args); }

LLMK_ENTRY int llmk_hand_blocks(const llmk::HandBlocksArgs* args) { return llmk::hand_blocks("HandBlocks", *args); }

// Writes the checksum of a block in the hand-over pool (ops/hand_blocks.h).
LLMK_ENTRY void llmk_block_checksum(const char* data, int64_t parts, int64_t part_bytes, uint64_t* checksum) {
  llmk::block_checksum(data, parts, part_bytes, checksum);
}

// Converts `count` bfloat16 numbers to float32, with all threads.
LLMK_ENTRY void llmk_widen_bfloat16(const uint16_t* values, uint32_t* out, int64_t count) {
  constexpr int64_t kSpan = 1 << 15;  // number of elements that one task converts
  llmk::parallel_for(llmk::ceil_div(count, kSpan), [&](int64_t task) {
    const int64_t end = llmk::smaller((task + 1) * kSpan, count);
    for (int64_t i = task * kSpan; i < end; ++i) out[i] = static_cast<uint32_t>(values[i]) << 16;
  });
}

// Sets the LoRA adapter that a packed weight uses for an adapter slot. If `adapter` is null, removes the adapter of
// this slot (ops/lora.h).
LLMK_ENTRY void llmk_set_adapter(const void* packed_weight, int slot, const llmk::LoraWeight* adapter) {
  llmk::set_adapter(packed_weight, slot, adapter);
}

// Entries that pack weights for linear layers (ops/linear.h) and for native primitives (ops/primitive_weight.h).

LLMK_ENTRY int64_t llmk_packed_weight_bytes(int format, int64_t columns, int64_t depth, int64_t group, int biased,
                                            int static_inputs) {
  return llmk::packed_weight_bytes(static_cast<llmk::WeightFormat>(format), columns, depth, group, biased != 0,
                                   static_inputs != 0);
}

LLMK_ENTRY int llmk_pack_weight(const llmk::PackSource* source, void* blob, int64_t blob_bytes) {
  const llmk::StandardFloatingPoint scope;
  const int64_t needed = llmk::packed_weight_bytes(source->format, source->columns, source->depth, source->group,
                                                   source->bias != nullptr, source->input_inverses != nullptr);
  if (blob_bytes < needed) {
    return llmk::refuse_text("pack_weight", "the blob has %lld bytes; it needs %lld",
                             static_cast<long long>(blob_bytes), static_cast<long long>(needed));
  }
  return llmk::pack_weight(*source, blob);
}

LLMK_ENTRY int llmk_join_weight_parts(void* blob, int64_t blob_bytes, int parts) {
  return llmk::join_weight_parts(blob, blob_bytes, parts);
}

LLMK_ENTRY int64_t llmk_primitive_blob_bytes(const llmk::PrimitiveWeight* weight) {
  return llmk::primitive_blob_bytes(*weight);
}

LLMK_ENTRY int llmk_keep_primitive(const llmk::PrimitiveWeight* weight, void* blob, int64_t blob_bytes) {
  const llmk::StandardFloatingPoint scope;
  return llmk::keep_primitive(*weight, blob, blob_bytes);
}

LLMK_ENTRY void llmk_forget_primitive(const void* values) { llmk::forget_primitive(values); }

LLMK_ENTRY void llmk_keep_laid_out(const void* cache) { llmk::keep_laid_out(cache); }
LLMK_ENTRY void llmk_forget_laid_out(const void* cache) { llmk::forget_laid_out(cache); }

// Entries that add and gather arrays over several agents (agent/group/exchange.py, agent/kernels/collectives.py).

LLMK_ENTRY int llmk_exchange_open(const llmk::ExchangeArgs* args) { return llmk::open_exchange(*args); }

LLMK_ENTRY void llmk_line_publish(void* line, uint32_t value, uint32_t num_bytes, void* bell) {
  llmk::publish(static_cast<llmk::FlagLine*>(line), value, num_bytes, static_cast<llmk::FlagLine*>(bell));
}

LLMK_ENTRY int llmk_line_wait(const char* what, void* line, uint32_t target, void* down, int64_t timeout_ms) {
  return llmk::wait_for(what, static_cast<llmk::FlagLine*>(line), target, static_cast<std::atomic<uint32_t>*>(down),
                        timeout_ms);
}

LLMK_ENTRY void llmk_exchange_times(llmk::ExchangeTimes* out) { *out = llmk::exchange_times(); }

LLMK_ENTRY int llmk_all_reduce(int dtype, const void* in, void* out, int64_t count) {
  const llmk::StandardFloatingPoint scope;
  const auto type = static_cast<llmk::DType>(dtype);
  return llmk::all_reduce("AllReduce", type, in, type, out, count);
}

LLMK_ENTRY int llmk_all_gather(const void* in, void* out, int64_t bytes) {
  return llmk::all_gather("AllGather", in, out, bytes);
}

LLMK_ENTRY int llmk_gather_rows_to_first(const llmk::GatherRowsArgs* args) {
  return llmk::gather_rows_to_first("GatherRows", *args);
}

}  // extern "C"
