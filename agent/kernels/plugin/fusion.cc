#include "fusion.h"

#include <algorithm>
#include <cstring>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../ops/checks.h"
#include "packed_product.h"

namespace llmk {
namespace {

bool is(const Launch& launch, const char* op) { return std::strcmp(launch.op, op) == 0; }

// Runs the launches of a fusion one after the other, without fusing them. A fused function calls this if it does not
// support the sizes of the step.
int run_apart(Launch* const* parts, int count) {
  for (int i = 0; i < count; ++i) {
    const int error = parts[i]->run();
    if (error != 0) return error;
  }
  return 0;
}

// Fuses SplitWithSize, ApplyRotaryPosEmb and ReshapeAndCache. Rotates queries and keys directly from the rows of qkv,
// the product of the linear layer, and copies keys and values to the cache. So SplitWithSize does not have to copy each
// row.
enum { kSplitInput, kSplitQuery = 3, kSplitKey, kSplitValue, kSplitCount };
enum { kRotaryCos = 2, kRotarySin, kRotaryFormat = 5, kRotaryQuery, kRotaryKey, kRotaryCount };
enum { kCacheKey, kCacheValue, kKeyCache, kValueCache, kSlots, kCacheOut, kCacheCount };

struct RotaryCacheArgs {
  RotaryArgs query, key;
  const char* values;     // address of the attention values in the first row of qkv
  char* kept_values;      // copy of the values; null: no later launch reads them
  char* caches[2];
  const int32_t* slots;
  int64_t row_bytes;      // bytes of a row of qkv
  int64_t width_bytes;    // bytes of the keys (or values) of a token
  bool keeps_key;         // true: a later launch reads the rotated keys
};

void rotate_and_store(const RotaryCacheArgs& args, int64_t token) {
  RotaryArgs query = args.query, key = args.key;
  for (RotaryArgs* each : {&query, &key}) {
    each->tokens = 1;
    const int64_t cos_bytes = token * each->dim * size_of(each->table_dtype);
    each->cos = static_cast<const char*>(each->cos) + cos_bytes;
    each->sin = static_cast<const char*>(each->sin) + cos_bytes;
    each->x = static_cast<const char*>(each->x) + token * args.row_bytes;
    each->out = static_cast<char*>(each->out) + token * each->heads * each->dim * size_of(each->dtype);
  }
  kernels().rotary(query);
  const int64_t slot = args.slots[token];
  char* place = slot < 0 ? nullptr : args.caches[0] + slot * args.width_bytes;
  if (!args.keeps_key && place != nullptr) key.out = place;
  kernels().rotary(key);
  if (place != nullptr && key.out != place) std::memcpy(place, key.out, static_cast<size_t>(args.width_bytes));
  const char* value = args.values + token * args.row_bytes;
  const size_t bytes = static_cast<size_t>(args.width_bytes);
  if (slot >= 0) std::memcpy(args.caches[1] + slot * args.width_bytes, value, bytes);
  if (args.kept_values != nullptr) std::memcpy(args.kept_values + token * args.width_bytes, value, bytes);
}

int rotary_cache(Launch* const* parts, const Fusion& fusion) {
  const Call split = parts[0]->call(), rotary = parts[1]->call(), cache = parts[2]->call();
  const int64_t tokens = split.dim(kSplitInput, 0), dim = rotary.dim(kRotaryCos, -1);
  const int64_t query = split.dim(kSplitQuery, -1), key = split.dim(kSplitKey, -1), value = split.dim(kSplitValue, -1);
  const DType dtype = split.dtype(kSplitInput);
  const int64_t element = size_of(dtype);
  const bool applies =
      split.ndims[kSplitInput] == 2 && dim >= 2 && rotary.size(kRotaryCos) == tokens * dim && query % dim == 0 &&
      key % dim == 0 && key == value && query + 2 * key == split.dim(kSplitInput, 1) &&
      rotary.integer(kRotaryFormat) >= 2 && cache.is_tensor(kKeyCache) && cache.is_tensor(kValueCache) &&
      cache.is_tensor(kSlots) && cache.has_dtype(kSlots, "int32") && cache.size(kSlots) == tokens &&
      cache.ndims[kKeyCache] == 4 && cache.dtype(kKeyCache) == dtype && cache.dtype(kValueCache) == dtype &&
      cache.size(kKeyCache, 2) == key && cache.size(kKeyCache) == cache.size(kValueCache);
  if (!applies) return run_apart(parts, fusion.count);
  const int error = check_slots(cache.op, cache.as<int32_t>(kSlots), tokens, cache.size(kKeyCache, 0, 2));
  if (error != 0) return error;
  RotaryCacheArgs args{};
  args.query.x = split.data[kSplitInput];
  args.query.out = rotary.data[kRotaryQuery];
  args.query.cos = rotary.data[kRotaryCos];
  args.query.sin = rotary.data[kRotarySin];
  args.query.dim = dim;
  args.query.heads = query / dim;
  args.query.dtype = dtype;
  args.query.table_dtype = rotary.dtype(kRotaryCos);
  args.query.interleaved = rotary.integer(kRotaryFormat) % 2 == 1;
  args.key = args.query;
  args.key.x = split.as<char>(kSplitInput) + query * element;
  args.key.out = rotary.data[kRotaryKey];
  args.key.heads = key / dim;
  args.values = split.as<char>(kSplitInput) + (query + key) * element;
  args.kept_values = fusion.keeps[1] ? split.as<char>(kSplitValue) : nullptr;
  args.keeps_key = fusion.keeps[0];
  args.caches[0] = cache.as<char>(kKeyCache);
  args.caches[1] = cache.as<char>(kValueCache);
  args.slots = cache.as<int32_t>(kSlots);
  args.row_bytes = split.dim(kSplitInput, 1) * element;
  args.width_bytes = key * element;
  const int64_t per_task = larger(1, 16384 / split.dim(kSplitInput, 1));
  parallel_for(ceil_div(tokens, per_task), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * per_task, tokens);
    for (int64_t token = task * per_task; token < end; ++token) rotate_and_store(args, token);
  });
  return 0;
}

