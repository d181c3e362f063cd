// Runs the primitives GeluExt (for Gemma) and Sigmoid (for gpt-oss). Also runs SiLU, MoveTo, NanToNum and MaskedFill,
// which only MindFormers' models need.
#include <cmath>

#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../ops/gated.h"
#include "call.h"

namespace llmk {
namespace {

constexpr int64_t kElementsPerTask = 1 << 14;

// Calls function(i) for every element, on several threads if there are many elements.
template <class Function>
void for_elements(int64_t count, const Function& function) {
  parallel_for(ceil_div(count, kElementsPerTask), [&](int64_t task) {
    for (int64_t i = task * kElementsPerTask; i < smaller(count, (task + 1) * kElementsPerTask); ++i) function(i);
  });
}

// Computes GELU of `count` elements, in pieces that stay in the L1 cache. The form with tanh is computed with a
// sigmoid, because 0.5 * (1 + tanh(u)) = sigmoid(2u). The argument of the exponential function is never positive, so
// the result does not overflow.
template <class T>
void gelu(const T* in, int64_t count, T* out) {
  constexpr int64_t kPiece = 256;
  float bent[kPiece], weights[kPiece];
  for (int64_t start = 0; start < count; start += kPiece) {
    const int64_t size = smaller(kPiece, count - start);
    for (int64_t i = 0; i < size; ++i) {
      const float x = to_float(in[start + i]);
      bent[i] = (x + kGeluCube * x * x * x) * kGeluSlope;
      weights[i] = -std::fabs(bent[i]);
    }
    kernels().logits.weights(weights, size, 0.0f, weights);
    for (int64_t i = 0; i < size; ++i) {
      const float part = bent[i] < 0 ? weights[i] : 1.0f;
      from_float(to_float(in[start + i]) * part / (1.0f + weights[i]), out + start + i);
    }
  }
}

// Computes the sigmoid of `count` elements, in pieces that stay in the L1 cache. The argument of the exponential
// function is never positive, so the result does not overflow.
template <class T>
void sigmoid(const T* in, int64_t count, T* out) {
  constexpr int64_t kPiece = 256;
  float weights[kPiece];
  for (int64_t start = 0; start < count; start += kPiece) {
    const int64_t size = smaller(kPiece, count - start);
    for (int64_t i = 0; i < size; ++i) weights[i] = -std::fabs(to_float(in[start + i]));
    kernels().logits.weights(weights, size, 0.0f, weights);
    for (int64_t i = 0; i < size; ++i) {
      const float part = to_float(in[start + i]) < 0 ? weights[i] : 1.0f;
      from_float(part / (1.0f + weights[i]), out + start + i);
    }
  }
}

// Computes the result of an operator with one input, on several threads if there are many elements. The call
// function(in, count, out) computes `count` elements.
template <class Function>
void by_element(const Call& call, const Function& function) {
  const int64_t count = call.size(0);
  with_element_type(call.dtype(0), [&](auto type) {
    using T = decltype(type);
    parallel_for(ceil_div(count, kElementsPerTask), [&](int64_t task) {
      const int64_t first = task * kElementsPerTask;
      function(call.as<T>(0) + first, smaller(kElementsPerTask, count - first), call.as<T>(call.count - 1) + first);
    });
  });
}

template <class T>
void nan_to_num(const Call& call, const float (&numbers)[3]) {
  T replacements[3];
  for (int i = 0; i < 3; ++i) from_float(numbers[i], &replacements[i]);
  const T* in = call.as<T>(0);
  T* out = call.as<T>(call.count - 1);
  for_elements(call.size(0), [&](int64_t i) {
    const float value = to_float(in[i]);
    out[i] = std::isfinite(value) ? in[i] : replacements[std::isnan(value) ? 0 : value > 0 ? 1 : 2];
  });
}

template <class T>
void masked_fill(const Call& call) {
  const T value = *call.as<T>(2);
  for_elements(call.size(0), [&](int64_t i) {
    call.as<T>(3)[i] = call.as<uint8_t>(1)[i] != 0 ? value : call.as<T>(0)[i];
  });
}

}  // namespace

// Runs SiLU(input), see ops/silu.h. MindSpore's own CPU kernel does not take bfloat16, and rounds 40 % of its float16
// results wrongly.
int plugin_silu(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  const SiluArgs args{call.data[0], call.data[call.count - 1], call.size(0), call.dtype(0)};
  if (args.count > 0) kernels().silu(args);
  return 0;
}

// Runs GeluExt(input, approximate) with approximate = "tanh": x * sigmoid(1.5957691 * (x + 0.044715 x^3)), computed in
// float32 and rounded once. A result depends only on its element.
int plugin_gelu(const Call& call) {
  constexpr int64_t kTanh = 1;  // number of "tanh" in MindSpore's enumeration of `approximate`
  const int error = check_float(call, 0);
  if (error != 0) return error;
  if (call.integer(1) != kTanh) {
    return refuse_text(call.op, "approximate is number %lld; only \"tanh\", number %lld, is supported",
                       static_cast<long long>(call.integer(1)), static_cast<long long>(kTanh));
  }
  by_element(call, [](auto* in, int64_t count, auto* out) { gelu(in, count, out); });
  return 0;
}

// Runs Sigmoid(input), computed in float32 and rounded once. A result depends only on its element.
int plugin_sigmoid(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  by_element(call, [](auto* in, int64_t count, auto* out) { sigmoid(in, count, out); });
  return 0;
}

// Runs MoveTo(input, to, blocking), which copies a tensor to another device. On a CPU all memory belongs to the host,
// so this is a plain copy.
int plugin_move_to(const Call& call) {
  const int out = call.count - 1;
  const int64_t bytes = call.size(0) * dtype_bytes(call.dtypes[0]);
  if (bytes == 0 && call.size(0) != 0) return refuse_text(call.op, "type %s is not known", call.dtypes[0]);
  if (call.data[0] != call.data[out]) std::memmove(call.data[out], call.data[0], static_cast<size_t>(bytes));
  return 0;
}

// Runs NanToNum(input, nan, posinf, neginf): replaces NaN and infinities by numbers, rounded to the type of the input.
// MindSpore's own CPU kernel does not take bfloat16.
int plugin_nan_to_num(const Call& call) {
  const int error = check_float(call, 0);
  if (error != 0) return error;
  float numbers[3];
  for (int i = 0; i < 3; ++i) {
    if (!call.info->IsScalarInput(static_cast<size_t>(1 + i))) {
      return refuse_text(call.op, "takes numbers for nan, posinf and neginf, all three");
    }
    numbers[i] = static_cast<float>(call.real(1 + i));
  }
  with_element_type(call.dtype(0), [&](auto type) { nan_to_num<decltype(type)>(call, numbers); });
  return 0;
}

// Runs MaskedFill(input, mask, value): replaces an element by `value` if its element in the mask is true. The mask has
// the shape of the input. MindSpore's own CPU kernel does not take bfloat16.
int plugin_masked_fill(const Call& call) {
  enum { kInput, kMask, kValue, kOut, kCount };
  bool fits = call.count == kCount && call.has_dtype(kMask, "bool") && call.ndims[kMask] == call.ndims[kInput] &&
              call.size(kValue) == 1 && std::strcmp(call.dtypes[kValue], call.dtypes[kInput]) == 0;
  for (int axis = 0; fits && axis < call.ndims[kInput]; ++axis) {
    fits = call.dim(kMask, axis) == call.dim(kInput, axis);
  }
  const int64_t bytes = dtype_bytes(call.dtypes[kInput]);
  if (!fits || (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8)) {
    return refuse_text(call.op, "takes a mask of bool, it is %s, of the input's shape, and one value of its type %s",
                       call.dtypes[kMask], call.dtypes[kInput]);
  }
  if (bytes == 1) masked_fill<uint8_t>(call);
  if (bytes == 2) masked_fill<uint16_t>(call);
  if (bytes == 4) masked_fill<uint32_t>(call);
  if (bytes == 8) masked_fill<uint64_t>(call);
  return 0;
}

}  // namespace llmk
