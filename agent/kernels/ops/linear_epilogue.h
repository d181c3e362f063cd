// The epilogue of a linear layer. It applies scales and bias to the sums of a tile. Then it stores the results, or
// computes the gated activation or the arg-max from them.
#pragma once
#include "../common/types.h"
#include "linear.h"
#include "gated.h"

namespace llmk::LLMK_ARCH {

// How the sums of a product are scaled: not at all, by the row's scale, by the column's scale, or by both.
//
// kIntegerBoth and kUnsignedBoth are for integer sums and use both scales. Before that, they add the sum offsets of
// static inputs, if there are any. Stored int8 weights are w + 128. The scaling kUnsignedBoth also subtracts the effect
// of this 128.
enum class Scaling : int { kNone, kRow, kColumn, kIntegerBoth, kUnsignedBoth };

struct LinearJob {
  const LinearArgs& args;
  PackedWeightHeader header;
  WeightShape shape;
  const uint8_t* panels;
  const float* bias;  // null: the weight has no bias
  const int32_t* sum_offsets;  // sum offsets of static inputs, or null
  const void* x;     // activations, in the type that the products read
  int64_t x_stride;  // distance between rows of x, in elements of this type
  QuantizedRows rows;
  uint64_t* best;  // [rows]: the largest best_key() of each row
  // Applies the epilogue to 32 columns of a panel: vectors 2 * half and 2 * half + 1. In a gated weight, these are the
  // gate and the factor `up`.
  void (*finish)(const LinearJob&, int64_t panel, int half, int64_t row, int64_t count, const float* sums);
  SplitRows split;  // on AMX with bfloat16: the products with A of adapters, for the products with B on tiles
};

// Returns a key for the arg-max: a larger value has a larger key. If two values are equal, the lower index gives the
// larger key. The high half of the key is the float's bits, changed so that they compare as unsigned integers in the
// order of the floats. The low half is 2^32 - 1 - index.
static inline uint64_t best_key(float value, int64_t index) {
  const uint32_t bits = float_to_bits(value + 0.0f);  // makes -0 equal to 0
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}
static inline int32_t best_index(uint64_t key) {
  return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}
static inline float best_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return bits_to_float((ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered);
}

// The key of a row with a NaN or an infinity, which is above the key of every number. The functions best_index() and
// best_value() return -1 and NaN for this key.
constexpr uint64_t kNotFiniteKey = 0xFFFFFFFF00000000u;

static inline void raise_best(uint64_t* best, uint64_t key) {
  uint64_t seen = __atomic_load_n(best, __ATOMIC_RELAXED);
  while (key > seen && !__atomic_compare_exchange_n(best, &seen, key, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Raises *best to the key of the largest of 32 values of a row, the outputs for half a panel. The product of a NaN or
// an infinity with zero is NaN. So the sum of these products, `poison`, shows whether one of the values is not finite.
static inline void find_best(const Vec (&values)[2], int64_t column, int64_t count, uint64_t* best) {
  Vec masked[2], poison_lanes = zero();
  LLMK_UNROLL
  for (int v = 0; v < 2; ++v) {
    const int64_t own = larger(count - v * kLanes, 0);
    masked[v] = keep_first(values[v], own, -INFINITY);
    poison_lanes = fma(keep_first(values[v], own, 0.0f), zero(), poison_lanes);
  }
  const float poison = sum(poison_lanes);
  if (poison != poison) return raise_best(best, kNotFiniteKey);
  const float most = largest(maximum(masked[0], masked[1]));
  if (best_key(most, column) <= __atomic_load_n(best, __ATOMIC_RELAXED)) return;
  for (int v = 0; v < 2; ++v) {
    const int lane = first_lane_equal(masked[v], most);
    if (lane < kLanes) return raise_best(best, best_key(most, column + v * kLanes + lane));
  }
}

template <Scaling kScaling>
LLMK_INLINE Vec scaled(const float* sum, Vec row_scale, Ints excess, const float* column_scales) {
  if constexpr (kScaling == Scaling::kRow) return mul(load(sum), row_scale);
  if constexpr (kScaling == Scaling::kColumn) return mul(load(sum), load(column_scales));
  if constexpr (kScaling == Scaling::kIntegerBoth || kScaling == Scaling::kUnsignedBoth) {
    return mul(mul(to_floats(add(load_ints(sum), excess)), row_scale), load(column_scales));
  }
  return load(sum);
}

// Describes half of a panel (32 columns): the scales of these columns, and their places in the output.
struct HalfPanel {
  const float* scales;  // scales of the columns; used only if the weight has no quantisation groups
  const float* bias;    // null: the weight has no bias
  const int32_t* sum_offsets;  // null: the weight has no static inputs
  int64_t first;        // index of the first of the 32 columns, in the order of the panels
  int64_t column[2], width[2];  // first output column of each vector, and number of output columns from there on
  bool whole;                   // true: every vector that is stored has 16 output columns

  HalfPanel(const LinearJob& job, int64_t panel, int half, int stores)
      : first(panel * kPanelColumns + 2 * half * kLanes) {
    const uint8_t* end = job.panels + panel * job.shape.panel_bytes + job.shape.steps * job.shape.step_bytes;
    scales = reinterpret_cast<const float*>(end) + 2 * half * kLanes;
    bias = job.bias == nullptr ? nullptr : job.bias + first;
    sum_offsets = job.sum_offsets == nullptr ? nullptr : job.sum_offsets + first;
    for (int v = 0; v < 2; ++v) {
      column[v] = vector_column(job.header, panel, 2 * half + v);
      width[v] = vector_end(job.header, 2 * half + v) - column[v];
    }
    whole = width[stores - 1] >= kLanes && width[0] >= kLanes;
  }
};

// Returns the values after rounding them to type T.
template <class T>
LLMK_INLINE Vec rounded_to(Vec values) {
  T lanes[kLanes];
  store(lanes, values);
  return load(lanes);
}

// Applies the epilogue to the 32 columns of half a panel, row by row. Rows of the matrix of sums are 64 floats apart,
// because a panel has 64 columns. The function choose_finish() below chooses the template arguments.
template <Scaling kScaling, bool kGated, bool kBest, class T>
struct Finish {
  static constexpr int kStores = kGated ? 1 : 2;

  // Applies the epilogue to `count` rows. `products` has the products with B of adapters, or is null (AdapterAddition).
  // Copies the members of `job` to local variables first. Otherwise the compiler would load them again after each
  // store, because the store could have changed them.
  static void finish_rows(const LinearJob& job, const HalfPanel& to, int64_t row, int64_t count, const float* sums,
                          const float* products = nullptr) {
    constexpr bool kByRow = kScaling != Scaling::kNone && kScaling != Scaling::kColumn;
    const float *scales = to.scales, *bias = to.bias, *row_scales = job.rows.scales;
    const int32_t *row_sums = job.rows.sums, *sum_offsets = to.sum_offsets;
    const int64_t columns[2] = {to.column[0], to.column[1]}, out_stride = job.args.out_stride;
    const LoraRows* lora = job.args.lora;
    AdapterAddition adapters(lora, to.first / kLanes, row, products);
    const Gate gate = static_cast<Gate>(job.header.gated);
    const bool whole = to.whole, stores = job.args.out != nullptr;
    const bool rounds = job.args.epilogue == Epilogue::kGatedRounded;
    T* out = static_cast<T*>(job.args.out) + row * out_stride;
    for (const int64_t end = row + count; row < end; ++row, sums += kPanelColumns, out += out_stride) {
      const Vec row_scale = broadcast(kByRow ? row_scales[row] : 1.0f);
      const Ints excess = broadcast_int(kScaling == Scaling::kUnsignedBoth ? -128 * row_sums[row] : 0);
      Vec values[2];
      LLMK_UNROLL
      for (int v = 0; v < 2; ++v) {
        const Ints offset = sum_offsets == nullptr ? excess : add(excess, load_ints(sum_offsets + v * kLanes));
        values[v] = scaled<kScaling>(sums + v * kLanes, row_scale, offset, scales + v * kLanes);
      }
      if (lora != nullptr) adapters.add_to(row, end, values);
      if (bias != nullptr) {
        LLMK_UNROLL
        for (int v = 0; v < 2; ++v) values[v] = add(values[v], load(bias + v * kLanes));
      }
      if constexpr (kBest) {
        find_best(values, to.first, job.header.columns - to.first, job.best + row);
        if (!stores) continue;
      }
      if constexpr (kGated) {
        if (rounds) {
          LLMK_UNROLL
          for (int v = 0; v < 2; ++v) values[v] = rounded_to<T>(values[v]);
        }
      }
      LLMK_UNROLL
      for (int v = 0; v < kStores; ++v) {
        const Vec value = kGated ? gated_lanes(gate, values[0], values[1]) : values[v];
        if (whole) {
          store(out + columns[v], value);
        } else {
          store_part(out + columns[v], value, to.width[v]);
        }
      }
    }
  }

  static void finish_half(const LinearJob& job, int64_t panel, int half, int64_t row, int64_t count,
                          const float* sums) {
    finish_rows(job, HalfPanel(job, panel, half, kStores), row, count, sums);
  }
};

// Calls visit(Finish<...>()), with the template arguments that the epilogue and the type of the output require.
template <Scaling kScaling, class T, class Visit>
static inline auto choose_epilogue(const LinearJob& job, const Visit& visit) {
  const Epilogue epilogue = job.args.epilogue;
  const bool is_gated = epilogue == Epilogue::kGated || epilogue == Epilogue::kGatedRounded;
  return is_gated ? visit(Finish<kScaling, true, false, T>()) : visit(Finish<kScaling, false, false, T>());
}

template <Scaling kScaling, class Visit>
static inline auto choose_finish(const LinearJob& job, const Visit& visit) {
  if (job.best != nullptr) return visit(Finish<kScaling, false, true, float>());
  if (job.args.epilogue == Epilogue::kStoreFloat || job.args.dtype == DType::kFloat32) {
    return choose_epilogue<kScaling, float>(job, visit);
  }
  return job.args.dtype == DType::kFloat16 ? choose_epilogue<kScaling, half_t>(job, visit)
                                           : choose_epilogue<kScaling, bfloat_t>(job, visit);
}

// Sets job->finish, once per product, to the function that applies the epilogue.
template <Scaling kScaling>
static inline void set_finish(LinearJob* job) {
  job->finish = choose_finish<kScaling>(*job, [](auto finish) { return &decltype(finish)::finish_half; });
}

// Applies the epilogue to both halves of a panel, for rows [row, row + count). `sums` is [count][64].
static inline void finish_tile(const LinearJob& job, int64_t panel, int64_t row, int64_t count, const float* sums) {
  for (int half = 0; half < 2; ++half) job.finish(job, panel, half, row, count, sums + 2 * half * kLanes);
}

}  // namespace llmk::LLMK_ARCH
