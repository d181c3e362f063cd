// Linear layers over weights that are packed once, when the model is loaded.
//
//   x [rows, depth]   weight blob (columns x depth)   ->   out[r][c] = sum over k of x[r][k] * w[c][k] (+ bias[c])
//
// Layout. A blob has a 64-byte header, then panels of 64 columns. A panel has four vectors of 16 columns, one column
// per lane. A step is what one load of a vector reads: the weights of 16 columns at 1 to 8 consecutive depths. (The
// depths are the indices k.) The kernel broadcasts an activation to all lanes and multiplies it by the step.
//
// A panel is stored as two halves, each with two vectors. In memory, the two vectors alternate: T steps of the first
// vector, then the same T steps of the second vector, and so on. T steps of a vector are a tile. T is 16 (a tile of 1
// KB) for AMX with all formats except float32 and float16. Otherwise T is 1, so that half a panel is one sequential
// stream. Hardware prefetchers follow one stream at twice the rate of two streams through the same page.
//
// The dimensions of a blob for each format, where [steps / T] counts the tiles and braces enclose the parts of a group:
//
//   float32, float16       [panels][2 halves][steps / T][2 vectors][T steps][16 columns]
//   bfloat16               [panels][2 halves][steps / T][2 vectors][T steps][16 columns][2 depths]
//   int8, int8_weight_only [panels][groups]{[2][steps / T][2][T][16][4 depths] bytes w + 128, [64] float scales}
//   int4, int4_weight_only [panels][groups]{[2][steps / T][2][T][16][4] bytes, [64] float scales, [64] uint8 zeros}
//
// An int8 weight w is stored as the unsigned byte w + 128. An int4 byte has two weights. Depths 0 to 3 of a step are in
// the low nibbles, depths 4 to 7 in the high nibbles. The zeros exist only if the weight is asymmetric. Without groups,
// one group spans the depth. The last tiles of a group or of the depth have only the remaining steps (step_offset()
// below). Missing columns and depths are zeros.
//
// A gated weight joins two layers of equal size, gate and up (SwiGLU or GeGLU). In its panel p, vectors 0 and 2 hold
// the gate columns from 32p and from 32p + 16. Vectors 1 and 3 hold the up columns with the same numbers.
//
// A bias follows the panels as floats, in the order of the columns in the panels: [panels][64].
//
// An int8 weight without groups may have static inputs: scales and offsets from a calibration, with which its
// activations are quantised. These numbers follow the bias. First come the inverse scales and then the offsets of the
// inputs, each float [depth] and zeros up to a multiple of 16. Then come the int32 sum offsets of the columns,
// [panels][64]. A sum offset is added to the integer sum of its column. It removes the effect of the input offsets.
//
// A weight in parts is a header, followed by one blob for each of several consecutive ranges of the depth. Each blob
// starts on a cache line, and the first blob has the bias. The product with the whole weight is the sum of the products
// with its parts. These products are added in float32, in the order of the parts, and the sum is rounded once. If each
// agent of a group has one part, the sum over the agents has the same bits.
//
// Arithmetic. It is the same for every tile, batch and thread count. The factor x_scale belongs to an activation row,
// w_scale to a weight column, and scale to a group of a weight column:
//
//   float formats     one accumulator for each result; it adds the products in the order of k (pairs with VDPBF16PS)
//   int8              exact integer sum, then float(sum) * x_scale * w_scale; with groups: like int4, with zero = 128
//   int8, static      float(sum + sum offset) * w_scale, where q = round(x * inverse scale + offset) within -128 to 127
//   int4              for each group, in order: total = fma(float(sum over the group of (w - zero) * x), scale, total);
//                     then total * x_scale
//   int8_weight_only  like a float format whose weights are the integers; the product is in bfloat16 if the activations
//                     are bfloat16; without groups: sum * w_scale; with groups: total = fma(sum, scale, total)
//   int4_weight_only  like int8_weight_only, with w - zero as weights
//
// The bias is added last, in float32. int8 and int4 results are bit-identical over all instruction sets.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"
#include "gated.h"
#include "lora.h"

namespace llmk {

// The number of a format is the field `kernel_code` of the format in llm_serving/model/number_formats.py. A new format
// needs an entry there, here and in kFormats. A new value of Packing also needs code in linear_pack.cc, linear_bytes.h
// and linear_weight_only.h.
enum class WeightFormat : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt8 = 3,
  kInt8WeightOnly = 4,
  kInt4 = 5,
  kInt4WeightOnly = 6
};

