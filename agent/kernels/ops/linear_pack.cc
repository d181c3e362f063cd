// Packs the weights of linear layers into blobs, and checks blobs. linear.h describes their layout.
#include <cmath>

#include "../common/check.h"
#include "../common/kernel_table.h"
#include "linear.h"

namespace llmk {
namespace {

constexpr int64_t kLargestIntegerDepth = 65536;  // 255 * 127 * depth must fit an int32

const char* problem_of_sizes(WeightFormat format, int64_t columns, int64_t depth, int64_t group) {
  if (!is_known(format)) return "the format is not known";
  if (columns <= 0 || depth <= 0) return "columns and depth must be positive";
  if (columns >= int64_t{1} << 31 || depth >= int64_t{1} << 31) return "columns and depth must be below 2^31";
  if (group < 0 || group % 8 != 0) return "the group must be 0 or a positive multiple of 8";
  if (group != 0 && !is_integer(format)) return "only integer formats have groups";
  if (is_integer(format) && depth > kLargestIntegerDepth) return "the depth of integer weights must not exceed 65536";
  return nullptr;
}

const char* problem_of_static_inputs(WeightFormat format, int64_t group) {
  return format == WeightFormat::kInt8 && group == 0 ? nullptr : "only int8 weights without groups have static inputs";
}

float source_value(const PackSource& source, int64_t index) {
  return load_element(source.source_dtype, source.values, index);
}

// The quantised weights of one column in one group: the integers as they are stored (int8: w + 128), the scale and the
// zero point.
struct GroupCodes {
  uint8_t codes[kLargestIntegerDepth];
  float scale;
  uint8_t zero;
};

uint8_t code_of(float value, float inverse, int zero, int lowest, int highest) {
  const float rounded = std::nearbyintf(value * inverse) + static_cast<float>(zero);
  return static_cast<uint8_t>(std::fmin(std::fmax(rounded, static_cast<float>(lowest)), static_cast<float>(highest)));
}

float inverse_of(float scale) {
  const float inverse = 1.0f / scale;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// Quantises the floats of a column at depths [begin, end), rounding to nearest.
void quantize_group(const PackSource& source, int64_t column, int64_t begin, int64_t end, GroupCodes* out) {
  const int64_t base = column * source.depth;
  float low = 0, high = 0;
  // Uses comparisons instead of fmin and fmax, because GCC 12 for Arm fails here with an internal error. NaN is
  // ignored, as with fmin and fmax.
  for (int64_t k = begin; k < end; ++k) {
    const float value = source_value(source, base + k);
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  const bool nibbles = has_nibbles(source.format);
  const float magnitude = std::fmax(-low, high);
  const int largest = (1 << (traits_of(source.format).bits - 1)) - 1;
  int zero = nibbles ? 8 : 128, lowest = zero - largest, highest = zero + largest;
  out->scale = magnitude / static_cast<float>(largest);
  if (nibbles && source.asymmetric) {
    out->scale = (high - low) / 15.0f;
    zero = static_cast<int>(std::nearbyintf(-low * inverse_of(out->scale)));
    lowest = 0;
  }
  const float inverse = inverse_of(out->scale);
  for (int64_t k = begin; k < end; ++k) {
    out->codes[k - begin] = code_of(source_value(source, base + k), inverse, zero, lowest, highest);
  }
  out->zero = static_cast<uint8_t>(zero);
}

// Copies the weights of a column at depths [begin, end), which are already quantised.
void copy_group(const PackSource& source, int64_t column, int64_t group, int64_t groups, int64_t begin, int64_t end,
                GroupCodes* out) {
  const uint8_t* values = static_cast<const uint8_t*>(source.values) + column * source.depth;
  const bool nibbles = has_nibbles(source.format);
  for (int64_t k = begin; k < end; ++k) {
    out->codes[k - begin] = nibbles ? values[k] & 15 : static_cast<uint8_t>(values[k] ^ 0x80);
  }
  out->scale = source.scales[column * groups + group];
  out->zero = nibbles && source.zeros != nullptr ? source.zeros[column * groups + group] : nibbles ? 8 : 128;
}

// Writes the stored integers of one column in one group to the column's lane of the group's steps. The group has
// `depth` depths. Int4 steps have 8 depths: the first four go to the low nibbles, the others to the high nibbles.
void place_codes(const GroupCodes& from, int64_t depth, int64_t step_depth, int64_t tile_steps, int lane,
                 uint8_t* group) {
  const int64_t steps = ceil_div(depth, step_depth);
  for (int64_t step = 0; step < steps; ++step) {
    uint8_t* to = group + step_offset(tile_steps, steps, step, lane / 16, 64) + lane % 16 * 4;
    for (int64_t k = step * step_depth; k < smaller(depth, (step + 1) * step_depth); ++k) {
      to[k % 4] |= static_cast<uint8_t>(from.codes[k] << (k % step_depth < 4 ? 0 : 4));
    }
  }
}

// Packs one column of an integer weight into lane `lane` (0 to 63) of a panel, group after group. In a group, the steps
// of all columns come first. Then come the scales and, if `zeros`, the zero points.
void pack_integer_column(const PackSource& source, const WeightShape& shape, int64_t column, int lane, bool zeros,
                         uint8_t* panel, GroupCodes* work) {
  const int64_t group_depth = shape.group_steps * shape.step_depth, tile_steps = kernels().tile_steps(source.format);
  for (int64_t g = 0; g < shape.groups; ++g) {
    const int64_t begin = g * group_depth, end = smaller(begin + group_depth, source.depth);
    if (source.scales == nullptr) {
      quantize_group(source, column, begin, end, work);
    } else {
      copy_group(source, column, g, shape.groups, begin, end, work);
    }
    uint8_t* steps = panel + g * (shape.group_steps * shape.step_bytes + shape.scale_bytes);
    place_codes(*work, end - begin, shape.step_depth, tile_steps, lane, steps);
    uint8_t* scales = steps + ceil_div(end - begin, shape.step_depth) * shape.step_bytes;
    std::memcpy(scales + lane * 4, &work->scale, 4);
    if (zeros) scales[kPanelColumns * 4 + lane] = work->zero;
  }
}

// Packs one column of a float weight into lane `lane` (0 to 63) of a panel.
void pack_float_column(const PackSource& source, const WeightShape& shape, int64_t column, int lane, uint8_t* panel) {
  const int64_t lane_bytes = shape.step_bytes / kPanelColumns, tile_steps = kernels().tile_steps(source.format);
  for (int64_t k = 0, step = 0; step < shape.steps; ++step) {
    const int64_t offset = step_offset(tile_steps, shape.steps, step, lane / 16, 16 * lane_bytes);
    uint8_t* to = panel + offset + lane % 16 * lane_bytes;
    for (const int64_t end = smaller(source.depth, k + shape.step_depth); k < end; ++k) {
      const float value = source_value(source, column * source.depth + k);
      if (source.format == WeightFormat::kFloat32) {
        from_float(value, reinterpret_cast<float*>(to));
      } else if (source.format == WeightFormat::kFloat16) {
        from_float(value, reinterpret_cast<half_t*>(to));
      } else {
        from_float(value, reinterpret_cast<bfloat_t*>(to) + k % 2);
      }
    }
  }
}

// Packs the 64 columns of a panel. Lanes without a column stay zero.
void pack_panel(const PackSource& source, const PackedWeightHeader& header, const WeightShape& shape, int64_t panel,
                uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(shape.panel_bytes));
  GroupCodes* work = static_cast<GroupCodes*>(thread_scratch(kScratchLinearTile, sizeof(GroupCodes)));
  for (int lane = 0; lane < kPanelColumns; ++lane) {
    const int64_t column = vector_column(header, panel, lane / 16) + lane % 16;
    if (column >= vector_end(header, lane / 16)) continue;
    if (is_integer(source.format)) {
      pack_integer_column(source, shape, column, lane, header.asymmetric != 0, out, work);
    } else {
      pack_float_column(source, shape, column, lane, out);
    }
  }
}

// Copies `columns`, one number for each output column, to `out` in the order that the columns have in the panels. Where
// a panel has no column, `out` is zero.
template <class T>
void place_columns(const T* columns, const PackedWeightHeader& header, const WeightShape& shape, T* out) {
  for (int64_t i = 0; i < shape.panels * kPanelColumns; ++i) {
    const int v = static_cast<int>(i % kPanelColumns / 16);
    const int64_t column = vector_column(header, i / kPanelColumns, v) + i % 16;
    out[i] = column < vector_end(header, v) ? columns[column] : T{0};
  }
}

void place_static_inputs(const PackSource& source, const PackedWeightHeader& header, const WeightShape& shape,
                         float* out) {
  const int64_t stride = static_stride(header.depth);
  std::memset(out, 0, static_cast<size_t>(2 * stride * 4));
  std::memcpy(out, source.input_inverses, static_cast<size_t>(header.depth * 4));
  std::memcpy(out + stride, source.input_offsets, static_cast<size_t>(header.depth * 4));
  place_columns(source.sum_offsets, header, shape, reinterpret_cast<int32_t*>(out + 2 * stride));
}

}  // namespace

int64_t packed_weight_bytes(WeightFormat format, int64_t columns, int64_t depth, int64_t group, bool biased,
                            bool static_inputs) {
  if (problem_of_sizes(format, columns, depth, group) != nullptr) return 0;
  if (static_inputs && problem_of_static_inputs(format, group) != nullptr) return 0;
  // Returns the largest size that a weight with these arguments can need. So it is the size with zero points, of a
  // plain or a gated weight, whichever needs more panels.
  const WeightShape plain = weight_shape(format, columns, depth, group, false, true);
  const WeightShape gated = weight_shape(format, columns, depth, group, true, true);
  const WeightShape& most = gated.panels > plain.panels ? gated : plain;
  return static_cast<int64_t>(sizeof(PackedWeightHeader)) + panels_bytes(most) + (biased ? bias_bytes(most) : 0) +
         (static_inputs ? static_bytes(most, depth) : 0);
}

// Returns true if a zero point is above 16, the largest zero point that GPTQ can express.
static bool has_large_zeros(const PackSource& source) {
  if (!has_nibbles(source.format) || source.scales == nullptr || source.zeros == nullptr) return false;
  const int64_t groups = source.group == 0 ? 1 : ceil_div(source.depth, source.group);
  for (int64_t i = 0; i < source.columns * groups; ++i) {
    if (source.zeros[i] > 16) return true;
  }
  return false;
}

int pack_weight(const PackSource& source, void* blob) {
  const char* problem = problem_of_sizes(source.format, source.columns, source.depth, source.group);
  const int32_t gate = static_cast<int32_t>(source.gate);
  if (problem == nullptr && gate != 0 && source.columns % 2 != 0) problem = "a gated weight needs even columns";
  if (problem == nullptr && (gate < 0 || gate >= kNumGates)) problem = "the gated activation is not known";
  if (problem == nullptr && source.source_dtype == DType::kUnsupported) problem = "the source type is not known";
  if (problem == nullptr && reinterpret_cast<uintptr_t>(blob) % 64 != 0) problem = "the blob must be 64-byte aligned";
  if (problem == nullptr && has_large_zeros(source)) problem = "zero points must be 0 to 16";
  const bool static_inputs = source.input_inverses != nullptr;
  if (problem == nullptr && static_inputs) problem = problem_of_static_inputs(source.format, source.group);
  if (problem == nullptr && static_inputs != (source.input_offsets != nullptr && source.sum_offsets != nullptr)) {
    problem = "static inputs need inverse scales, offsets and sum offsets";
  }
  if (problem == nullptr && static_inputs && source.scales == nullptr) {
    problem = "a weight with static inputs must be quantised already";
  }
  if (problem != nullptr) {
    return refuse_text("pack_weight", "%s (format %d, %lld columns, depth %lld, group %lld)", problem,
                       static_cast<int>(source.format), static_cast<long long>(source.columns),
                       static_cast<long long>(source.depth), static_cast<long long>(source.group));
  }
  const bool zeros = has_nibbles(source.format) &&
                     (source.scales == nullptr ? source.asymmetric : source.zeros != nullptr);
  PackedWeightHeader header{};
  header.magic = kPackedWeightMagic;
  header.format = source.format;
  header.layout = kPackedWeightLayout;
  header.gated = gate;
  header.columns = source.columns;
  header.depth = source.depth;
  header.group = source.group;
  header.asymmetric = zeros ? 1 : 0;
  header.biased = source.bias != nullptr ? 1 : 0;
  header.tile_steps = static_cast<int32_t>(kernels().tile_steps(source.format));
  header.static_inputs = static_inputs ? 1 : 0;
  std::memcpy(blob, &header, sizeof(header));
  const WeightShape shape = weight_shape(header);
  uint8_t* panels = static_cast<uint8_t*>(blob) + sizeof(header);
  parallel_for(shape.panels, [&](int64_t panel) {
    pack_panel(source, header, shape, panel, panels + panel * shape.panel_bytes);
  });
  if (source.bias != nullptr) {
    place_columns(source.bias, header, shape, reinterpret_cast<float*>(panels + panels_bytes(shape)));
  }
  if (static_inputs) {
    uint8_t* end = static_cast<uint8_t*>(blob) + blob_bytes(header);
    place_static_inputs(source, header, shape, reinterpret_cast<float*>(end - static_bytes(shape, header.depth)));
  }
  return 0;
}

// Checks each part of a weight in parts. Also checks that the formats, columns and total depth of the parts agree with
// the header.
static int check_parts(const char* op, const void* blob, int64_t bytes) {
  const PackedWeightHeader& whole = header_of(blob);
  const char *part = static_cast<const char*>(first_part(blob)), *end = static_cast<const char*>(blob) + bytes;
  int64_t depth = 0;
  for (int32_t i = 0; i < whole.parts; ++i) {
    const int error = check_packed_weight(op, part, end - part);
    if (error != 0) return error;
    const PackedWeightHeader& header = header_of(part);
    if (header.parts != 0 || header.gated != 0 || header.format != whole.format || header.columns != whole.columns ||
        header.static_inputs != 0 || (i > 0 && header.biased != 0)) {
      return refuse_text(op, "part %d of the packed weight does not fit the whole weight", i);
    }
    depth += header.depth;
    part = static_cast<const char*>(next_part(part));
  }
  if (depth == whole.depth && whole.gated == 0) return 0;
  return refuse_text(op, "the parts of the packed weight have depth %lld together; its header says %lld",
                     static_cast<long long>(depth), static_cast<long long>(whole.depth));
}

int check_packed_weight(const char* op, const void* blob, int64_t bytes) {
  if (blob == nullptr || reinterpret_cast<uintptr_t>(blob) % 64 != 0) {
    return refuse_text(op, "the packed weight is at %p; it must be 64-byte aligned", blob);
  }
  if (bytes < static_cast<int64_t>(sizeof(PackedWeightHeader))) {
    return refuse_text(op, "the packed weight has %lld bytes, less than its header", static_cast<long long>(bytes));
  }
  const PackedWeightHeader& header = header_of(blob);
  if (header.magic != kPackedWeightMagic) {
    return refuse_text(op, "the weight is not packed: it starts with %08x, not %08x", header.magic,
                       kPackedWeightMagic);
  }
  if (header.layout != kPackedWeightLayout) {
    return refuse_text(op, "the weight was packed in layout %d; this build reads layout %d: pack it again",
                       header.layout, kPackedWeightLayout);
  }
  if (is_known(header.format) && header.tile_steps != kernels().tile_steps(header.format)) {
    return refuse_text(op, "the weight was packed in tiles of %d steps; %s has tiles of %lld: pack it again",
                       header.tile_steps, kernels().isa, static_cast<long long>(kernels().tile_steps(header.format)));
  }
  if (header.parts != 0) return check_parts(op, blob, bytes);
  const char* problem = problem_of_sizes(header.format, header.columns, header.depth, header.group);
  if (problem == nullptr && header.static_inputs != 0) problem = problem_of_static_inputs(header.format, header.group);
  if (problem != nullptr) return refuse_text(op, "the header of the packed weight is damaged: %s", problem);
  const int64_t needed = blob_bytes(header);
  if (bytes < needed) {
    return refuse_text(op, "the packed weight has %lld bytes; its header asks for %lld", static_cast<long long>(bytes),
                       static_cast<long long>(needed));
  }
  return 0;
}

int join_weight_parts(void* blob, int64_t bytes, int32_t parts) {
  PackedWeightHeader whole{};
  const char *part = static_cast<const char*>(first_part(blob)), *end = static_cast<const char*>(blob) + bytes;
  if (parts < 1) return refuse_text("join_weight_parts", "there are %d parts; there must be one at least", parts);
  for (int32_t i = 0; i < parts; ++i) {
    const int error = check_packed_weight("join_weight_parts", part, end - part);
    if (error != 0) return error;
    const int64_t depth = whole.depth + header_of(part).depth;
    if (i == 0) whole = header_of(part);
    whole.depth = depth;
    part = static_cast<const char*>(next_part(part));
  }
  whole.parts = parts;
  std::memcpy(blob, &whole, sizeof(whole));
  return check_packed_weight("join_weight_parts", blob, bytes);
}

int check_linear(const char* op, const LinearArgs& args) {
  const PackedWeightHeader& header = header_of(args.weight);
  if (header.parts != 0) return refuse_text(op, "takes no weight in parts");
  if (args.dtype == DType::kUnsupported) return refuse_text(op, "the type of x is not supported");
  if (!is_integer(header.format) && static_cast<int>(header.format) != static_cast<int>(args.dtype)) {
    return refuse_text(op, "x has type %d, the float weight type %d; they must be the same",
                       static_cast<int>(args.dtype), static_cast<int>(header.format));
  }
  const bool is_gated = args.epilogue == Epilogue::kGated || args.epilogue == Epilogue::kGatedRounded;
  if (is_gated && header.gated == 0) {
    return refuse_text(op, "the gated epilogue needs a weight packed as gated");
  }
  if (args.best_ids != nullptr && (args.epilogue != Epilogue::kStoreFloat || header.gated != 0)) {
    return refuse_text(op, "best_ids needs the epilogue kStoreFloat and a weight that is not gated");
  }
  if (args.out == nullptr && args.best_ids == nullptr) {
    return refuse_text(op, "out and best_ids are null, so the call has no result");
  }
  if (args.quantized != nullptr && !wants_quantized_rows(args.weight)) {
    return refuse_text(op, "weight format %d takes no quantised rows", static_cast<int>(header.format));
  }
  return 0;
}

bool wants_quantized_rows(const void* blob) {
  return traits_of(header_of(blob).format).quantizes_rows;
}

static int64_t round_up(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Returns the number of bytes from one quantised row to the next. It is an odd number of cache lines. If the distance
// were a power of two, all rows would use the same few sets of the caches.
static int64_t row_stride(int64_t depth) { return (ceil_div(depth, 64) | 1) * 64; }

int64_t quantized_rows_bytes(const void* blob, int64_t rows) {
  const PackedWeightHeader& header = header_of(blob);
  return rows * row_stride(header.depth) + round_up(rows * 4) + round_up(rows * weight_shape(header).groups * 4);
}

QuantizedRows quantized_rows(const void* blob, int64_t rows, void* memory) {
  const PackedWeightHeader& header = header_of(blob);
  QuantizedRows result;
  result.stride = row_stride(header.depth);
  result.groups = weight_shape(header).groups;
  result.values = static_cast<int8_t*>(memory);
  result.scales = reinterpret_cast<float*>(result.values + rows * result.stride);
  result.sums = reinterpret_cast<int32_t*>(result.values + rows * result.stride + round_up(rows * 4));
  return result;
}

}  // namespace llmk
