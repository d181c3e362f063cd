// The custom operator ExpertMlp: residual addition, norm, expert router and the gated MLPs of the chosen experts
// (ops/experts.h).
//
//   hidden, residual [Tm, width]   gamma [width]   epsilon [1]
//   router: packed float32 weight of `experts` columns
//   gate_up, down: the packed weights of all experts, one after another and of equal size
//   choice [3] = {number of experts, chosen, normalised} (ops/experts.h)   counts [4] = {T, ...}
//   ->   out, sum [Tm, width], of which the first T rows are written
//
// Tm is the number of tokens of the largest step, T the number of tokens of this step. Optional inputs follow `counts`.
// They are for DeepSeek's models, and for agents that hold only some of the experts:
//
//   routing int32 [6] = {sigmoid, groups, chosen groups, corrected, first expert, number of experts}
//   factor float32 [1]   correction float32 [experts]
//   shared_gate_up, shared_down: packed weights of one more gated MLP for every token
//   shared_gate: packed float32 weight of one column
//
// With `routing`, `factor` and `correction`, the router chooses experts as ops/grouped_routing.h describes. gate_up and
// down contain `number of experts` experts, beginning with `first expert`. Chosen experts outside this range add
// nothing to the output. The output of the shared MLP is added to the output of the experts. With `shared_gate` (Qwen),
// the output of the shared MLP is first multiplied by the sigmoid of the product of shared_gate and the token.
//
// The result of the norm is rounded to the type of the activations, as the native primitives round it. The router reads
// this result as float32. The output of an expert stays float32 until the outputs of all experts of a row are added.
#include <cmath>
#include <initializer_list>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "common/thread_pool.h"
#include "custom_ops.h"
#include "ops/experts.h"
#include "ops/grouped_routing.h"

namespace llmk {
namespace {

enum Argument {
  kHidden, kResidual, kGamma, kEpsilon, kRouter, kGateUp, kDown, kChoice, kCounts, kRouting, kFactor, kCorrection,
  kSharedGateUp, kSharedDown, kSharedGate
};

// Returns the index of the first of the two outputs. The outputs are the last tensors, so the index depends on the
// number of optional inputs. The function sum_of() returns the index of the second output.
int out_of(const Tensors& t) { return t.count - 2; }
int sum_of(const Tensors& t) { return t.count - 1; }
bool has_routing(const Tensors& t) { return t.count > kRouting + 2; }
bool has_shared(const Tensors& t) { return t.count > kSharedGateUp + 2; }
bool has_shared_gate(const Tensors& t) { return t.count > kSharedGate + 2; }

// Maximum number of rows that are computed together. This limits the memory, because a row is copied once for each of
// its experts.
constexpr int64_t kPieceRows = 256;

struct ExpertJob {
  const Tensors& t;
  DType dtype;
  int64_t width, inner, experts, chosen;
  bool normalised;
  int64_t first, held;                  // this agent has the weights of the experts [first, first + held)
  int64_t shared;                       // intermediate size of the shared experts; 0: none
  int64_t groups, chosen_groups;        // groups of experts; see ops/grouped_routing.h
  bool sigmoid, corrected;