// Fuses Greater, Cast and Mul, which compute the attention mask of a step with chunks. Their inputs are the column
// numbers [1, C] and the row numbers [T, 1]. The mask [T, C] is `hidden` where the column number is greater than the
// row number, otherwise `shown`. The fused function does not write the results of Greater and Cast.
enum { kColumns, kRows, kGreaterOut, kGreaterCount };
enum { kFactorLeft, kFactorRight, kProduct, kMulCount };

template <class T>
void write_mask(const Call& greater, const void* factor, void* out) {
  const int64_t rows = greater.size(kRows), columns = greater.size(kColumns);
  const float masked = to_float(*static_cast<const T*>(factor));
  T hidden, shown;
  from_float(1.0F * masked, &hidden);
  from_float(0.0F * masked, &shown);
  const int32_t* positions = greater.as<int32_t>(kColumns);
  parallel_for(rows, [&](int64_t row) {
    const int32_t own = greater.as<int32_t>(kRows)[row];
    T* to = static_cast<T*>(out) + row * columns;
    for (int64_t i = 0; i < columns; ++i) to[i] = positions[i] > own ? hidden : shown;
  });
}

int chunk_mask(Launch* const* parts, const Fusion& fusion) {
  const Call greater = parts[0]->call(), product = parts[2]->call();
  const int factor = parts[2]->values[kFactorLeft] == parts[1]->values.back() ? kFactorRight : kFactorLeft;
  const int64_t rows = greater.size(kRows), columns = greater.size(kColumns);
  const bool applies = greater.has_dtype(kColumns, "int32") && greater.has_dtype(kRows, "int32") &&
                       greater.ndims[kColumns] == 2 && greater.ndims[kRows] == 2 && greater.dim(kColumns, 0) == 1 &&
                       greater.dim(kRows, 1) == 1 && product.size(factor) == 1 &&
                       product.size(kProduct) == rows * columns && product.dtype(factor) == product.dtype(kProduct);
  if (!applies) return run_apart(parts, fusion.count);
  void* out = product.data[kProduct];
  if (product.dtype(factor) == DType::kFloat32) write_mask<float>(greater, product.data[factor], out);
  if (product.dtype(factor) == DType::kFloat16) write_mask<half_t>(greater, product.data[factor], out);
  if (product.dtype(factor) == DType::kBFloat16) write_mask<bfloat_t>(greater, product.data[factor], out);
  return product.dtype(factor) == DType::kUnsupported ? run_apart(parts, fusion.count) : 0;
}

