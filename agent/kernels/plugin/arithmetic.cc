// The operators that models run between the inference primitives: Cast, ReduceSum, and operators of two tensors with
// NumPy's broadcasting. The operators of two tensors are Add, Sub, Mul, RealDiv, Minimum, Maximum, Equal, Greater,
// LessEqual and LogicalOr.
//
// MindSpore has its own CPU kernels for these operators. This file replaces them, so that every operator of a step runs
// in this library. Then the library can replay a step without MindSpore (launches.h). The types float16 and bfloat16
// are computed in float32 and rounded once, as in MindSpore.
#include <type_traits>

#include "../common/thread_pool.h"
#include "call.h"

namespace llmk {
namespace {

constexpr int64_t kElementsPerTask = 1 << 14;
constexpr int kMostAxes = 8;

struct flag_t {
  uint8_t value;
};

template <class T>
struct complex_t {
  T real, imaginary;
};

// Calls function(T{}), where T is the C++ type that MindSpore calls `name`. Returns false for an unknown name.
template <class Function>
bool with_type(const char* name, const Function& function) {
  const auto is = [name](const char* other) { return name != nullptr && std::strcmp(name, other) == 0; };
  if (is("float32")) return function(float{}), true;
  if (is("bfloat16")) return function(bfloat_t{}), true;
  if (is("float16")) return function(half_t{}), true;
  if (is("int32")) return function(int32_t{}), true;
  if (is("int64")) return function(int64_t{}), true;
  if (is("bool")) return function(flag_t{}), true;
  if (is("float64")) return function(double{}), true;
  if (is("int8")) return function(int8_t{}), true;
  if (is("int16")) return function(int16_t{}), true;
  if (is("uint8")) return function(uint8_t{}), true;
  if (is("uint16")) return function(uint16_t{}), true;
  if (is("uint32")) return function(uint32_t{}), true;
  if (is("uint64")) return function(uint64_t{}), true;
  return false;
}

// True for the types that models use. Loops over all other types are compiled without vector instructions. Otherwise
// the many combinations of types would take a third of the compile time of the library.
template <class T>
constexpr bool kFast = std::is_same_v<T, float> || std::is_same_v<T, bfloat_t> || std::is_same_v<T, half_t> ||
                       std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, flag_t>;

// Prevents the vectorisation of the loop that calls this function, unless `fast`.
template <bool fast>
inline void one_by_one() {
  if constexpr (!fast) asm volatile("");
}

// Converts an element to the type of the computation: float16 and bfloat16 to float32, integers to 64 bits.
template <class T>
auto widened(T value) {
  if constexpr (std::is_same_v<T, flag_t>) {
    return static_cast<int64_t>(value.value != 0);
  } else if constexpr (std::is_same_v<T, half_t> || std::is_same_v<T, bfloat_t>) {
    return to_float(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return value;
  } else {
    return static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(value);
  }
}

// Converts a float to an integer, towards zero. A value outside the range gives the largest or smallest integer of the
// type.
template <class T, class Wide>
T truncated(Wide value) {
  constexpr int kBits = sizeof(T) * 8 - (std::is_signed_v<T> ? 1 : 0);
  const Wide above = static_cast<Wide>(uint64_t{1} << (kBits - 1)) * 2;
  if (value >= above) return static_cast<T>(~(std::is_signed_v<T> ? uint64_t{1} << (sizeof(T) * 8 - 1) : 0));
  if (value < (std::is_signed_v<T> ? -above : Wide{0})) {
    return std::is_signed_v<T> ? static_cast<T>(uint64_t{1} << (sizeof(T) * 8 - 1)) : T{0};
  }
  return value == value ? static_cast<T>(value) : T{0};
}

template <class Wide, class T>
void narrow(Wide value, T* out) {
  if constexpr (std::is_same_v<T, flag_t>) {
    out->value = value != 0 ? 1 : 0;
  } else if constexpr (std::is_same_v<T, half_t> || std::is_same_v<T, bfloat_t>) {
    from_float(static_cast<float>(value), out);
  } else if constexpr (std::is_integral_v<T> && std::is_floating_point_v<Wide>) {
    *out = truncated<T>(value);
  } else {
    *out = static_cast<T>(value);
  }
}

template <class From, class To>
void convert(const From& from, To* to) {
  narrow(widened(from), to);
}
template <class From, class To>
void convert(const complex_t<From>& from, To* to) {
  narrow(from.real, to);
}
template <class From, class To>
void convert(const From& from, complex_t<To>* to) {
  *to = {static_cast<To>(widened(from)), 0};
}
template <class From, class To>
void convert(const complex_t<From>& from, complex_t<To>* to) {
  *to = {static_cast<To>(from.real), static_cast<To>(from.imaginary)};
}

// Calls function(T{}) like with_type(), but also accepts complex64 and complex128.
template <class Function>
bool with_any_type(const char* name, const Function& function) {
  if (name != nullptr && std::strcmp(name, "complex64") == 0) return function(complex_t<float>{}), true;
  if (name != nullptr && std::strcmp(name, "complex128") == 0) return function(complex_t<double>{}), true;
  return with_type(name, function);
}

// Calls function(begin, end) for parts of [0, count), on several threads if there is more than one part.
template <class Function>
void for_parts(int64_t count, const Function& function) {
  if (count == 0) return;
  parallel_for(ceil_div(count, kElementsPerTask), [&](int64_t task) {
    function(task * kElementsPerTask, smaller(count, (task + 1) * kElementsPerTask));
  });
}

// The strides of two broadcast operands along the axes of the output. Adjacent axes are merged into one axis if a
// single stride of each operand covers both.
struct Broadcast {
  int axes = 0;
  int64_t count = 1;
  int64_t sizes[kMostAxes];
  int64_t strides[2][kMostAxes];  // in elements; 0 on an axis along which the operand is repeated

  void add(int64_t size, int64_t a, int64_t b) {  // appends an axis, which becomes the innermost axis
    if (size == 1) return;
    count *= size;
    const int last = axes - 1;
    if (axes > 0 && strides[0][last] == a * size && strides[1][last] == b * size) {
      sizes[last] *= size;
      strides[0][last] = a;
      strides[1][last] = b;
      return;
    }
    sizes[axes] = size;
    strides[0][axes] = a;
    strides[1][axes++] = b;
  }

  // Finds the inputs of output element `index`. Sets `a` and `b` to their offsets in the first and in the second
  // operand, in elements.
  void locate(int64_t index, int64_t* a, int64_t* b) const {
    *a = *b = 0;
    for (int axis = axes - 1; axis >= 0; --axis) {
      const int64_t at = index % sizes[axis];
      index /= sizes[axis];
      *a += at * strides[0][axis];
      *b += at * strides[1][axis];
    }
  }
};

int check_operand(const Call& call, int operand, int out, int64_t (&strides)[kMostAxes]) {
  const int dims = call.ndims[out], missing = dims - call.ndims[operand];
  if (dims > kMostAxes || missing < 0) {
    return refuse_text(call.op, "argument %d has %d axes, the result %d; at most %d", operand, call.ndims[operand],
                       dims, kMostAxes);
  }
  int64_t stride = 1;
  for (int axis = dims - 1; axis >= 0; --axis) {
    const int64_t size = axis < missing ? 1 : call.dim(operand, axis - missing);
    if (size != 1 && size != call.dim(out, axis)) {
      return refuse_text(call.op, "axis %d of argument %d has %lld elements, that of the result %lld", axis - missing,
                         operand, static_cast<long long>(size), static_cast<long long>(call.dim(out, axis)));
    }
    strides[axis] = size == 1 ? 0 : stride;
    stride *= size;
  }
  return 0;
}

int find_broadcast(const Call& call, Broadcast* broadcast) {
  const int out = call.count - 1;
  int64_t strides[2][kMostAxes];
  for (const int operand : {0, 1}) {
    const int error = check_operand(call, operand, out, strides[operand]);
    if (error != 0) return error;
  }
  for (int axis = 0; axis < call.ndims[out]; ++axis) {
    broadcast->add(call.dim(out, axis), strides[0][axis], strides[1][axis]);
  }
  return 0;
}

// Computes `count` consecutive elements of the output. The step of an operand is 1, or 0 if all elements use the same
// value.
template <class T, class Out, class Function>
void run_row(const T* a, int64_t a_step, const T* b, int64_t b_step, Out* out, int64_t count,
             const Function& function) {
  if (a_step == 1 && b_step == 1) {
    for (int64_t i = 0; i < count; ++i) {
      one_by_one<kFast<T>>();
      narrow(function(widened(a[i]), widened(b[i])), out + i);
    }
  } else if (b_step == 0) {
    const auto right = widened(*b);
    for (int64_t i = 0; i < count; ++i) {
      one_by_one<kFast<T>>();
      narrow(function(widened(a[i * a_step]), right), out + i);
    }
  } else {
    const auto left = widened(*a);
    for (int64_t i = 0; i < count; ++i) {
      one_by_one<kFast<T>>();
      narrow(function(left, widened(b[i])), out + i);
    }
  }
}

template <class T, class Out, class Function>
void run_pairs(const Call& call, const Broadcast& broadcast, const Function& function) {
  const int inner = broadcast.axes - 1;
  const int64_t length = broadcast.axes == 0 ? 1 : broadcast.sizes[inner];
  const int64_t a_step = broadcast.axes == 0 ? 0 : broadcast.strides[0][inner];
  const int64_t b_step = broadcast.axes == 0 ? 0 : broadcast.strides[1][inner];
  for_parts(broadcast.count, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row_end = smaller(end, (begin / length + 1) * length);
      int64_t a, b;
      broadcast.locate(begin, &a, &b);
      run_row(call.as<T>(0) + a, a_step, call.as<T>(1) + b, b_step, call.as<Out>(call.count - 1) + begin,
              row_end - begin, function);
      begin = row_end;
    }
  });
}

enum class Result { kSame, kSameFloats, kFlags };

// Runs an operator with two inputs. Converts each pair of elements to the type of the computation (widened()) and calls
// `function`.
template <Result result, class Function>
int pairs(const Call& call, const Function& function) {
  const int out = call.count - 1;
  const char* wanted = result == Result::kFlags ? "bool" : call.dtypes[0];
  if (std::strcmp(call.dtypes[0], call.dtypes[1]) != 0 || !call.has_dtype(out, wanted)) {
    return refuse_text(call.op, "takes two tensors of one type and gives %s; they are %s and %s, the result %s", wanted,
                       call.dtypes[0], call.dtypes[1], call.dtypes[out]);
  }
  Broadcast broadcast;
  const int error = find_broadcast(call, &broadcast);
  if (error != 0) return error;
  bool fits = true;
  const bool known = with_type(call.dtypes[0], [&](auto type) {
    using T = decltype(type);
    constexpr bool kFloats = std::is_floating_point_v<decltype(widened(T{}))>;
    if constexpr (result == Result::kFlags) {
      run_pairs<T, flag_t>(call, broadcast, function);
    } else if constexpr (kFloats || result == Result::kSame) {
      run_pairs<T, T>(call, broadcast, function);
    } else {
      fits = false;
    }
  });
  return known && fits ? 0 : refuse_text(call.op, "tensors of %s are not supported", call.dtypes[0]);
}

// Converts an integer to uint64, so that sums and products wrap around on overflow instead of being undefined.
template <class T>
auto bits(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<uint64_t>(value);
  } else {
    return value;
  }
}

