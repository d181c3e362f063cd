// The scalar reference of linear layers (ops/linear.h). It reads every weight from the packed blob, one at a time.
#include <cmath>

#include "../../agent/kernels/ops/linear.h"
#include "../../agent/kernels/ops/quantize_row.h"
#include "reference.h"

namespace llmk::reference {
namespace {

// Reads a packed weight element by element: single numbers, scales and biases.
struct LinearWeights {
  explicit LinearWeights(const void* blob)
      : header(header_of(blob)), shape(weight_shape(header)),
        panels(static_cast<const uint8_t*>(blob) + sizeof(PackedWeightHeader)) {}

  // Finds the panel that contains a column of the weight, and the lane of the column in this panel.
  void locate(int64_t column, const uint8_t** panel, int* lane) const {
    int64_t number = column / kPanelColumns;
    *lane = static_cast<int>(column % kPanelColumns);
    if (header.gated != 0) {
      const bool up = column >= header.columns / 2;
      const int64_t within = column - (up ? header.columns / 2 : 0);
      number = within / 32;
      *lane = static_cast<int>((within % 32 / 16 * 2 + (up ? 1 : 0)) * 16 + within % 16);
    }
    *panel = panels + number * shape.panel_bytes;
  }
  int64_t group_depth() const { return shape.group_steps * shape.step_depth; }
  const uint8_t* group(const uint8_t* panel, int64_t g) const {
    return panel + g * (shape.group_steps * shape.step_bytes + shape.scale_bytes);
  }
  const uint8_t* scales(const uint8_t* panel, int64_t g) const {
    return group(panel, g) + smaller(shape.group_steps, shape.steps - g * shape.group_steps) * shape.step_bytes;
  }
  // Returns the stored number at depth `k` of a column, before it is multiplied by its scale.
  double value(int64_t column, int64_t k) const {
    const uint8_t* panel;
    int lane;
    locate(column, &panel, &lane);
    const int64_t g = k / group_depth(), within = k % group_depth(), lane_bytes = shape.step_bytes / kPanelColumns;
    const int64_t steps = smaller(shape.group_steps, shape.steps - g * shape.group_steps);
    const uint8_t* at = group(panel, g) + lane % 16 * lane_bytes +
                        step_offset(header.tile_steps, steps, within / shape.step_depth, lane / 16, 16 * lane_bytes);
    if (header.format == WeightFormat::kFloat32) return *reinterpret_cast<const float*>(at);
    if (header.format == WeightFormat::kFloat16) return to_float(*reinterpret_cast<const half_t*>(at));
    if (header.format == WeightFormat::kBFloat16) return to_float(reinterpret_cast<const bfloat_t*>(at)[k % 2]);
    if (!has_nibbles(header.format)) return at[within % 4] - 128;
    const int code = at[within % 4] >> (within % 8 < 4 ? 0 : 4) & 15;
    return code - (header.asymmetric != 0 ? scales(panel, g)[kPanelColumns * 4 + lane] : 8);
  }
  float scale(int64_t column, int64_t g) const {
    const uint8_t* panel;
    int lane;
    locate(column, &panel, &lane);
    return reinterpret_cast<const float*>(scales(panel, g))[lane];
  }

  int32_t sum_offset(int64_t column) const {
    const int32_t* offsets = static_inputs_of(&header).sum_offsets;
    if (offsets == nullptr) return 0;
    const uint8_t* panel;
    int lane;
    locate(column, &panel, &lane);
    return offsets[(panel - panels) / shape.panel_bytes * kPanelColumns + lane];
  }

  float bias(int64_t column) const {
    const uint8_t* panel;
    int lane;
    locate(column, &panel, &lane);
    return bias_of(&header)[(panel - panels) / shape.panel_bytes * kPanelColumns + lane];
  }