// Fuses DynamicQuantExt with the operator before it: RmsNorm, AddRmsNorm or Swiglu. Computes one row at a time and
// quantises it immediately, while it is still in the processor's cache.
enum { kQuantX, kSmoothScales, kQuantY, kQuantScale, kQuantCount };

// Quantises rows to int8, for the operator `quant` (DynamicQuantExt). For each row, calls write_row(row, values), which
// must write the numbers of the row to `values`. Returns 0.
template <class RowFunction>
int quantise_rows(const Call& quant, int64_t rows, int64_t depth, const RowFunction& write_row) {
  const DType dtype = quant.dtype(kQuantX);
  PackedWeightHeader header{};
  header.format = WeightFormat::kInt8;
  header.depth = depth;
  int8_t* y = quant.as<int8_t>(kQuantY);
  const QuantizedRows result = allocate_rows(y, quant.as<float>(kQuantScale), rows, depth);
  for_rows(rows, depth, [&](int64_t row) {
    void* values = thread_scratch(kScratchNormed, depth * size_of(dtype));
    write_row(row, values);
    kernels().quantize_row(dtype, values, result, row, &header);
    if (result.values != y) {
      std::memcpy(y + row * depth, result.values + row * result.stride, static_cast<size_t>(depth));
    }
  });
  return 0;
}

bool quantises_rows_of(const Call& quant, int64_t rows, int64_t depth) {
  return !quant.is_tensor(kSmoothScales) && depth > 0 && quant.dim(kQuantX, -1) == depth &&
         quant.size(kQuantX) == rows * depth && quant.dtype(kQuantX) != DType::kUnsupported;
}

int norm_quant(Launch* const* parts, const Fusion& fusion) {
  const Call norm = parts[0]->call(), quant = parts[1]->call();
  const bool has_residual = is(*parts[0], "AddRmsNorm");
  const int gamma = has_residual ? 2 : 1, y = norm.count - (has_residual ? 3 : 2);
  const int64_t width = norm.size(gamma), rows = width == 0 ? 0 : norm.size(0) / width;
  const bool applies = rows > 0 && norm.size(0) == rows * width && quantises_rows_of(quant, rows, width) &&
                       norm.dtype(gamma) != DType::kUnsupported && norm.dtype(0) == quant.dtype(kQuantX) &&
                       (!has_residual || (norm.dtype(1) == norm.dtype(0) && norm.size(1) == norm.size(0)));
  if (!applies) return run_apart(parts, fusion.count);
  RmsNormArgs all{};
  all.rows = 1;
  all.width = width;
  all.gamma = norm.data[gamma];
  all.epsilon = static_cast<float>(norm.real(gamma + 1));
  all.dtype = norm.dtype(0);
  all.gamma_dtype = norm.dtype(gamma);
  const int64_t bytes = width * size_of(all.dtype);
  return quantise_rows(quant, rows, width, [&](int64_t row, void* values) {
    RmsNormArgs args = all;
    args.x = norm.as<char>(0) + row * bytes;
    args.residual = has_residual ? norm.as<char>(1) + row * bytes : nullptr;
    args.sum = has_residual ? norm.as<char>(y + 2) + row * bytes : nullptr;
    args.rstd = norm.as<float>(y + 1) + row;
    args.y = values;
    kernels().rms_norm(args);
  });
}

