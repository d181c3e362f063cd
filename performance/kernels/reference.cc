// References of the kernels that work on rows or elements. The references of linear layers and attention have their own
// files.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace llmk {
namespace reference {

void rms_norm(const RmsNormArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t first = row * args.width;
    std::vector<double> values(static_cast<size_t>(args.width));
    double squares = 0;
    for (int64_t i = 0; i < args.width; ++i) {
      float value = load_any(args.dtype, args.x, first + i);
      if (args.residual != nullptr) {  // the norm sees the sum as it is stored
        store_any(args.dtype, value + load_any(args.dtype, args.residual, first + i), args.sum, first + i);
        value = load_any(args.dtype, args.sum, first + i);
      }
      values[static_cast<size_t>(i)] = value;
      squares += static_cast<double>(value) * value;
    }
    const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(args.width) + args.epsilon);
    if (args.rstd != nullptr) args.rstd[row] = static_cast<float>(rstd);
    for (int64_t i = 0; i < args.width; ++i) {
      const double scaled = values[static_cast<size_t>(i)] * rstd * load_any(args.gamma_dtype, args.gamma, i);
      store_any(args.dtype, scaled, args.y, first + i);
    }
  }
}

void swiglu(const SwigluArgs& args) {
  for (int64_t row = 0; row < args.outer; ++row) {
    for (int64_t i = 0; i < args.inner; ++i) {
      const double gate = load_any(args.dtype, args.input, row * 2 * args.inner + i);
      const double value = load_any(args.dtype, args.input, (row * 2 + 1) * args.inner + i);
      store_any(args.dtype, gate / (1 + std::exp(-gate)) * value, args.out, row * args.inner + i);
    }
  }
}

void silu(const SiluArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    const double x = load_any(args.dtype, args.input, i);
    store_any(args.dtype, x / (1 + std::exp(-x)), args.out, i);
  }
}

void rotary(const RotaryArgs& args) {
  const int64_t half = args.dim / 2;
  for (int64_t token = 0; token < args.tokens; ++token) {
    const int64_t table = (args.positions == nullptr ? token : args.positions[token]) * args.dim;
    const auto cos = [&](int64_t i) { return load_any(args.table_dtype, args.cos, table + i); };
    const auto sin = [&](int64_t i) { return load_any(args.table_dtype, args.sin, table + i); };
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t from = token * args.x_stride + head * args.dim, to = token * args.out_stride + head * args.dim;
      for (int64_t i = 0; i < half; ++i) {
        const int64_t a = args.interleaved ? 2 * i : i, b = args.interleaved ? 2 * i + 1 : i + half;
        const double first = load_any(args.dtype, args.x, from + a), second = load_any(args.dtype, args.x, from + b);
        store_any(args.dtype, first * cos(a) - second * sin(a), args.out, to + a);
        store_any(args.dtype, second * cos(b) + first * sin(b), args.out, to + b);
      }
    }
  }
}

void matmul(const MatMulArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t column = 0; column < args.columns; ++column) {
      double total = 0;
      for (int64_t k = 0; k < args.depth; ++k) {
        total += static_cast<double>(load_any(args.dtype, args.x, row * args.depth + k)) *
                 load_any(args.dtype, args.w, column * args.depth + k);
      }
      store_any(args.dtype, total, args.out, row * args.columns + column);
    }
  }
}

void route_tokens(const RoutingArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    std::vector<double> values(args.logits + row * args.experts, args.logits + (row + 1) * args.experts);
    const double top = *std::max_element(values.begin(), values.end());
    double mass = 0, sum = 0;
    for (double& value : values) mass += value = std::exp(value - top);
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return args.logits[row * args.experts + a] > args.logits[row * args.experts + b];
    });
    for (int64_t rank = 0; rank < args.chosen; ++rank) {
      sum += values[static_cast<size_t>(order[static_cast<size_t>(rank)])] / mass;
    }
    for (int64_t rank = 0; rank < args.chosen; ++rank) {
      const int32_t id = order[static_cast<size_t>(rank)];
      args.ids[row * args.chosen + rank] = id;
      args.weights[row * args.chosen + rank] =
          static_cast<float>(values[static_cast<size_t>(id)] / mass / (args.normalised ? sum : 1.0));
    }
  }
}

void sum_parts(DType dtype, const void* const* parts, int num_parts, DType out_dtype, void* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float total = load_any(dtype, parts[0], i);
    for (int r = 1; r < num_parts; ++r) total += load_any(dtype, parts[r], i);
    store_any(out_dtype, total, out, i);
  }
}

}  // namespace reference
}  // namespace llmk
