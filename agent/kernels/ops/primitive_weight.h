// Weights as the primitives of matrix products take them, and their packed form (linear.h), which is what the products
// of a CPU read.
//
//   MatMul                  values of the activations' type            [columns, depth]
//   QuantBatchMatmul        int8, scales [columns]                     [columns, depth] or, not transposed,
//                                                                      [depth, columns]
//   WeightQuantBatchMatmul  int8, or int4 two to a byte along the      the same; (value + offset) * scale, scales and
//                           last axis, the even one in the low half    offsets [columns], or by groups of the depth
//                                                                      [groups, columns], transposed [columns, groups]
//   GroupedMatmulV4         any of the three, for each of its weights  [depth, columns], not transposed
//
// A weight that never changes is packed once: `keep` says so. It is then known by the address of its values, and a
// primitive that is called with this address must come with the very weight that was kept, or refuses. Other weights
// are packed at each call. Whoever keeps a weight lets it go (`forget`) before its memory ends.
#pragma once
#include <cstdint>

#include "../common/types.h"
#include "linear.h"

namespace llmk {

enum class ValueType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt4 = 4 };

struct PrimitiveWeight {
  const void* values;
  const void* scales;   // null for floats
  const void* offsets;  // null: 0; whole numbers, with int4 -8 to 8, of the scales' type and shape
  ValueType type;
  int32_t scale_type;      // a DType
  int32_t transposed;      // 1: [columns, depth], scales [columns, groups]; 0: [depth, columns], [groups, columns]
  int32_t float_products;  // integers: 1 where the activations stay floats (WeightQuantBatchMatmul)
  int64_t columns, depth, group;  // group 0: one scale a column
};

// 0 for a weight that cannot be.
int64_t primitive_blob_bytes(const PrimitiveWeight& weight);

// Writes the blob (64-byte aligned). 0, or an error code after one line on standard error.
int pack_primitive(const char* op, const PrimitiveWeight& weight, void* blob);

int keep_primitive(const PrimitiveWeight& weight, void* blob, int64_t blob_bytes);
void forget_primitive(const void* values);

// The blob of a kept weight; null where the address is not known. Sets `error` when it is, but the weight another.
const void* kept_blob(const char* op, const PrimitiveWeight& weight, int* error);

}  // namespace llmk
