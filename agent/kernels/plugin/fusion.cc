#include "fusion.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../ops/checks.h"
#include "../ops/laid_out_caches.h"
#include "../ops/primitive_weight.h"
#include "quantised_fusion.h"

namespace llmk {
namespace {

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
  bool is_laid_out;       // the caches have the layout of laid_out_caches.h
  LaidOutRows laid_out[2];  // keys and values; only set if is_laid_out
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
  const int64_t slot = args.is_laid_out ? -1 : args.slots[token];  // laid out caches are written afterwards
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
  args.is_laid_out = is_laid_out(args.caches[0]);
  if (args.is_laid_out) {
    for (const bool is_key : {true, false}) {
      args.laid_out[is_key ? 0 : 1] = {is_key ? static_cast<const char*>(args.key.out) : args.values,
                                       is_key ? args.width_bytes : args.row_bytes, args.slots,
                                       args.caches[is_key ? 0 : 1], cache.dim(kKeyCache, 1), cache.dim(kKeyCache, 2),
                                       cache.dim(kKeyCache, 3), is_key};
    }
  }
  const int64_t per_task =
      args.is_laid_out ? laid_out_task(tokens) : larger(1, 16384 / split.dim(kSplitInput, 1));
  parallel_for(ceil_div(tokens, per_task), [&](int64_t task) {
    const int64_t begin = task * per_task, end = smaller(begin + per_task, tokens);
    for (int64_t token = begin; token < end; ++token) rotate_and_store(args, token);
    for (int i = 0; args.is_laid_out && i < 2; ++i) write_laid_out(args.laid_out[i], begin, end);
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
    if (is(launch, "AddRmsNorm")) return quantised_at(first, launch.values.size() - 3, run_norm_quantise);
    if (is(launch, "RmsNorm")) return quantised_at(first, launch.values.size() - 2, run_norm_quantise);
    if (is(launch, "Swiglu")) return quantised_at(first, launch.values.size() - 1, run_swiglu_quantise);
    if (is(launch, "DynamicQuantExt")) return with_product(begin(first, run_quantise));
    const bool multiplies =
        is(launch, "MatMul") || is(launch, "QuantBatchMatmul") || is(launch, "WeightQuantBatchMatmul");
    return multiplies ? with_swiglu(begin(first, run_product)) : Fusion{};
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

  static Fusion begin(int first, FusedFunction run) { return {nullptr, 1, {first}, run, {false, false}}; }

  // Adds the launch `next` to the fusion, and returns the result. Returns the unchanged fusion in two cases: the
  // launches cannot be fused, or a launch outside the fusion reads the result `output` of the fusion's last launch.
  Fusion with(const Fusion& fusion, int next, size_t output) const {
    if (next < 0 || outlives(fusion.last(), output, next)) return fusion;
    Fusion longer = fusion;
    longer.parts[longer.count++] = next;
    return can_move(longer) ? longer : fusion;
  }

  Fusion quantised_at(int first, size_t output, FusedFunction run) const {
    const int quant = reader("DynamicQuantExt", kQuantX, first, output);
    if (quant < 0) return {};
    const Fusion fusion = with(begin(first, run), quant, output);
    return fusion.count > 1 ? with_product(fusion) : Fusion{};
  }

  // Adds the QuantBatchMatmul that multiplies the rows of DynamicQuantExt, the last launch of the fusion.
  Fusion with_product(const Fusion& fusion) const {
    const int quant = fusion.last();
    if (of(quant).values.size() != kQuantCount) return fusion;
    const int product = reader("QuantBatchMatmul", kProductX, quant, kQuantY);
    if (product < 0 || reader("QuantBatchMatmul", kProductRowScales, quant, kQuantScale) != product ||
        outlives(quant, kQuantScale, product)) {
      return fusion;
    }
    const Fusion longer = with(fusion, product, kQuantY);
    return longer.count > fusion.count ? with_swiglu(longer) : fusion;
  }

  // Adds the Swiglu that reads the product, the last launch of the fusion.
  Fusion with_swiglu(const Fusion& fusion) const {
    const Launch& product = of(fusion.last());
    const size_t output = product.values.size() - 1;
    if (product.values[kProductWeight] >= 0 || !has_gated_blob(product.data[kProductWeight])) return fusion;
    return with(fusion, reader("Swiglu", 0, fusion.last(), output), output);
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
    return checked({nullptr, 3, {first, rotary, cache}, rotary_cache, {keeps_key, keeps_value}});
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
    return checked({nullptr, 3, {first, cast, product}, chunk_mask, {false, false}});
  }

  Recording* recording_;
  std::vector<Launch>& launches_;
};

// Returns the operators of a fusion, joined by '+'. The text is never freed, because the agent reads it later.
const char* name_of(const Recording& recording, const Fusion& fusion) {
  static std::mutex names_mutex;
  static std::set<std::string> names;
  std::string name;
  for (int part = 0; part < fusion.count; ++part) {
    if (part > 0) name += '+';
    name += recording.launches[static_cast<size_t>(fusion.parts[part])].op;
  }
  const std::lock_guard<std::mutex> lock(names_mutex);
  return names.insert(name).first->c_str();
}

}  // namespace

void find_fusions(Recording* recording) {
  const Finder finder(recording);
  recording->fusions.clear();
  recording->fused.assign(recording->launches.size(), -1);
  for (size_t first = 0; first < recording->launches.size(); ++first) {
    Fusion fusion = finder.at(static_cast<int>(first));
    const bool is_free = std::all_of(fusion.parts, fusion.parts + fusion.count, [recording](int part) {
      return recording->fused[static_cast<size_t>(part)] < 0;
    });
    if (fusion.count < 2 || !is_free) continue;
    fusion.name = name_of(*recording, fusion);
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
