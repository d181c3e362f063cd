// Linear layers with bfloat16 weights, and with integer weights and float activations.
#pragma once
#include "linear_rows.h"
#include "linear_weight_only.h"
#ifdef LLMK_AMX
#include "linear_amx.h"
#endif

namespace llmk::LLMK_ARCH {

#if defined(LLMK_BF16_DOT) || defined(LLMK_NEON_BF16)
static void rows_as_bfloats(LinearJob* job) {
  job->x = job->args.x;
  job->x_stride = job->args.x_stride;
  const bool whole_steps = job->header.depth % job->shape.step_depth == 0;
  if (!whole_steps) convert_rows<bfloat_t, bfloat_t>(job, ceil_div(job->header.depth, kLanes) * kLanes);
}
#endif

static void run_bfloats(LinearJob* job) {
  set_finish<Scaling::kNone>(job);
#if defined(LLMK_BF16_DOT) || defined(LLMK_NEON_BF16)
  rows_as_bfloats(job);
#ifdef LLMK_AMX
  if (fits_tiles(*job)) {
    if (job->args.lora != nullptr) job->split = split_rows(*job->args.lora, job->args.rows);
    return run_tiles<TiledForm<BFloatTiles16>>(*job);
  }
#endif
#ifdef LLMK_NEON_BF16
  run_panels<PlainForm<BFloatMatrixStep>>(*job);
#else
  run_panels<PlainForm<BFloatDotStep>>(*job);
#endif
#else
  rows_as_floats(job);
  run_panels<PlainForm<BFloatStep>>(*job);
#endif
}

static void run_integers(LinearJob* job) {
  const bool grouped = job->header.group != 0 || has_nibbles(job->header.format);
  grouped ? set_finish<Scaling::kNone>(job) : set_finish<Scaling::kColumn>(job);
#ifdef LLMK_BF16_DOT
  if (job->args.dtype == DType::kBFloat16) {
    rows_as_bfloats(job);
    return run_weight_only<bfloat_t>(*job);
  }
#endif
  rows_as_floats(job);
  run_weight_only<float>(*job);
}

static void linear_bfloats(const LinearArgs& args) {
  run_linear(args, is_integer(header_of(args.weight).format) ? run_integers : run_bfloats);
}

}  // namespace llmk::LLMK_ARCH
