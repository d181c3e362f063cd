#include "matmul_any.h"

#include <complex>
#include <cstring>
#include <vector>

#include "../common/check.h"
#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../common/tensors.h"
#include "../common/thread_pool.h"

namespace llmk {
namespace {

template <class T>
void transpose(const void* source, int64_t rows, int64_t columns, std::vector<char>* out) {
  out->resize(static_cast<size_t>(rows * columns) * sizeof(T));
  const T* from = static_cast<const T*>(source);
  T* to = reinterpret_cast<T*>(out->data());
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) to[column * rows + row] = from[row * columns + column];
  }
}

// Returns `source` [rows, columns] transposed. `buffer` owns the result.
const void* transposed(const void* source, int64_t rows, int64_t columns, DType dtype, std::vector<char>* buffer) {
  if (size_of(dtype) == 4) {
    transpose<uint32_t>(source, rows, columns, buffer);
  } else {
    transpose<uint16_t>(source, rows, columns, buffer);
  }
  return buffer->data();
}

void float_matmul(const AnyMatMulArgs& args, DType dtype) {
  std::vector<char> a, b;
  MatMulArgs plain{args.a, args.b, args.out, args.rows, args.columns, args.depth, dtype};
  if (args.transpose_a) plain.x = transposed(args.a, args.depth, args.rows, dtype, &a);
  if (!args.transpose_b) plain.w = transposed(args.b, args.depth, args.columns, dtype, &b);
  kernels().matmul(plain);
}

// Multiplies matrices of any type with plain loops.
template <class T, class Out>
void plain_matmul(const AnyMatMulArgs& args) {
  const T* a = static_cast<const T*>(args.a);
  const T* b = static_cast<const T*>(args.b);
  Out* out = static_cast<Out*>(args.out);
  const int64_t a_row = args.transpose_a ? 1 : args.depth, a_depth = args.transpose_a ? args.rows : 1;
  const int64_t b_column = args.transpose_b ? args.depth : 1, b_depth = args.transpose_b ? 1 : args.columns;
  parallel_for(args.rows, [&](int64_t row) {
    for (int64_t column = 0; column < args.columns; ++column) {
      Out total{};
      for (int64_t k = 0; k < args.depth; ++k) {
        total += static_cast<Out>(a[row * a_row + k * a_depth]) * static_cast<Out>(b[column * b_column + k * b_depth]);
      }
      out[row * args.columns + column] = total;
    }
  });
}

struct PlainMatMul {
  const char* dtype;
  const char* out_dtype;
  void (*run)(const AnyMatMulArgs&);
};

// Sums of integers may wrap around. Signed overflow is undefined in C++, so most sums use unsigned types (the second
// template argument).
const PlainMatMul kPlain[] = {
    {"int8", "int8", plain_matmul<int8_t, uint8_t>},
    {"int8", "int32", plain_matmul<int8_t, int32_t>},
    {"uint8", "uint8", plain_matmul<uint8_t, uint8_t>},
    {"int16", "int16", plain_matmul<int16_t, uint16_t>},
    {"uint16", "uint16", plain_matmul<uint16_t, uint16_t>},
    {"int32", "int32", plain_matmul<int32_t, uint32_t>},
    {"uint32", "uint32", plain_matmul<uint32_t, uint32_t>},
    {"int64", "int64", plain_matmul<int64_t, uint64_t>},
    {"uint64", "uint64", plain_matmul<uint64_t, uint64_t>},
    {"float64", "float64", plain_matmul<double, double>},
    {"complex64", "complex64", plain_matmul<std::complex<float>, std::complex<float>>},
    {"complex128", "complex128", plain_matmul<std::complex<double>, std::complex<double>>},
};

}  // namespace

int any_matmul(const char* op, const AnyMatMulArgs& args) {
  if (args.rows == 0 || args.columns == 0) return 0;
  const DType dtype = parse_dtype(args.dtype);
  const bool same = std::strcmp(args.dtype, args.out_dtype) == 0;
  if (dtype != DType::kUnsupported && same) {
    float_matmul(args, dtype);
    return 0;
  }
  for (const PlainMatMul& plain : kPlain) {
    if (std::strcmp(plain.dtype, args.dtype) == 0 && std::strcmp(plain.out_dtype, args.out_dtype) == 0) {
      plain.run(args);
      return 0;
    }
  }
  return refuse_text(op, "%s to %s is not supported", args.dtype, args.out_dtype);
}

}  // namespace llmk
