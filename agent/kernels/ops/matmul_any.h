// MatMul with any transposes and any type, as the primitive allows it. Float types use the kernel of matmul.h, after
// transposing operands where necessary. Other types use plain loops.
#pragma once
#include <cstdint>

namespace llmk {

struct AnyMatMulArgs {
  const void* a;  // [rows, depth], or [depth, rows] if transpose_a
  const void* b;  // [depth, columns], or [columns, depth] if transpose_b
  void* out;      // [rows, columns]
  int64_t rows, columns, depth;
  bool transpose_a, transpose_b;
  const char* dtype;
  const char* out_dtype;
};

int any_matmul(const char* op, const AnyMatMulArgs& args);

}  // namespace llmk