enum class Packing : int32_t { kFloats, kBytes, kNibbles };

struct FormatTraits {
  WeightFormat format;
  Packing packing;
  int32_t bits;          // bits per weight
  int32_t step_depth;    // number of depths in one step of a panel
  bool quantizes_rows;   // true: activations are quantised to int8 with one scale per row
};

constexpr FormatTraits kFormats[] = {
    {WeightFormat::kFloat32, Packing::kFloats, 32, 1, false},
    {WeightFormat::kFloat16, Packing::kFloats, 16, 1, false},
    {WeightFormat::kBFloat16, Packing::kFloats, 16, 2, false},
    {WeightFormat::kInt8, Packing::kBytes, 8, 4, true},
    {WeightFormat::kInt8WeightOnly, Packing::kBytes, 8, 4, false},
    {WeightFormat::kInt4, Packing::kNibbles, 4, 8, true},
    {WeightFormat::kInt4WeightOnly, Packing::kNibbles, 4, 8, false},
};
constexpr int32_t kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);

constexpr bool formats_are_in_order() {
  for (int32_t i = 0; i < kNumFormats; ++i) {
    if (static_cast<int32_t>(kFormats[i].format) != i) return false;
  }
  return true;
}
static_assert(formats_are_in_order(), "kFormats has a row for each WeightFormat, in its order");

// Returns true if a number from a caller or a blob is a WeightFormat. traits_of() must not get any other number.
static inline bool is_known(WeightFormat format) {
  return static_cast<int32_t>(format) >= 0 && static_cast<int32_t>(format) < kNumFormats;
}
static inline const FormatTraits& traits_of(WeightFormat format) { return kFormats[static_cast<int32_t>(format)]; }

constexpr uint32_t kPackedWeightMagic = 0x4B50574C;  // "LWPK"
constexpr int32_t kPackedWeightLayout = 3;           // version of the layout that this file describes

struct PackedWeightHeader {
  uint32_t magic;
  WeightFormat format;
  int32_t layout;
  int32_t gated;  // a Gate (ops/gated.h): the activation of a gated weight, or 0 for other weights
  int64_t columns, depth, group;  // group: number of depths that share a scale; 0: one scale per column
  int32_t asymmetric;             // 1: the blob has zero points
  int32_t biased;                 // 1: the blob has a bias
  int32_t parts;                  // number of parts, which follow as blobs; 0: no parts, panels follow
  int32_t tile_steps;             // T in the description of the layout; depends on the instruction set
  int32_t static_inputs;          // 1: the blob has static inputs
  int32_t reserved;
};
static_assert(sizeof(PackedWeightHeader) == 64, "the header is one cache line");

// The weights to pack. `values` is [columns][depth].
//   Float formats: values of source_dtype.
//   Integer formats with `scales`: the values are already quantised. They are int8 (kInt8*), or uint8 from 0 to 15, one
//     per byte (kInt4*). `scales` is float [columns][groups]. `zeros` is uint8 from 0 to 16 [columns][groups], or null
//     if all zero points are 8.
//   Integer formats without `scales`: the values are floats of source_dtype, which are quantised here to nearest.
//     kInt8* is symmetric with scale = max|w| / 127. kInt4* has scale = max|w| / 7 and zero point 8. If `asymmetric`,
//     kInt4* has zero points and the scale (max - min) / 15 of a range that contains 0.
//   gate: the activation of a gated weight, else kNone. Rows [0, columns / 2) are the gate. The other rows are the
//     factor `up` of ops/gated.h.
struct PackSource {
  WeightFormat format;
  DType source_dtype;
  Gate gate;
  int64_t columns, depth, group;
  bool asymmetric;
  const void* values;
  const float* scales;
  const uint8_t* zeros;
  const float* bias;  // [columns] in the order of `values`, or null
  // Static inputs: inverse scales and offsets [depth], and sum offsets [columns] in the order of `values`. Either all
  // three are given or none.
  const float* input_inverses;
  const float* input_offsets;
  const int32_t* sum_offsets;
};

// Returns the size of a blob in bytes, or 0 for invalid sizes. For example, a group must be a multiple of 8 depths, and
// an integer weight may have at most 65536 depths.
int64_t packed_weight_bytes(WeightFormat format, int64_t columns, int64_t depth, int64_t group, bool biased,
                            bool static_inputs = false);

// Writes a blob (64-byte aligned) with all threads. Returns 0, or writes one line to standard error and returns an
// error code.
int pack_weight(const PackSource& source, void* blob);

