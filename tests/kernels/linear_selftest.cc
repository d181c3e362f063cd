// Compares the linear kernels with their scalar reference without Python, for emulated processors. Integer formats must
// agree to the bit, float formats within rounding. Prints the instruction set and the number of comparisons.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../performance/kernels/reference.h"

namespace {

using namespace llmk;

struct Case {
  int64_t rows, columns, depth, group;
  bool gated, asymmetric;
};
const Case kCases[] = {{1, 1, 1, 0, false, false},    {3, 65, 77, 0, false, false}, {7, 130, 200, 32, false, false},
                       {13, 62, 100, 32, true, true}, {9, 70, 51, 24, false, true}, {6, 64, 256, 64, true, false}};

char* aligned(std::vector<char>* memory, int64_t bytes) {
  memory->assign(static_cast<size_t>(bytes) + 64, 0);
  return memory->data() + (64 - reinterpret_cast<uintptr_t>(memory->data()) % 64);
}

std::vector<float> random_floats(int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = static_cast<float>(std::rand() % 20001 - 10000) * 3e-4f;
  return values;
}

// Returns the largest difference of kernel and reference, relative to the largest value of the reference.
double difference(WeightFormat format, const Case& shape, Epilogue epilogue) {
  const int64_t group = is_integer(format) ? shape.group : 0;
  const DType dtype = is_integer(format) ? DType::kFloat32 : static_cast<DType>(format);
  const std::vector<float> weights = random_floats(shape.columns * shape.depth);
  const std::vector<float> floats = random_floats(shape.rows * shape.depth), bias = random_floats(shape.columns);
  std::vector<char> x(floats.size() * 4), blob_memory, row_memory;
  for (size_t i = 0; i < floats.size(); ++i) reference::store_any(dtype, floats[i], x.data(), static_cast<int64_t>(i));
  char* blob = aligned(&blob_memory, packed_weight_bytes(format, shape.columns, shape.depth, group, true));
  const PackSource source{format,       DType::kFloat32,  shape.columns,  shape.depth, group,
                          shape.gated, shape.asymmetric, weights.data(), nullptr,     nullptr,
                          bias.data()};
  if (pack_weight(source, blob) != 0) std::exit(1);
  QuantizedRows rows{};
  if (wants_quantized_rows(blob)) {
    rows = quantized_rows(blob, shape.rows, aligned(&row_memory, quantized_rows_bytes(blob, shape.rows)));
    for (int64_t row = 0; row < shape.rows; ++row) {
      reference::quantize_row(DType::kFloat32, floats.data() + row * shape.depth, rows, row, header_of(blob));
    }
  }
  const int64_t width = epilogue == Epilogue::kSwiglu ? shape.columns / 2 : shape.columns;
  std::vector<float> out(static_cast<size_t>(shape.rows * width)), expected(out.size());
  LinearArgs args{blob,  x.data(),   nullptr,  dtype,   shape.rows, shape.depth,
                  width, out.data(), epilogue, nullptr, nullptr};
  kernels().linear(args);
  args.out = expected.data();
  reference::linear(args, rows);
  const DType out_dtype = epilogue == Epilogue::kStoreFloat ? DType::kFloat32 : dtype;
  double most = 0, largest = 1e-30;
  for (int64_t i = 0; i < shape.rows * width; ++i) {
    const double right = load_element(out_dtype, expected.data(), i);
    most = std::fmax(most, std::fabs(load_element(out_dtype, out.data(), i) - right));
    largest = std::fmax(largest, std::fabs(right));
  }
  return most / largest;
}

}  // namespace

int main() {
  int done = 0, wrong = 0;
  for (int format = 0; format <= 5; ++format) {
    for (const Case& shape : kCases) {
      for (Epilogue epilogue : {Epilogue::kStore, Epilogue::kStoreFloat, Epilogue::kSwiglu}) {
        if (epilogue == Epilogue::kSwiglu && !shape.gated) continue;
        const bool exact = (format == 3 || format == 5) && epilogue != Epilogue::kSwiglu;
        const double limit = exact ? 0 : format == 2 ? 8e-3 : format == 1 ? 1e-3 : 2e-5;
        const double error = difference(static_cast<WeightFormat>(format), shape, epilogue);
        ++done;
        if (error <= limit) continue;
        ++wrong;
        std::printf("format %d, %lld x %lld x %lld, epilogue %d: off by %g\n", format,
                    static_cast<long long>(shape.rows), static_cast<long long>(shape.columns),
                    static_cast<long long>(shape.depth), static_cast<int>(epilogue), error);
      }
    }
  }
  std::printf("%s: %d comparisons, %d wrong\n", kernels().isa, done, wrong);
  return wrong == 0 ? 0 : 1;
}
