// MatMul as the primitive allows it: any transposes, any type. float32, float16 and bfloat16 go through the kernel of
// matmul.h after operands that lie the other way round are transposed; the other types are plain loops.
#pragma once
#include <cstdint>

namespace llmk {

struct AnyMatMulArgs {
  const void* a;  // [rows, depth], or [depth, rows] where transpose_a
  const void* b;  // [depth, columns], or [columns, depth] where transpose_b
  void* out;      // [rows, columns]
  int64_t rows, columns, depth;
  bool transpose_a, transpose_b;
  const char* dtype;
  const char* out_dtype;
};

int any_matmul(const char* op, const AnyMatMulArgs& args);

}  // namespace llmk