  bool has_expert(int64_t expert) const { return expert >= first && expert < first + held; }
  const char* weight(int argument, int64_t expert) const {
    return t.as<char>(argument) + (expert - first) * (t.size(argument) / held);
  }
};

// Buffers for the rows that run_piece() computes together.
struct PieceMemory {
  char* normed;    // results of the norm: [rows, width] of dtype
  float* floats;   // `normed`, converted to float32
  float* logits;   // results of the router: [rows, experts]
  float* weights;  // weight of each chosen expert: [rows, chosen]
  int32_t* ids;    // chosen experts: [rows, chosen]
  int64_t* starts;  // [experts + 1], see group_by_expert()
  int64_t* place;   // [rows * chosen], see group_by_expert()
  char* grouped;    // `normed` rows in the order of their experts: [rows * chosen, width] of dtype
  char* inner;      // results of the gated activation: [rows * chosen, inner] of dtype
  float* outputs;   // outputs of the experts: [rows * chosen, width]
  char* shared_inner;    // like `inner`, for the shared experts: [rows, shared] of dtype
  float* shared_output;  // [rows, width]; unused without shared experts
  float* shared_gates;   // [rows]; unused without a gate of the shared experts
};

PieceMemory piece_memory(const ExpertJob& job, int64_t rows) {
  const int64_t choices = rows * job.chosen, element = size_of(job.dtype);
  const int64_t sizes[] = {rows * job.width * element, rows * job.width * 4, rows * job.experts * 4, choices * 4,
                           choices * 4, (job.experts + 1) * 8, choices * 8, choices * job.width * element,
                           choices * job.inner * element, choices * job.width * 4,
                           rows * job.shared * element, job.shared > 0 ? rows * job.width * 4 : 0, rows * 4};
  int64_t total = 0;
  for (const int64_t size : sizes) total += ceil_div(size, 64) * 64;
  char* parts[sizeof(sizes) / sizeof(sizes[0])];
  char* next = static_cast<char*>(thread_scratch(kScratchExperts, total));
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    parts[i] = next;
    next += ceil_div(sizes[i], 64) * 64;
  }
  return {parts[0],
          reinterpret_cast<float*>(parts[1]),
          reinterpret_cast<float*>(parts[2]),
          reinterpret_cast<float*>(parts[3]),
          reinterpret_cast<int32_t*>(parts[4]),
          reinterpret_cast<int64_t*>(parts[5]),
          reinterpret_cast<int64_t*>(parts[6]),
          parts[7],
          parts[8],
          reinterpret_cast<float*>(parts[9]),
          parts[10],
          reinterpret_cast<float*>(parts[11]),
          reinterpret_cast<float*>(parts[12])};
}

int check_expert_weights(const ExpertJob& job, int argument, int64_t columns, int64_t depth, bool gated) {
  const int64_t bytes = job.t.size(argument) / job.held;
  for (int64_t expert = job.first; expert < job.first + job.held; ++expert) {
    const int error = check_packed_weight(job.t.op, job.weight(argument, expert), bytes);
    if (error != 0) return error;
    const PackedWeightHeader& header = header_of(job.weight(argument, expert));
    if (header.columns == columns && header.depth == depth && (header.gated != 0) == gated) continue;
    return refuse_text(job.t.op, "argument %d: the weight of expert %lld has %lld columns and depth %lld, gated %d; it "
                       "must be %lld and %lld, gated %d", argument, static_cast<long long>(expert),
                       static_cast<long long>(header.columns), static_cast<long long>(header.depth), header.gated,
                       static_cast<long long>(columns), static_cast<long long>(depth), static_cast<int>(gated));
  }
  return 0;
}

int read_routing(const Tensors& t, ExpertJob* job) {
  if (!t.has_dtype(kRouting, "int32") || t.size(kRouting) != 6 || !t.has_dtype(kFactor, "float32") ||
      t.size(kFactor) != 1 || !t.has_dtype(kCorrection, "float32") || t.size(kCorrection) != job->experts) {
    return refuse_text(t.op, "routing must be int32 [6], factor float32 [1] and correction float32 [%lld]",
                       static_cast<long long>(job->experts));
  }
  const int32_t* routing = t.as<int32_t>(kRouting);
  job->sigmoid = routing[0] != 0;
  job->groups = routing[1];
  job->chosen_groups = routing[2];
  job->corrected = routing[3] != 0;
  job->first = routing[4];
  job->held = routing[5];
  if (job->groups < 1 || job->experts % job->groups != 0 || job->chosen_groups < 1 ||
      job->chosen_groups > job->groups || job->chosen_groups * (job->experts / job->groups) < job->chosen) {
    return refuse_text(t.op, "%d of %d groups of %lld experts cannot give a token %lld experts", routing[2], routing[1],
                       static_cast<long long>(job->experts), static_cast<long long>(job->chosen));
  }
  if (job->first < 0 || job->held < 1 || job->first + job->held > job->experts) {
    return refuse_text(t.op, "%d experts from %d on are not within %lld experts", routing[5], routing[4],
                       static_cast<long long>(job->experts));
  }
  return 0;
}

int read_choice(const Tensors& t, ExpertJob* job) {
  if (!t.has_dtype(kChoice, "int32") || t.size(kChoice) != 3) return refuse_text(t.op, "choice must be int32 [3]");
  const int32_t* choice = t.as<int32_t>(kChoice);
  if (choice[0] < 1 || choice[1] < 1 || choice[1] > choice[0]) {
    return refuse_text(t.op, "%d experts of %d are chosen; it must be from 1 to all", choice[1], choice[0]);
  }
  job->experts = choice[0];
  job->chosen = choice[1];
  job->normalised = choice[2] != 0;
  job->held = job->experts;
  const int error = has_routing(t) ? read_routing(t, job) : 0;
  if (error != 0) return error;
  for (const int i : {kGateUp, kDown}) {
    if (!t.has_dtype(i, "uint8") || t.size(i) % (64 * job->held) != 0) {
      return refuse_text(t.op, "argument %d has %lld bytes of %s; it must be uint8, a multiple of 64 for each of %lld "
                         "experts", i, static_cast<long long>(t.size(i)), t.dtypes[i],
                         static_cast<long long>(job->held));
    }
  }
  return 0;
}

int check_float_weight(const Tensors& t, int i, const char* name, int64_t columns, int64_t depth) {
  const PackedWeightHeader* header = packed_weight(t, i);
  if (header == nullptr) return kBadArgument;
  if (header->format == WeightFormat::kFloat32 && header->columns == columns && header->depth == depth &&
      header->gated == 0) {
    return 0;
  }
  return refuse_text(t.op, "the %s must be a float32 weight of %lld columns and depth %lld", name,
                     static_cast<long long>(columns), static_cast<long long>(depth));
}

int check_shared(const Tensors& t, ExpertJob* job) {
  if (!has_shared(t)) return 0;
  const PackedWeightHeader* down = packed_weight(t, kSharedDown);
  if (down == nullptr) return kBadArgument;
  job->shared = down->depth;
  int error = check_weight(t, kSharedDown, job->width, job->shared, false);
  if (error == 0) error = check_weight(t, kSharedGateUp, 2 * job->shared, job->width, true);
  return error != 0 || !has_shared_gate(t) ? error : check_float_weight(t, kSharedGate, "shared gate", 1, job->width);
}

int check_weights(const Tensors& t, ExpertJob* job) {
  int error = check_float_weight(t, kRouter, "router", job->experts, job->width);
  if (error == 0) error = check_packed_weight(t.op, job->weight(kDown, job->first), t.size(kDown) / job->held);
  if (error != 0) return error;
  job->inner = header_of(job->weight(kDown, job->first)).depth;
  error = check_expert_weights(*job, kDown, job->width, job->inner, false);
  return error != 0 ? error : check_expert_weights(*job, kGateUp, 2 * job->inner, job->width, true);
}

int run_linear(const ExpertJob& job, const void* weight, const void* x, DType dtype, int64_t rows, void* out,
               int64_t out_width, Epilogue epilogue) {
  LinearArgs args{};
  args.weight = weight;
  args.x = x;
  args.dtype = dtype;
  args.rows = rows;
  args.x_stride = header_of(weight).depth;
  args.out = out;
  args.out_stride = out_width;
  args.epilogue = epilogue;
  const int error = check_linear(job.t.op, args);
  if (error == 0) kernels().linear(args);
  return error;
}

template <class T>
void widen_rows(const char* from, int64_t count, float* to) {
  const T* values = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(values[i]);
}

// Computes norm(hidden + residual) of rows [first, first + rows) into `memory`, and stores the sums hidden + residual.
void norm_piece(const ExpertJob& job, int64_t first, int64_t rows, const PieceMemory& memory) {
  const Tensors& t = job.t;
  const NormInput in{t.as<char>(kHidden), t.as<char>(kResidual), t.as<char>(sum_of(t)), t.data[kGamma],
                     *t.as<float>(kEpsilon), job.width, job.dtype, t.dtype(kGamma)};
  const int64_t bytes = job.width * size_of(job.dtype);
  parallel_for(rows, [&](int64_t i) {
    char* row = memory.normed + i * bytes;
    norm_row(in, first + i, row);
    float* floats = memory.floats + i * job.width;
    if (job.dtype == DType::kFloat32) std::memcpy(floats, row, static_cast<size_t>(bytes));
    if (job.dtype == DType::kFloat16) widen_rows<half_t>(row, job.width, floats);
    if (job.dtype == DType::kBFloat16) widen_rows<bfloat_t>(row, job.width, floats);
  });
}

void choose(const ExpertJob& job, const PieceMemory& memory, int64_t rows) {
  const Tensors& t = job.t;
  const bool plain = !job.sigmoid && !job.corrected && job.groups == 1;
  if (plain) {
    route_tokens({memory.logits, memory.ids, memory.weights, rows, job.experts, job.chosen, job.normalised});
    const float factor = has_routing(t) ? *t.as<float>(kFactor) : 1.0f;
    for (int64_t i = 0; i < rows * job.chosen; ++i) memory.weights[i] *= factor;
    return;
  }
  route_to_groups({memory.logits, t.as<float>(kCorrection), memory.ids, memory.weights, rows, job.experts, job.chosen,
                   job.groups, job.chosen_groups, *t.as<float>(kFactor), job.sigmoid, job.corrected, job.normalised});
}

int run_shared(const ExpertJob& job, const PieceMemory& memory, int64_t rows) {
  if (job.shared == 0) return 0;
  int error = run_linear(job, job.t.data[kSharedGateUp], memory.normed, job.dtype, rows, memory.shared_inner,
                         job.shared, Epilogue::kGated);
  if (error != 0) return error;
  error = run_linear(job, job.t.data[kSharedDown], memory.shared_inner, job.dtype, rows, memory.shared_output,
                     job.width, Epilogue::kStoreFloat);
  if (error != 0 || !has_shared_gate(job.t)) return error;
  error = run_linear(job, job.t.data[kSharedGate], memory.floats, DType::kFloat32, rows, memory.shared_gates, 1,
                     Epilogue::kStoreFloat);
  for (int64_t i = 0; error == 0 && i < rows; ++i) {
    memory.shared_gates[i] = 1.0f / (1.0f + std::exp(-memory.shared_gates[i]));
  }
  return error;
}

int run_experts(const ExpertJob& job, const PieceMemory& memory) {
  const int64_t element = size_of(job.dtype);
  for (int64_t expert = job.first; expert < job.first + job.held; ++expert) {
    const int64_t begin = memory.starts[expert], rows = memory.starts[expert + 1] - begin;
    if (rows == 0) continue;
    char* inner = memory.inner + begin * job.inner * element;
    int error = run_linear(job, job.weight(kGateUp, expert), memory.grouped + begin * job.width * element, job.dtype,
                           rows, inner, job.inner, Epilogue::kGated);
    if (error == 0) {
      error = run_linear(job, job.weight(kDown, expert), inner, job.dtype, rows, memory.outputs + begin * job.width,
                         job.width, Epilogue::kStoreFloat);
    }
    if (error != 0) return error;
  }
  return 0;
}

// Writes the weighted sum of a row's expert outputs to `out`, and rounds only this sum. Adds the most probable expert
// first and the shared experts last. Skips experts whose weights this agent does not have.
template <class T>
void sum_row(const ExpertJob& job, const PieceMemory& memory, int64_t row, T* out) {
  const float* weights = memory.weights + row * job.chosen;
  const int64_t* place = memory.place + row * job.chosen;
  const int32_t* ids = memory.ids + row * job.chosen;
  const float* shared = job.shared > 0 ? memory.shared_output + row * job.width : nullptr;
  const float gate = has_shared_gate(job.t) ? memory.shared_gates[row] : 1.0f;
  for (int64_t d = 0; d < job.width; ++d) {
    float total = 0;
    for (int64_t rank = 0; rank < job.chosen; ++rank) {
      if (job.has_expert(ids[rank])) total += weights[rank] * memory.outputs[place[rank] * job.width + d];
    }
    if (shared != nullptr) total += gate * shared[d];
    from_float(total, out + d);
  }
}

void sum_piece(const ExpertJob& job, const PieceMemory& memory, int64_t first, int64_t rows) {
  const Tensors& t = job.t;
  parallel_for(rows, [&](int64_t i) {
    const int64_t at = (first + i) * job.width;
    if (job.dtype == DType::kFloat32) sum_row(job, memory, i, t.as<float>(out_of(t)) + at);
    if (job.dtype == DType::kFloat16) sum_row(job, memory, i, t.as<half_t>(out_of(t)) + at);
    if (job.dtype == DType::kBFloat16) sum_row(job, memory, i, t.as<bfloat_t>(out_of(t)) + at);
  });
}

int run_piece(const ExpertJob& job, int64_t first, int64_t rows) {
  const PieceMemory memory = piece_memory(job, rows);
  const int64_t choices = rows * job.chosen, bytes = job.width * size_of(job.dtype);
  norm_piece(job, first, rows, memory);
  int error = run_linear(job, job.t.data[kRouter], memory.floats, DType::kFloat32, rows, memory.logits, job.experts,
                         Epilogue::kStoreFloat);
  if (error != 0) return error;
  choose(job, memory, rows);
  group_by_expert(memory.ids, choices, job.experts, memory.starts, memory.place);
  for (int64_t i = 0; i < choices; ++i) {
    std::memcpy(memory.grouped + memory.place[i] * bytes, memory.normed + i / job.chosen * bytes,
                static_cast<size_t>(bytes));
  }
  error = run_experts(job, memory);
  if (error == 0) error = run_shared(job, memory, rows);
  if (error == 0) sum_piece(job, memory, first, rows);
  return error;
}

int expert_mlp(const Tensors& t) {
  if (t.count != kRouting + 2 && t.count != kSharedGateUp + 2 && t.count != kSharedDown + 3 &&
      t.count != kSharedGate + 3) {
    return refuse_text(t.op, "got %d arguments; it takes 9, 12, 14 or 15 and gives 2", t.count);
  }
  int error = check_float_type(t, kHidden);
  if (error != 0) return error;
  ExpertJob job{t, t.dtype(kHidden), t.dim(kHidden, -1), 0, 0, 0, false, 0, 0, 0, 1, 1, false, false};
  const int64_t rows = rows_of(t, kCounts, 0, t.dim(kHidden, 0));
  if (rows < 0) return kBadArgument;
  error = check_gamma(t, kGamma, kEpsilon, job.width, job.dtype);
  for (const int i : {static_cast<int>(kResidual), out_of(t), sum_of(t)}) {
    if (error == 0) error = check_matrix(t, i, rows, job.width, job.dtype);
  }
  if (error == 0) error = read_choice(t, &job);
  if (error == 0) error = check_weights(t, &job);
  if (error == 0) error = check_shared(t, &job);
  for (int64_t first = 0; error == 0 && first < rows; first += kPieceRows) {
    error = run_piece(job, first, smaller(kPieceRows, rows - first));
  }
  return error;
}

}  // namespace
}  // namespace llmk

LLMK_CUSTOM_OP(ExpertMlp, 2, expert_mlp(t))