// Checks a blob of `bytes` bytes. Returns 0, or writes one line to standard error and returns an error code.
int check_packed_weight(const char* op, const void* blob, int64_t bytes);

// Writes the header of a weight in parts. The `parts` parts are already packed and begin 64 bytes after `blob`. Returns
// 0, or writes one line to standard error and returns an error code.
int join_weight_parts(void* blob, int64_t bytes, int32_t parts);

// Activations, quantised row by row. q is in [-127, 127]: x = scale * q, with scale = max|x| / 127. With a weight that
// has static inputs, q = round(x * inverse scale + offset) in [-128, 127], and each row has scale 1.
struct QuantizedRows {
  int8_t* values;
  float* scales;   // [rows]
  int32_t* sums;   // [rows][groups]: sums of q over each group
  int64_t stride;  // bytes from row to row, a multiple of 64; zeros follow the depth
  int64_t groups;
};

bool wants_quantized_rows(const void* blob);                                 // true: the weight takes int8 activations
// Returns the size in bytes of the QuantizedRows that the weight needs for `rows` rows.
int64_t quantized_rows_bytes(const void* blob, int64_t rows);
// Divides `memory`, which is aligned to 64 bytes, into the arrays of QuantizedRows. quantized_rows_bytes() gives its
// size.
QuantizedRows quantized_rows(const void* blob, int64_t rows, void* memory);

enum class Epilogue : int32_t {
  kStore = 0,       // out has type dtype
  kStoreFloat = 1,  // out is float32
  kGated = 2,       // out has type dtype and columns / 2 columns: results of the gated activation
  // Like kGated, but first rounds gate and up to type dtype. So the result has the bits of kStore and Swiglu.
  kGatedRounded = 3
};

struct LinearArgs {
  const void* weight;
  const void* x;                   // [rows, depth] of dtype; unused if `quantized` is set
  const QuantizedRows* quantized;  // int8 activations; null: the kernel quantises x if the format needs it
  // Type of x, and of out except with kStoreFloat. A weight of a float format also has this type.
  DType dtype;
  int64_t rows, x_stride, out_stride;  // strides in elements
  void* out;                           // may be null if best_ids is set: then only the arg-max is computed
  Epilogue epilogue;
  // Receives the index of the largest output of each row, the lowest index on a tie. The index is -1 if the row has a
  // NaN or an infinity. Must be null unless the epilogue is kStoreFloat.
  int32_t* best_ids;
  float* best_values;  // [rows]: receives the largest output of each row; may be null
  const LoraRows* lora;  // adapters of the rows; null: none. Must be null for a weight in parts.
};

// Checks the arguments of kernels().linear. Returns 0, or writes one line to standard error and returns an error code.
int check_linear(const char* op, const LinearArgs& args);

// Number of columns of a panel.
constexpr int64_t kPanelColumns = 64;

struct WeightShape {
  int64_t panels, step_depth, step_bytes;  // number of panels; depths in a step; bytes of a step of 64 columns
  int64_t steps, group_steps, groups;      // steps in the whole depth; steps in a full group; number of groups
  int64_t scale_bytes;                     // bytes of the scales and zero points of one group
  int64_t panel_bytes;
};

static inline bool is_integer(WeightFormat format) { return traits_of(format).packing != Packing::kFloats; }
static inline bool has_nibbles(WeightFormat format) { return traits_of(format).packing == Packing::kNibbles; }

static inline WeightShape weight_shape(WeightFormat format, int64_t columns, int64_t depth, int64_t group,
                                       bool gated, bool asymmetric) {
  const bool nibbles = has_nibbles(format);
  WeightShape shape;
  shape.panels = gated ? ceil_div(columns / 2, kPanelColumns / 2) : ceil_div(columns, kPanelColumns);
  shape.step_depth = traits_of(format).step_depth;
  shape.step_bytes = format == WeightFormat::kFloat16 ? 2 * kPanelColumns : 4 * kPanelColumns;
  shape.steps = ceil_div(depth, shape.step_depth);
  shape.group_steps = group == 0 ? shape.steps : group / shape.step_depth;
  shape.groups = group == 0 ? 1 : ceil_div(depth, group);
  shape.scale_bytes = is_integer(format) ? kPanelColumns * 4 + (nibbles && asymmetric ? kPanelColumns : 0) : 0;
  shape.panel_bytes = shape.steps * shape.step_bytes + shape.groups * shape.scale_bytes;
  return shape;
}

