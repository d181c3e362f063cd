// Linear layers with float32 or float16 weights.
#pragma once
#include "linear_rows.h"

namespace llmk::LLMK_ARCH {

static void linear_floats(const LinearArgs& args) {
  run_linear(args, [](LinearJob* job) {
    set_finish<Scaling::kNone>(job);
    rows_as_floats(job);
    if (job->header.format == WeightFormat::kFloat16) {
      return run_panels<PlainForm<FloatStep<half_t>, kFloatTileSteps>>(*job);
    }
    run_panels<PlainForm<FloatStep<float>, kFloatTileSteps>>(*job);
  });
}

}  // namespace llmk::LLMK_ARCH
