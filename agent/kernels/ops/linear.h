// Linear layers over weights packed once at load.
//
//   x [rows, depth]   weight blob (columns x depth)   ->   out[r][c] = sum over k of x[r][k] * w[c][k] (+ bias[c])
//
// The blob: a 64-byte header, then panels of 64 columns, each four vectors: one load gives a step of the depth of 16
// columns as lanes, and the activations are broadcast. A half is two vectors, which lie together as tiles: T steps of
// the first, then the same of the second. T is 16, a tile of 1 KB, for the matrix unit, and 1 for everything else: half
// a panel then is one stream, which prefetchers follow at twice the rate of two that pass through the same page.
//
//   float32, float16       [panels][2 halves][steps / T][2 vectors][T steps][16]
//   bfloat16               [panels][2][steps / T][2][T steps][16][2 depths]
//   int8, int8_weight_only [panels][groups]{[2][steps / T][2][T steps][16][4 depths] uint8 = w + 128,
//                          [64] float scales}
//   int4, int4_weight_only [panels][groups]{[2][steps / T][2][T steps][16][4] bytes, [64] float scales,
//                          [64] uint8 zeros if asymmetric}; low nibbles: depths 0 to 3 of a step, high nibbles: 4 to 7
//
// The last tiles of a group, or of the depth, have only the steps that are left (step_offset() below).
//
// A bias follows the panels as floats, in the order of their columns: [panels][64].
//
// A weight in parts is a header and, each on a cache line, the blobs of some consecutive depths one after the other,
// that of the first with the bias. Its product is the sum of theirs in float32, in their order, rounded once: the bits
// of agents that share the layer.
//
// Without groups one group spans the depth. Missing columns and depths are filled up with zeros. Of a gated weight,
// vector 0 and 2 of a panel hold gate columns 32p and 32p + 16, vector 1 and 3 the up columns of the same numbers.
//
// Arithmetic, the same for every tile, batch and thread count:
//   float formats     one accumulator an element over k in order (pairs of k where the machine has VDPBF16PS)
//   int8              exact integers, then float(sum) * x_scale * w_scale; by groups: as int4 with zero 128
//   int4              total = fma(float(sum over the group of (w - zero) * x), group scale, total) in group order,
//                     then total * x_scale
//   int8_weight_only  as a float format with the integers as weights, bfloat16 where the activations are (a group at a
//                     time: total = fma(sum, scale, total)); without groups sum * scale
//   int4_weight_only  the same with w - zero as weights; without groups one group spans the depth
// The bias is added last, in float32. int8 and int4 results are bit-identical over all instruction sets.
#pragma once
#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

// The numbers are `kernel_code` of llm_serving/model/number_formats.py. To add another format, add it there, here and
// to kFormats; a new Packing also needs code in linear_pack.cc, linear_driver.h and linear_weight_only.h.
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
  int32_t bits;          // of a weight
  int32_t step_depth;    // depths in one step of a panel
  bool quantizes_rows;   // activations become int8, with a scale for each row
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

// Whether a number that came from outside is a WeightFormat; traits_of() takes no other.
static inline bool is_known(WeightFormat format) {
  return static_cast<int32_t>(format) >= 0 && static_cast<int32_t>(format) < kNumFormats;
}
static inline const FormatTraits& traits_of(WeightFormat format) { return kFormats[static_cast<int32_t>(format)]; }

constexpr uint32_t kPackedWeightMagic = 0x4B50574C;  // "LWPK"
constexpr int32_t kPackedWeightLayout = 3;           // halves of panels as tiles of tile_steps

struct PackedWeightHeader {
  uint32_t magic;
  WeightFormat format;
  int32_t layout;
  int32_t gated;
  int64_t columns, depth, group;  // group 0: one scale a column
  int32_t asymmetric;             // zero points stored
  int32_t biased;                 // a bias stored
  int32_t parts;                  // blobs that follow; 0: panels do
  int32_t tile_steps;             // T above, that of the instruction set
  int32_t reserved[2];
};
static_assert(sizeof(PackedWeightHeader) == 64, "the header is one cache line");

// Where weights come from. `values` [columns][depth]: of source_dtype for float formats; already quantised: int8
// (kInt8*), or uint8 0..15 (kInt4*, one a byte) with scales float [columns][groups] and zeros uint8 0..16
// [columns][groups] (null: 8). When `scales` is null and the format is an integer one, `values` are floats of
// source_dtype and are quantised here, to nearest: kInt8* symmetric, scale = max|w| / 127; kInt4* scale = max|w| / 7
// with zero 8 or, if `asymmetric`, (max - min) / 15 over a range that holds 0, with zero points.
// gated: rows are gate [0, columns / 2), then up [columns / 2, columns).
struct PackSource {
  WeightFormat format;
  DType source_dtype;
  int64_t columns, depth, group;
  bool gated, asymmetric;
  const void* values;
  const float* scales;
  const uint8_t* zeros;
  const float* bias;  // [columns] in the order of `values`; null: none
};

// Size of a blob; 0 for sizes no blob can have (group not a multiple of 8, integer depth beyond 65536, ...).
int64_t packed_weight_bytes(WeightFormat format, int64_t columns, int64_t depth, int64_t group, bool biased);

// Writes a blob (64-byte aligned) with all threads. 0, or an error code after one line on standard error.
int pack_weight(const PackSource& source, void* blob);

