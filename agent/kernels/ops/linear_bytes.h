// Linear layers with integer weights and int8 activations.
#pragma once
#include "linear_rows.h"
#ifdef LLMK_AMX
#include "linear_amx.h"
#endif

namespace llmk::LLMK_ARCH {

// Sets the activations of the job to int8 rows. These are the rows that the caller has quantised. If there are none,
// this function quantises the rows.
static void rows_as_bytes(LinearJob* job) {
  const LinearArgs& args = job->args;
  if (args.quantized != nullptr) {
    job->rows = *args.quantized;
  } else {
    void* memory = thread_scratch(kScratchLinearRows, quantized_rows_bytes(args.weight, args.rows));
    job->rows = quantized_rows(args.weight, args.rows, memory);
    for_rows(args.rows, job->header.depth, [&](int64_t row) {
      const char* x = static_cast<const char*>(args.x) + row * args.x_stride * size_of(args.dtype);
      quantize_row(args.dtype, x, job->rows, row, args.weight);
    });
  }
  job->x = job->rows.values;
  job->x_stride = job->rows.stride;
}

static void run_bytes(LinearJob* job) {
  const bool nibbles = has_nibbles(job->header.format), grouped = job->header.group != 0 || nibbles;
  rows_as_bytes(job);
  grouped ? set_finish<Scaling::kRow>(job) : set_finish<Scaling::kIntegerBoth>(job);
#ifdef LLMK_AMX
  if (nibbles && GroupedTiles<NibbleStep>::fits(*job)) return run_tiles<GroupedTiles<NibbleStep>>(*job);
  if (!nibbles && grouped && GroupedTiles<ByteStep>::fits(*job)) return run_tiles<GroupedTiles<ByteStep>>(*job);
#endif
  if (nibbles) return run_panels<GroupedForm<NibbleStep>>(*job);
  if (grouped) return run_panels<GroupedForm<ByteStep>>(*job);
#ifdef LLMK_AMX
  if (job->args.rows >= kLeastTiledRows && fits_tiles(*job)) return run_tiles<TiledForm<ByteTiles16>>(*job);
#endif
  run_panels<PlainForm<ByteStep>>(*job);
}

static void linear_bytes(const LinearArgs& args) { run_linear(args, run_bytes); }

}  // namespace llmk::LLMK_ARCH