  const PackedWeightHeader& header;
  const WeightShape shape;
  const uint8_t* panels;
};

// Returns the product of a row of activations and a column of the weight. For int8 and int4 the result is bit-identical
// to the kernel's result. For other formats the terms are added in double precision.
float product_element(const LinearArgs& args, const LinearWeights& w, const QuantizedRows& rows, int64_t row,
                      int64_t column) {
  const int64_t depth = w.header.depth, span = w.header.group == 0 ? depth : w.header.group;
  const bool integers = wants_quantized_rows(args.weight);
  float total = 0;
  double exact = 0;
  for (int64_t g = 0; g < w.shape.groups; ++g) {
    double sum = 0;
    for (int64_t k = g * span; k < smaller(depth, (g + 1) * span); ++k) {
      const double x =
          integers ? rows.values[row * rows.stride + k] : load_element(args.dtype, args.x, row * args.x_stride + k);
      sum += x * w.value(column, k);
    }
    if (!is_integer(w.header.format)) return static_cast<float>(sum);
    const float scale = w.scale(column, g);
    exact += sum * scale;
    if (integers && !has_nibbles(w.header.format) && w.header.group == 0) {
      return static_cast<float>(sum + w.sum_offset(column)) * rows.scales[row] * scale;
    }
    total = std::fma(static_cast<float>(sum), scale, total);
  }
  return integers ? total * rows.scales[row] : static_cast<float>(exact);
}

float linear_element(const LinearArgs& args, const LinearWeights& w, const QuantizedRows& rows, int64_t row,
                     int64_t column) {
  const float product = product_element(args, w, rows, row, column);
  return w.header.biased != 0 ? product + w.bias(column) : product;
}

// Quantises a row with the scales and offsets that the weight has for its inputs (static inputs). If a value of the row
// is not finite, the caller passes NaN as `poison`. The scale of the row and all its outputs are then NaN.
void quantize_static_row(DType dtype, const void* x, const QuantizedRows& rows, int64_t row,
                         const PackedWeightHeader& header, float poison) {
  const StaticInputs inputs = static_inputs_of(&header);
  int8_t* values = rows.values + row * rows.stride;
  rows.scales[row] = std::isnan(poison) ? poison : 1.0f;
  rows.sums[row] = 0;
  for (int64_t k = 0; k < rows.stride; ++k) {
    float value = 0;
    if (k < header.depth && !std::isnan(poison)) {
      const float product = load_element(dtype, x, k) * inputs.inverses[k];
      value = std::nearbyintf(std::fmin(std::fmax(product + inputs.offsets[k], -128.0f), 127.0f));
    }
    values[k] = static_cast<int8_t>(value);
    rows.sums[row] += values[k];
  }
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Returns the result of a gated activation in double precision, rounded to float. agent/kernels/ops/gated.h defines it.
float gated_element(int32_t kind, double gate, double up) {
  if (kind == static_cast<int32_t>(Gate::kGelu)) {
    const double bent = std::sqrt(2 / 3.14159265358979323846) * (gate + 0.044715 * gate * gate * gate);
    return static_cast<float>(0.5 * gate * (1 + std::tanh(bent)) * up);
  }
  if (kind == static_cast<int32_t>(Gate::kClampedSilu)) {
    const double g = gate > 7 ? 7 : gate, u = up > 7 ? 7 : up < -7 ? -7 : up;
    return static_cast<float>(g * sigmoid(1.702 * g) * (u + 1));
  }
  return static_cast<float>(gate * sigmoid(gate) * up);
}

}  // namespace

void quantize_row(DType dtype, const void* x, const QuantizedRows& rows, int64_t row,
                  const PackedWeightHeader& header) {
  const int64_t depth = header.depth, group = header.group == 0 ? depth : header.group;
  int8_t* values = rows.values + row * rows.stride;
  float largest = 0, poison = 0;
  for (int64_t k = 0; k < depth; ++k) {
    largest = std::fmax(largest, std::fabs(load_element(dtype, x, k)));
    poison += load_element(dtype, x, k) * 0.0f;
  }
  if (header.static_inputs != 0) return quantize_static_row(dtype, x, rows, row, header, poison);
  const float inverse = std::isnan(poison) ? 0.0f : quantize_inverse(largest);
  rows.scales[row] = std::isnan(poison) ? poison : largest / 127.0f;
  for (int64_t g = 0; g < rows.groups; ++g) rows.sums[row * rows.groups + g] = 0;
  for (int64_t k = 0; k < rows.stride; ++k) {
    const float value = k < depth && inverse != 0 ? std::nearbyintf(load_element(dtype, x, k) * inverse) : 0.0f;
    values[k] = static_cast<int8_t>(value);
    if (k < depth) rows.sums[row * rows.groups + k / group] += values[k];
  }
}

void linear(const LinearArgs& args, const QuantizedRows& rows) {
  const LinearWeights w(args.weight);
  const bool gated = args.epilogue == Epilogue::kGated;
  const int64_t width = gated ? w.header.columns / 2 : w.header.columns;
  const DType out_dtype = args.epilogue == Epilogue::kStoreFloat ? DType::kFloat32 : args.dtype;
  for (int64_t row = 0; row < args.rows; ++row) {
    float best = -INFINITY;
    int32_t best_id = 0;
    bool finite = true;
    for (int64_t column = 0; column < width; ++column) {
      float value = linear_element(args, w, rows, row, column);
      if (gated) value = gated_element(w.header.gated, value, linear_element(args, w, rows, row, width + column));
      if (args.out != nullptr) store_any(out_dtype, value, args.out, row * args.out_stride + column);
      if (value > best) best = value, best_id = static_cast<int32_t>(column);
      finite = finite && std::isfinite(value);
    }
    if (args.best_ids != nullptr) args.best_ids[row] = finite ? best_id : -1;
    if (args.best_values != nullptr) args.best_values[row] = finite ? best : NAN;
  }
}

}  // namespace llmk::reference