// What an entry asks before it trusts a blob of `bytes` bytes: 0, or an error code after one line on standard error.
int check_packed_weight(const char* op, const void* blob, int64_t bytes);

// Writes the header of a weight in `parts` parts before them, which are packed already and begin 64 bytes behind
// `blob`. 0, or an error code after one line on standard error.
int join_weight_parts(void* blob, int64_t bytes, int32_t parts);

// Activations quantised a row at a time: value = scale * q, scale = max|x| / 127, q in [-127, 127].
struct QuantizedRows {
  int8_t* values;
  float* scales;   // [rows]
  int32_t* sums;   // [rows][groups]: sums of q over each group
  int64_t stride;  // bytes a row, a multiple of 64, zeros past depth
  int64_t groups;
};

bool wants_quantized_rows(const void* blob);                                  // whether its format quantizes_rows
int64_t quantized_rows_bytes(const void* blob, int64_t rows);                 // memory for the three, in one piece
QuantizedRows quantized_rows(const void* blob, int64_t rows, void* memory);  // lays them out in it (64-byte aligned)

enum class Epilogue : int32_t {
  kStore = 0,       // out of dtype
  kStoreFloat = 1,  // out of float32
  kSwiglu = 2       // out of dtype, columns / 2 wide: gate / (1 + exp(-gate)) * up; the blob must be gated
};

struct LinearArgs {
  const void* weight;
  const void* x;                   // [rows, depth] of dtype; unused when `quantized` is given
  const QuantizedRows* quantized;  // null: an integer format quantises x itself first
  DType dtype;                     // of x, and of out but for kStoreFloat; for float formats the weight's type
  int64_t rows, x_stride, out_stride;  // strides in elements
  void* out;                           // may be null where best_ids is given: only the arg-max is wanted
  Epilogue epilogue;
  int32_t* best_ids;   // kStoreFloat only, may be null: arg-max of each row; the lowest index wins, NaN never does
  float* best_values;  // may be null
};

// What an entry asks before kernels().linear: 0, or an error code after one line on standard error.
int check_linear(const char* op, const LinearArgs& args);

// The parts of a blob.
constexpr int64_t kPanelColumns = 64;

struct WeightShape {
  int64_t panels, step_depth, step_bytes;  // depths in one step of a panel, and its bytes
  int64_t steps, group_steps, groups;      // steps of the whole depth and of a full group
  int64_t scale_bytes;                     // of one group: scales and zeros
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

// Where a step of vector v lies behind the first of a group's (or the depth's) `steps` steps, in tiles of tile_steps.
static inline int64_t step_offset(int64_t tile_steps, int64_t steps, int64_t step, int v, int64_t vector_bytes) {
  const int64_t first = step / tile_steps * tile_steps;  // of the tile
  return (v / 2 * 2 * steps + 2 * first + v % 2 * smaller(tile_steps, steps - first) + step - first) * vector_bytes;
}

static inline WeightShape weight_shape(const PackedWeightHeader& header) {
  return weight_shape(header.format, header.columns, header.depth, header.group, header.gated != 0,
                      header.asymmetric != 0);
}

// What the panels take; a bias lies behind them.
static inline int64_t panels_bytes(const WeightShape& shape) { return shape.panels * shape.panel_bytes; }
static inline int64_t bias_bytes(const WeightShape& shape) { return shape.panels * kPanelColumns * 4; }

static inline const PackedWeightHeader& header_of(const void* blob) {
  return *static_cast<const PackedWeightHeader*>(blob);
}

// Bytes of a blob without parts.
static inline int64_t blob_bytes(const PackedWeightHeader& header) {
  const WeightShape shape = weight_shape(header);
  return static_cast<int64_t>(sizeof(header)) + panels_bytes(shape) + (header.biased != 0 ? bias_bytes(shape) : 0);
}

// The first of a blob's parts, and the one behind another, which has the room of packed_weight_bytes.
static inline const void* first_part(const void* blob) {
  return static_cast<const char*>(blob) + sizeof(PackedWeightHeader);
}
static inline const void* next_part(const void* part) {
  const PackedWeightHeader& header = header_of(part);
  const int64_t room =
      packed_weight_bytes(header.format, header.columns, header.depth, header.group, header.biased != 0);
  return static_cast<const char*>(part) + ceil_div(room, 64) * 64;
}

// The bias of a blob, null without one.
static inline const float* bias_of(const void* blob) {
  const PackedWeightHeader& header = header_of(blob);
  if (header.biased == 0) return nullptr;
  const char* panels = static_cast<const char*>(blob) + sizeof(header);
  return reinterpret_cast<const float*>(panels + panels_bytes(weight_shape(header)));
}

// The first column of vector v (16 lanes) of a panel, and the column it must stay below.
static inline int64_t vector_column(const PackedWeightHeader& header, int64_t panel, int v) {
  if (header.gated == 0) return panel * kPanelColumns + v * 16;
  return panel * (kPanelColumns / 2) + v / 2 * 16 + (v % 2 == 0 ? 0 : header.columns / 2);
}
static inline int64_t vector_end(const PackedWeightHeader& header, int v) {
  return header.gated != 0 && v % 2 == 0 ? header.columns / 2 : header.columns;
}

}  // namespace llmk

#ifdef LLMK_ARCH
#include "linear_driver.h"
#endif