// Returns `a` if `takes_a`, otherwise `b`. If either is NaN, returns NaN.
template <class T>
T chosen(T a, T b, bool takes_a) {
  if (a != a) return a;
  return b != b || !takes_a ? b : a;
}

// Sets a flag for every axis that the call sums over.
int summed_axes(const Call& call, bool (&summed)[kMostAxes]) {
  const int dims = call.ndims[0];
  if (dims > kMostAxes) return refuse_text(call.op, "the input has %d axes; at most %d", dims, kMostAxes);
  const std::vector<int32_t> axes = integers(call, 1);
  const bool all = axes.empty() && !call.boolean(3);
  for (int axis = 0; axis < dims; ++axis) summed[axis] = all;
  for (const int32_t axis : axes) {
    if (axis < -dims || axis >= dims) return refuse_index(call.op, "axis", 0, axis, dims);
    summed[axis < 0 ? axis + dims : axis] = true;
  }
  return 0;
}

// The sizes and strides of some axes of a tensor: either all axes that a sum runs over, or all axes that it keeps.
struct Axes {
  int count = 0;
  int64_t total = 1;
  int64_t sizes[kMostAxes], strides[kMostAxes];

  void add(int64_t size, int64_t stride) {
    sizes[count] = size;
    strides[count++] = stride;
    total *= size;
  }
  int64_t locate(int64_t index) const {
    int64_t at = 0;
    for (int axis = count - 1; axis >= 0; --axis) {
      at += index % sizes[axis] * strides[axis];
      index /= sizes[axis];
    }
    return at;
  }
};

