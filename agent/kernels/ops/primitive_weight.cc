#include "primitive_weight.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "../common/check.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

struct Kept {
  PrimitiveWeight weight;
  const void* blob;
};

std::shared_mutex kept_mutex;
std::unordered_map<const void*, Kept>& kept_weights() {
  // The map is allocated once and never freed, because other threads may still use it when the process ends.
  static auto* weights = new std::unordered_map<const void*, Kept>;
  return *weights;
}

bool is_float(ValueType type) { return type < ValueType::kInt8; }

WeightFormat blob_format(const PrimitiveWeight& weight) {
  if (is_float(weight.type)) return static_cast<WeightFormat>(weight.type);
  if (weight.type == ValueType::kInt4) return WeightFormat::kInt4WeightOnly;
  return weight.float_products != 0 ? WeightFormat::kInt8WeightOnly : WeightFormat::kInt8;
}

int64_t groups_of(const PrimitiveWeight& weight) {
  return weight.group == 0 ? 1 : ceil_div(weight.depth, weight.group);
}

// Converts `values`, the scales or offsets of a weight, to floats [columns, groups]. In memory, their order depends on
// whether the weight is transposed.
std::vector<float> column_floats(const PrimitiveWeight& weight, const void* values) {
  const int64_t groups = groups_of(weight);
  const auto scale_type = static_cast<DType>(weight.scale_type);
  std::vector<float> out(static_cast<size_t>(weight.columns * groups));
  for (int64_t column = 0; column < weight.columns; ++column) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = weight.transposed != 0 ? column * groups + g : g * weight.columns + column;
      out[static_cast<size_t>(column * groups + g)] = load_element(scale_type, values, from);
    }
  }
  return out;
}

int stored_integer(const PrimitiveWeight& weight, int64_t index) {
  if (weight.type == ValueType::kInt8) return static_cast<const int8_t*>(weight.values)[index];
  const int nibble = static_cast<const uint8_t*>(weight.values)[index / 2] >> (index % 2 * 4) & 15;
  return nibble < 8 ? nibble : nibble - 16;
}

constexpr int64_t kTile = 64;

// Transposes a matrix [depth, columns], tile by tile.
template <class T>
void turn(const T* from, int64_t depth, int64_t columns, T* to) {
  parallel_for(ceil_div(columns, kTile), [&](int64_t tile) {
    const int64_t end = smaller(columns, (tile + 1) * kTile);
    for (int64_t first = 0; first < depth; first += kTile) {
      for (int64_t column = tile * kTile; column < end; ++column) {
        for (int64_t k = first; k < smaller(depth, first + kTile); ++k) {
          to[column * depth + k] = from[k * columns + column];
        }
      }
    }
  });
}

// Returns the float weights transposed to [columns, depth], for pack_weight().
std::vector<char> turned_floats(const PrimitiveWeight& weight) {
  const bool wide = weight.type == ValueType::kFloat32;
  std::vector<char> out(static_cast<size_t>(weight.columns * weight.depth * (wide ? 4 : 2)));
  if (wide) {
    turn(static_cast<const uint32_t*>(weight.values), weight.depth, weight.columns,
         reinterpret_cast<uint32_t*>(out.data()));
  } else {
    turn(static_cast<const uint16_t*>(weight.values), weight.depth, weight.columns,
         reinterpret_cast<uint16_t*>(out.data()));
  }
  return out;
}

// Returns the integer weights as [columns, depth], for pack_weight(). An int4 weight becomes one byte with its value
// plus 8.
std::vector<int8_t> column_integers(const PrimitiveWeight& weight) {
  std::vector<int8_t> out(static_cast<size_t>(weight.columns * weight.depth));
  const int shift = weight.type == ValueType::kInt4 ? 8 : 0;
  parallel_for(ceil_div(weight.columns, kTile), [&](int64_t tile) {
    const int64_t end = smaller(weight.columns, (tile + 1) * kTile);
    for (int64_t from = 0; from < weight.depth; from += kTile) {
      for (int64_t column = tile * kTile; column < end; ++column) {
        for (int64_t k = from; k < smaller(weight.depth, from + kTile); ++k) {
          const int64_t index = weight.transposed != 0 ? column * weight.depth + k : k * weight.columns + column;
          out[static_cast<size_t>(column * weight.depth + k)] =
              static_cast<int8_t>(stored_integer(weight, index) + shift);
        }
      }
    }
  });
  return out;
}

// Checks the offsets. The offsets of int4 weights must correspond to zero points from 0 to 16. The offsets of int8
// weights must be 0.
int check_offsets(const char* op, const PrimitiveWeight& weight, const std::vector<float>& offsets) {
  for (const float offset : offsets) {
    const bool whole = offset == std::nearbyint(offset) && std::fabs(offset) <= 8;
    if (!whole || (weight.type == ValueType::kInt8 && offset != 0)) {
      return refuse_text(op, "an offset is %g; offsets are whole numbers from -8 to 8 with int4 and 0 with int8",
                         static_cast<double>(offset));
    }
  }
  return 0;
}