int swiglu_quant(Launch* const* parts, const Fusion& fusion) {
  const Call swiglu = parts[0]->call(), quant = parts[1]->call();
  const int out = swiglu.count - 1;
  const int64_t inner = swiglu.dim(out, -1), rows = inner == 0 ? 0 : swiglu.size(out) / inner;
  const int64_t axis = swiglu.integer(1) < 0 ? swiglu.integer(1) + swiglu.ndims[0] : swiglu.integer(1);
  // Does not fuse if there are fewer rows than threads, because an unfused Swiglu can divide a row among several
  // threads.
  const bool applies = axis == swiglu.ndims[0] - 1 && rows >= num_threads() && swiglu.dim(0, -1) == 2 * inner &&
                       swiglu.size(0) == 2 * rows * inner && quantises_rows_of(quant, rows, inner) &&
                       swiglu.dtype(0) == quant.dtype(kQuantX);
  if (!applies) return run_apart(parts, fusion.count);
  const int64_t bytes = 2 * inner * size_of(swiglu.dtype(0));
  return quantise_rows(quant, rows, inner, [&](int64_t row, void* values) {
    SwigluArgs args{};
    args.input = swiglu.as<char>(0) + row * bytes;
    args.out = values;
    args.outer = 1;
    args.inner = inner;
    args.dtype = swiglu.dtype(0);
    kernels().swiglu(args);
  });
}

constexpr int kFarthest = 8;  // maximum distance, in launches, between two parts of a fusion

// Finds the launches that can be fused: chains in which each launch reads the result of the previous one.
class Finder {
 public:
  explicit Finder(Recording* recording) : recording_(recording), launches_(recording->launches) {}

  // Returns the fusion that begins at launch `first`. If no fusion begins there, the returned count is 0.
  Fusion at(int first) const {
    const Launch& launch = of(first);
    if (is(launch, "SplitWithSize") && launch.values.size() == kSplitCount) return rotary_at(first);
    if (is(launch, "Greater") && launch.values.size() == kGreaterCount) return mask_at(first);
    const bool adds = is(launch, "AddRmsNorm");
    if (adds || is(launch, "RmsNorm")) {
      const char* name = adds ? "AddRmsNorm+DynamicQuantExt" : "RmsNorm+DynamicQuantExt";
      return quantised_at(first, launch.values.size() - (adds ? 3 : 2), name, norm_quant);
    }
    if (is(launch, "Swiglu")) {
      return quantised_at(first, launch.values.size() - 1, "Swiglu+DynamicQuantExt", swiglu_quant);
    }
    return {};
  }

  // Extends the lifetime of each value that a fusion reads or writes to all launches of the fusion. So these values do
  // not share memory.
  void extend(const Fusion& fusion) const {
    for (int part = 0; part < fusion.count; ++part) {
      for (const int index : of(fusion.parts[part]).values) {
        if (index < 0) continue;
        Value& value = recording_->values[static_cast<size_t>(index)];
        if (value.launch >= fusion.first() && value.first > fusion.first()) value.first = fusion.first();
        if (value.last < fusion.last()) value.last = fusion.last();
      }
    }
  }

 private:
  Launch& of(int number) const { return launches_[static_cast<size_t>(number)]; }

  // Returns the number of the next launch of operator `op` whose input `input` is output `output` of launch `writer`.
  // Returns -1 if there is none among the next kFarthest launches.
  int reader(const char* op, size_t input, int writer, size_t output) const {
    const int value = of(writer).values[output];
    const int end = static_cast<int>(launches_.size());
    for (int number = writer + 1; value >= 0 && number < end && number <= writer + kFarthest; ++number) {
      const Launch& launch = of(number);
      if (!is(launch, op) || input >= launch.values.size()) continue;
      if (launch.values[input] == value && launch.offsets[input] == 0) return number;
    }
    return -1;
  }

  // Returns true if output `output` of launch `writer` is needed after launch `last`: by a later launch or as a result.
  bool outlives(int writer, size_t output, int last) const {
    const int value = of(writer).values[output];
    const auto is_value = [value](const Result& result) { return result.value == value; };
    const std::vector<Result>& results = recording_->results;
    return std::any_of(results.begin(), results.end(), is_value) ||
           recording_->values[static_cast<size_t>(value)].last > last;
  }

  // Returns true if all launches of a fusion can run at the place of the last one. Before this place, no launch outside
  // the fusion may read their results. No launch of the fusion may be a collective.
  bool can_move(const Fusion& fusion) const {
    for (int number = fusion.first(); number <= fusion.last(); ++number) {
      const bool is_part = std::find(fusion.parts, fusion.parts + fusion.count, number) != fusion.parts + fusion.count;
      const Launch& launch = of(number);
      if (is_part ? launch.is_shared : reads_one_of(launch, fusion)) return false;
    }
    return true;
  }

