// Records the experts that each token chooses, and can replace them by the experts that an earlier run chose.
//
// If two experts have nearly the same score, rounding decides which one a token chooses. Two correct runs can therefore
// choose different experts, and then their results differ widely. A test records the choices of one run and makes a
// second run use them, so that the results are comparable. The test also checks that every replaced choice was a near
// tie.
//
// Two functions choose experts: route_tokens, and plugin_top_k for MindFormers' models. The testing library is linked
// with --wrap for both, so that their callers call the functions of this file instead. The product library does not
// contain this file.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../agent/kernels/ops/experts.h"
#include "../../agent/kernels/plugin/call.h"

#define LLMK_ROUTE_TOKENS(prefix) prefix##_ZN4llmk12route_tokensERKNS_11RoutingArgsE
#define LLMK_TOP_K(prefix) prefix##_ZN4llmk12plugin_top_kERKNS_4CallE

namespace llmk {
namespace {

struct Routes {
  bool records = false;
  std::vector<int32_t> chosen;    // expert ids of all recorded rows, one row after the other
  std::vector<int32_t> followed;  // expert ids of an earlier run, or empty if no choice is replaced
  // How far replaced choices were from a tie: the maximum over all rows. The distance of a row is the smallest router
  // logit of its own choice, minus the smallest router logit of the replacement.
  float widest_margin = 0;
};
Routes routes;

// The maximum number of experts that a row may choose. A call of plugin_top_k with a larger k is not recorded, because
// this call finds tokens for the sampler and not experts.
constexpr int64_t kMaxChosen = 32;

// Records the experts `ids` that a row chose. If `followed` has another set of experts for this row, replaces `ids` by
// that set and returns true. `logit` returns the router logit of an expert, up to a constant that is the same for all
// experts of the row.
template <class Id, class Logit>
bool take_row(Id* ids, int64_t count, const Logit& logit) {
  const size_t at = routes.chosen.size(), end = at + static_cast<size_t>(count);
  bool replaced = false;
  if (!routes.followed.empty()) {
    if (end > routes.followed.size()) {
      std::fprintf(stderr, "routes: the run to follow had fewer rows\n");
      std::abort();
    }
    const int32_t* wanted = routes.followed.data() + at;
    const auto less = [&](int64_t a, int64_t b) { return logit(a) < logit(b); };
    replaced = !std::is_permutation(ids, ids + count, wanted);
    if (replaced) {
      const float margin = logit(*std::min_element(ids, ids + count, less)) -
                           logit(*std::min_element(wanted, wanted + count, less));
      routes.widest_margin = std::max(routes.widest_margin, margin);
      std::copy(wanted, wanted + count, ids);
    }
  }
  routes.chosen.insert(routes.chosen.end(), ids, ids + count);
  return replaced;
}

}  // namespace
}  // namespace llmk

extern "C" {

void LLMK_ROUTE_TOKENS(__real_)(const llmk::RoutingArgs& args);
int LLMK_TOP_K(__real_)(const llmk::Call& call);

void LLMK_ROUTE_TOKENS(__wrap_)(const llmk::RoutingArgs& args) {
  LLMK_ROUTE_TOKENS(__real_)(args);
  if (!llmk::routes.records) return;
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* logits = args.logits + row * args.experts;
    int32_t* ids = args.ids + row * args.chosen;
    float* weights = args.weights + row * args.chosen;
    if (!llmk::take_row(ids, args.chosen, [&](int64_t id) { return logits[id]; })) continue;
    const float top = *std::max_element(logits, logits + args.experts);
    float mass = 0, sum = 0;
    for (int64_t i = 0; i < args.experts; ++i) mass += std::exp(logits[i] - top);
    for (int64_t i = 0; i < args.chosen; ++i) sum += weights[i] = std::exp(logits[ids[i]] - top) / mass;
    for (int64_t i = 0; args.normalised && i < args.chosen; ++i) weights[i] /= sum;
  }
}

int LLMK_TOP_K(__wrap_)(const llmk::Call& call) {
  const int error = LLMK_TOP_K(__real_)(call);
  if (error != 0 || !llmk::routes.records) return error;
  const int64_t experts = call.dim(0, -1), chosen = call.integer(1), rows = call.size(0) / experts;
  if (chosen > llmk::kMaxChosen) return error;
  for (int64_t row = 0; row < rows; ++row) {
    const float* probabilities = call.as<float>(0) + row * experts;
    int64_t* ids = call.as<int64_t>(6) + row * chosen;
    if (!llmk::take_row(ids, chosen, [&](int64_t id) { return std::log(probabilities[id]); })) continue;
    for (int64_t i = 0; i < chosen; ++i) call.as<float>(5)[row * chosen + i] = probabilities[ids[i]];
  }
  return error;
}

// Begins to record. If `count` is not 0, the chosen experts are replaced by the `count` expert ids in `followed`.
LLMK_ENTRY void llmk_test_begin_routes(const int32_t* followed, int64_t count) {
  llmk::routes = {true, {}, {followed, followed + count}, 0};
}

// Ends recording. Returns the number of recorded expert ids, and writes these ids to `out` if `out` is not null.
LLMK_ENTRY int64_t llmk_test_end_routes(int32_t* out, float* widest_margin) {
  llmk::routes.records = false;
  if (out != nullptr) std::copy(llmk::routes.chosen.begin(), llmk::routes.chosen.end(), out);
  *widest_margin = llmk::routes.widest_margin;
  return static_cast<int64_t>(llmk::routes.chosen.size());
}

}  // extern "C"