// Returns the zero points of int4 weights, or an empty vector if all are 8. An int4 value is stored as value + 8, so an
// offset corresponds to the zero point 8 - offset.
std::vector<uint8_t> zero_points(const std::vector<float>& offsets) {
  std::vector<uint8_t> out;
  if (std::all_of(offsets.begin(), offsets.end(), [](float offset) { return offset == 0; })) return out;
  out.reserve(offsets.size());
  for (const float offset : offsets) out.push_back(static_cast<uint8_t>(8 - offset));
  return out;
}

bool same(const PrimitiveWeight& a, const PrimitiveWeight& b) {
  return a.values == b.values && a.scales == b.scales && a.offsets == b.offsets && a.type == b.type &&
         a.scale_type == b.scale_type && a.transposed == b.transposed && a.float_products == b.float_products &&
         a.sum_offsets == b.sum_offsets && a.columns == b.columns && a.depth == b.depth && a.group == b.group;
}

}  // namespace

int64_t primitive_blob_bytes(const PrimitiveWeight& weight) {
  return packed_weight_bytes(blob_format(weight), weight.columns, weight.depth, weight.group, false,
                             weight.sum_offsets != nullptr);
}

int pack_primitive(const char* op, const PrimitiveWeight& weight, void* blob) {
  PackSource source{};
  source.format = blob_format(weight);
  source.columns = weight.columns;
  source.depth = weight.depth;
  source.group = weight.group;
  source.gate = weight.gated != 0 ? Gate::kSilu : Gate::kNone;
  if (is_float(weight.type)) {
    const std::vector<char> turned = weight.transposed == 0 ? turned_floats(weight) : std::vector<char>();
    source.source_dtype = static_cast<DType>(weight.type);
    source.values = weight.transposed == 0 ? turned.data() : weight.values;
    return pack_weight(source, blob);
  }
  if (weight.type == ValueType::kInt4 && weight.float_products == 0) {
    return refuse_text(op, "int4 weights are multiplied by floats only");
  }
  const std::vector<float> scales = column_floats(weight, weight.scales);
  const std::vector<float> offsets =
      weight.offsets == nullptr ? std::vector<float>() : column_floats(weight, weight.offsets);
  const int error = check_offsets(op, weight, offsets);
  if (error != 0) return error;
  const bool int4 = weight.type == ValueType::kInt4;
  const std::vector<uint8_t> zeros = zero_points(offsets);
  std::vector<int8_t> integers;
  source.values = weight.values;
  if (int4 || weight.transposed == 0) {
    integers = column_integers(weight);
    source.values = integers.data();
  }
  source.scales = scales.data();
  source.zeros = int4 && !zeros.empty() ? zeros.data() : nullptr;
  // pack_weight() accepts sum offsets only together with scales and offsets of the inputs, so it gets arrays of zeros
  // for these. No kernel reads the zeros, because the primitive QuantV2 has quantised the rows before the product.
  const std::vector<float> unread(weight.sum_offsets == nullptr ? 0 : static_cast<size_t>(weight.depth));
  if (weight.sum_offsets != nullptr) {
    source.input_inverses = unread.data();
    source.input_offsets = unread.data();
    source.sum_offsets = weight.sum_offsets;
  }
  return pack_weight(source, blob);
}

int keep_primitive(const PrimitiveWeight& weight, void* blob, int64_t blob_bytes) {
  const int64_t needed = primitive_blob_bytes(weight);
  if (needed == 0 || blob_bytes < needed) {
    return refuse_text("keep_primitive", "the blob has %lld bytes; the weight [%lld, %lld] needs %lld",
                       static_cast<long long>(blob_bytes), static_cast<long long>(weight.columns),
                       static_cast<long long>(weight.depth), static_cast<long long>(needed));
  }
  {
    const std::shared_lock<std::shared_mutex> lock(kept_mutex);
    if (kept_weights().count(weight.values) != 0) {  // If the weight is kept, its original memory may be inaccessible.
      return refuse_text("keep_primitive", "the weight at %p is kept already", weight.values);
    }
  }
  const int error = pack_primitive("keep_primitive", weight, blob);
  if (error != 0) return error;
  const std::unique_lock<std::shared_mutex> lock(kept_mutex);
  kept_weights().emplace(weight.values, Kept{weight, blob});
  return 0;
}

void forget_primitive(const void* values) {
  const std::unique_lock<std::shared_mutex> lock(kept_mutex);
  kept_weights().erase(values);
}

const void* kept_blob(const char* op, const PrimitiveWeight& weight, int* error) {
  const std::shared_lock<std::shared_mutex> lock(kept_mutex);
  const auto found = kept_weights().find(weight.values);
  *error = 0;
  if (found == kept_weights().end()) return nullptr;
  if (same(found->second.weight, weight)) return found->second.blob;
  *error = refuse_text(
      op,
      "the weight at %p, [%lld, %lld] with groups of %lld, is kept as [%lld, %lld] with groups of %lld, "
      "or with other scales",
      weight.values, static_cast<long long>(weight.columns), static_cast<long long>(weight.depth),
      static_cast<long long>(weight.group), static_cast<long long>(found->second.weight.columns),
      static_cast<long long>(found->second.weight.depth), static_cast<long long>(found->second.weight.group));
  return nullptr;
}

bool has_gated_blob(const void* values) {
  const std::shared_lock<std::shared_mutex> lock(kept_mutex);
  const auto found = kept_weights().find(values);
  return found != kept_weights().end() && header_of(found->second.blob).gated != 0;
}

}  // namespace llmk