constexpr int64_t kLongSum = 128;  // from this number of elements on, a sum of float32 is computed in float64

// Sums consecutive elements in eight float64 lanes, then adds the lanes in order. In float32, a long sum would be too
// inaccurate for the sampler.
float long_sum(const float* from, int64_t count) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += from[i + lane];
  }
  for (; i < count; ++i) lanes[i % kLanes] += from[i];
  double total = 0;
  for (const double lane : lanes) total += lane;
  return static_cast<float>(total);
}

template <class T>
void sum_all(const Call& call, const Axes& kept, const Axes& summed) {
  if constexpr (std::is_same_v<T, float>) {
    if (summed.count == 1 && summed.strides[0] == 1 && summed.total >= kLongSum) {
      parallel_for(kept.total, [&](int64_t i) {
        call.as<T>(call.count - 1)[i] = long_sum(call.as<T>(0) + kept.locate(i), summed.total);
      });
      return;
    }
  }
  for_parts(kept.total, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* from = call.as<T>(0) + kept.locate(i);
      decltype(bits(widened(T{}))) total{0};
      for (int64_t k = 0; k < summed.total; ++k) total += bits(widened(from[summed.locate(k)]));
      narrow(total, call.as<T>(call.count - 1) + i);
    }
  });
}

}  // namespace