// Returns the position of the weights of step `step` and vector v (0 to 3) in a panel. The position is a byte offset
// from the start of the quantisation group or, without groups, from the start of the panel. `steps` is the number of
// steps of the group or panel.
static inline int64_t step_offset(int64_t tile_steps, int64_t steps, int64_t step, int v, int64_t vector_bytes) {
  const int64_t first = step / tile_steps * tile_steps;  // first step of the tile
  return (v / 2 * 2 * steps + 2 * first + v % 2 * smaller(tile_steps, steps - first) + step - first) * vector_bytes;
}

static inline WeightShape weight_shape(const PackedWeightHeader& header) {
  return weight_shape(header.format, header.columns, header.depth, header.group, header.gated != 0,
                      header.asymmetric != 0);
}

// Returns the size of all panels in bytes. In the blob, a bias follows the panels.
static inline int64_t panels_bytes(const WeightShape& shape) { return shape.panels * shape.panel_bytes; }
static inline int64_t bias_bytes(const WeightShape& shape) { return shape.panels * kPanelColumns * 4; }

// Returns the number of floats that the inverse scales of static inputs occupy: the depth, rounded up to a multiple of
// 16. The offsets of static inputs occupy the same number of floats. The function static_bytes() returns the size of
// all static inputs of a blob.
static inline int64_t static_stride(int64_t depth) { return ceil_div(depth, 16) * 16; }
static inline int64_t static_bytes(const WeightShape& shape, int64_t depth) {
  return 2 * static_stride(depth) * 4 + shape.panels * kPanelColumns * 4;
}

static inline const PackedWeightHeader& header_of(const void* blob) {
  return *static_cast<const PackedWeightHeader*>(blob);
}

// Returns the size of a blob in bytes. The blob must not be a weight in parts.
static inline int64_t blob_bytes(const PackedWeightHeader& header) {
  const WeightShape shape = weight_shape(header);
  return static_cast<int64_t>(sizeof(header)) + panels_bytes(shape) + (header.biased != 0 ? bias_bytes(shape) : 0) +
         (header.static_inputs != 0 ? static_bytes(shape, header.depth) : 0);
}

// A weight in parts is a header, followed by several packed weights. Each of these parts occupies
// packed_weight_bytes(), rounded up to a multiple of 64. The function first_part() returns the first part of a blob,
// and next_part() returns the part after `part`.
static inline const void* first_part(const void* blob) {
  return static_cast<const char*>(blob) + sizeof(PackedWeightHeader);
}
static inline const void* next_part(const void* part) {
  const PackedWeightHeader& header = header_of(part);
  const int64_t room =
      packed_weight_bytes(header.format, header.columns, header.depth, header.group, header.biased != 0);
  return static_cast<const char*>(part) + ceil_div(room, 64) * 64;
}

// Returns the bias of a blob, or null.
static inline const float* bias_of(const void* blob) {
  const PackedWeightHeader& header = header_of(blob);
  if (header.biased == 0) return nullptr;
  const char* panels = static_cast<const char*>(blob) + sizeof(header);
  return reinterpret_cast<const float*>(panels + panels_bytes(weight_shape(header)));
}

// The static inputs of a blob. All pointers are null if the blob has no static inputs.
struct StaticInputs {
  const float *inverses = nullptr, *offsets = nullptr;  // [static_stride(depth)] floats each
  const int32_t* sum_offsets = nullptr;                 // [panels][64]
};

static inline StaticInputs static_inputs_of(const void* blob) {
  const PackedWeightHeader& header = header_of(blob);
  if (header.static_inputs == 0) return {};
  const WeightShape shape = weight_shape(header);
  const float* first = reinterpret_cast<const float*>(static_cast<const char*>(blob) + blob_bytes(header) -
                                                      static_bytes(shape, header.depth));
  const int64_t stride = static_stride(header.depth);
  return {first, first + stride, reinterpret_cast<const int32_t*>(first + 2 * stride)};
}

// Returns the index of the first weight column in vector v (0 to 3) of a panel. Lane i of the vector holds the column
// with this index plus i. The function vector_end() returns the end of the existing columns: lanes for columns from
// this index on hold zeros.
static inline int64_t vector_column(const PackedWeightHeader& header, int64_t panel, int v) {
  if (header.gated == 0) return panel * kPanelColumns + v * 16;
  return panel * (kPanelColumns / 2) + v / 2 * 16 + (v % 2 == 0 ? 0 : header.columns / 2);
}
static inline int64_t vector_end(const PackedWeightHeader& header, int v) {
  return header.gated != 0 && v % 2 == 0 ? header.columns / 2 : header.columns;
}

}  // namespace llmk