  bool reads_one_of(const Launch& launch, const Fusion& fusion) const {
    return std::any_of(launch.values.begin(), launch.values.begin() + launch.inputs, [&](int index) {
      if (index < 0) return false;
      const int writer = recording_->values[static_cast<size_t>(index)].launch;
      return std::find(fusion.parts, fusion.parts + fusion.count, writer) != fusion.parts + fusion.count;
    });
  }

  Fusion checked(const Fusion& fusion) const { return can_move(fusion) ? fusion : Fusion{}; }

  Fusion quantised_at(int first, size_t output, const char* name, int (*run)(Launch* const*, const Fusion&)) const {
    const int quant = reader("DynamicQuantExt", kQuantX, first, output);
    if (quant < 0 || of(quant).values.size() != kQuantCount || outlives(first, output, quant)) return {};
    return checked({name, 2, {first, quant, -1}, run, {false, false}});
  }

  Fusion rotary_at(int first) const {
    const int rotary = reader("ApplyRotaryPosEmb", 0, first, kSplitQuery);
    if (rotary < 0 || of(rotary).values.size() != kRotaryCount) return {};
    const int cache = reader("ReshapeAndCache", kCacheKey, rotary, kRotaryKey);
    if (cache < 0 || of(cache).values.size() != kCacheCount) return {};
    const bool fits = reader("ApplyRotaryPosEmb", 1, first, kSplitKey) == rotary &&
                      of(cache).values[kCacheValue] == of(first).values[kSplitValue] &&
                      of(cache).offsets[kCacheValue] == 0 && of(cache).values[kKeyCache] < 0 &&
                      of(cache).values[kValueCache] < 0 && !outlives(first, kSplitQuery, cache) &&
                      !outlives(first, kSplitKey, cache);
    if (!fits) return {};
    const bool keeps_key = outlives(rotary, kRotaryKey, cache), keeps_value = outlives(first, kSplitValue, cache);
    return checked({"SplitWithSize+ApplyRotaryPosEmb+ReshapeAndCache", 3, {first, rotary, cache}, rotary_cache,
                    {keeps_key, keeps_value}});
  }

  Fusion mask_at(int first) const {
    const int cast = reader("Cast", 0, first, kGreaterOut);
    if (cast < 0) return {};
    const size_t converted = of(cast).values.size() - 1;
    const int left = reader("Mul", kFactorLeft, cast, converted), right = reader("Mul", kFactorRight, cast, converted);
    const int product = left >= 0 ? left : right;
    if (product < 0 || of(product).values.size() != kMulCount || outlives(first, kGreaterOut, cast) ||
        outlives(cast, converted, product)) {
      return {};
    }
    return checked({"Greater+Cast+Mul", 3, {first, cast, product}, chunk_mask, {false, false}});
  }

  Recording* recording_;
  std::vector<Launch>& launches_;
};

}  // namespace

void find_fusions(Recording* recording) {
  const Finder finder(recording);
  recording->fusions.clear();
  recording->fused.assign(recording->launches.size(), -1);
  for (size_t first = 0; first < recording->launches.size(); ++first) {
    const Fusion fusion = finder.at(static_cast<int>(first));
    const bool is_free = std::all_of(fusion.parts, fusion.parts + fusion.count, [recording](int part) {
      return recording->fused[static_cast<size_t>(part)] < 0;
    });
    if (fusion.count == 0 || !is_free) continue;
    for (int part = 0; part < fusion.count; ++part) {
      recording->fused[static_cast<size_t>(fusion.parts[part])] = static_cast<int>(recording->fusions.size());
    }
    recording->fusions.push_back(fusion);
  }
  for (const Fusion& fusion : recording->fusions) finder.extend(fusion);
}

int run_fusion(Recording* recording, const Fusion& fusion) {
  Launch* parts[kMostFused] = {};
  for (int i = 0; i < fusion.count; ++i) parts[i] = &recording->launches[static_cast<size_t>(fusion.parts[i])];
  return fusion.run(parts, fusion);
}

}  // namespace llmk