int plugin_add(const Call& call) {
  return pairs<Result::kSame>(call, [](auto a, auto b) { return static_cast<decltype(a)>(bits(a) + bits(b)); });
}
int plugin_sub(const Call& call) {
  return pairs<Result::kSame>(call, [](auto a, auto b) { return static_cast<decltype(a)>(bits(a) - bits(b)); });
}
int plugin_mul(const Call& call) {
  return pairs<Result::kSame>(call, [](auto a, auto b) { return static_cast<decltype(a)>(bits(a) * bits(b)); });
}
int plugin_real_div(const Call& call) {
  return pairs<Result::kSameFloats>(call, [](auto a, auto b) { return static_cast<decltype(a)>(a / b); });
}
int plugin_minimum(const Call& call) {
  return pairs<Result::kSame>(call, [](auto a, auto b) { return chosen(a, b, a < b); });
}
int plugin_maximum(const Call& call) {
  return pairs<Result::kSame>(call, [](auto a, auto b) { return chosen(a, b, a > b); });
}
int plugin_equal(const Call& call) {
  return pairs<Result::kFlags>(call, [](auto a, auto b) { return static_cast<int64_t>(a == b); });
}
int plugin_greater(const Call& call) {
  return pairs<Result::kFlags>(call, [](auto a, auto b) { return static_cast<int64_t>(a > b); });
}
int plugin_less_equal(const Call& call) {
  return pairs<Result::kFlags>(call, [](auto a, auto b) { return static_cast<int64_t>(a <= b); });
}
int plugin_logical_or(const Call& call) {
  return pairs<Result::kFlags>(call, [](auto a, auto b) { return static_cast<int64_t>(a != 0 || b != 0); });
}

// Runs Cast(x, dtype). A float is rounded towards zero to an integer. A value outside the range becomes the largest or
// smallest integer, and a NaN becomes 0. A complex number is converted by its real part.
int plugin_cast(const Call& call) {
  const int out = call.count - 1;
  bool known = call.size(0) == call.size(out);
  known = known && with_any_type(call.dtypes[0], [&](auto from) {
    known = with_any_type(call.dtypes[out], [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      for_parts(call.size(0), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          one_by_one<kFast<From> && kFast<To>>();
          convert(call.as<From>(0)[i], call.as<To>(out) + i);
        }
      });
    });
  });
  return known ? 0
               : refuse_text(call.op, "%lld elements of %s do not become %lld of %s",
                             static_cast<long long>(call.size(0)), call.dtypes[0],
                             static_cast<long long>(call.size(out)), call.dtypes[out]);
}

// Runs ReduceSum(x, axis, keep_dims, skip_mode). If `axis` is empty, sums over all axes, or over no axis with
// skip_mode. Adds in the order of the elements, in float32. Adds float64 in float64, and long rows of float32 with
// long_sum(). Sums of integers wrap around.
int plugin_reduce_sum(const Call& call) {
  const int out = call.count - 1;
  bool summed[kMostAxes];
  const int error = summed_axes(call, summed);
  if (error != 0) return error;
  int64_t strides[kMostAxes], stride = 1;
  for (int axis = call.ndims[0] - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= call.dim(0, axis);
  }
  Axes kept, over;
  for (int axis = 0; axis < call.ndims[0]; ++axis) (summed[axis] ? over : kept).add(call.dim(0, axis), strides[axis]);
  const bool known = std::strcmp(call.dtypes[0], call.dtypes[out]) == 0 && kept.total == call.size(out) &&
                     with_type(call.dtypes[0], [&](auto type) { sum_all<decltype(type)>(call, kept, over); });
  return known ? 0
               : refuse_text(call.op, "sums of %s are not %lld of %s", call.dtypes[0],
                             static_cast<long long>(call.size(out)), call.dtypes[out]);
}

}  // namespace llmk
