// Weights in the layouts of MindSpore's matrix products, and their packed form (linear.h), which the CPU kernels read.
//
//   MatMul                  values of the activations' type            [columns, depth]
//   QuantBatchMatmul        int8, scales [columns]; after QuantV2      [columns, depth] or, not transposed,
//                           sum offsets int32 [columns]                [depth, columns]
//   WeightQuantBatchMatmul  int8, or int4 two to a byte along the      the same; (value + offset) * scale, scales and
//                           last axis, the even one in the low half    offsets [columns], or by groups of the depth
//                                                                      [groups, columns], transposed [columns, groups]
//   GroupedMatmulV4         any of the three, for each of its weights  [depth, columns], not transposed
//
// A weight that never changes is packed once, by keep_primitive(). Then the address of its values identifies the
// weight. If a primitive gets this address with other sizes or types, it fails. Other weights are packed in each call.
// The caller of keep_primitive() must call forget_primitive() before it frees the weight.
#pragma once
#include <cstdint>

#include "../common/types.h"
#include "linear.h"

namespace llmk {

enum class ValueType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kInt4 = 4 };

struct PrimitiveWeight {
  const void* values;
  const void* scales;   // null for float weights
  const void* offsets;  // null: all 0; otherwise whole numbers (-8 to 8 with int4) in the type and shape of the scales
  const int32_t* sum_offsets;  // null: all 0; added to the integer sums behind QuantV2, [columns]
  ValueType type;
  int32_t scale_type;      // a DType
  // 1: [columns, depth] with scales [columns, groups]; 0: [depth, columns] with scales [groups, columns]
  int32_t transposed;
  int32_t float_products;  // integers: 1 if the activations stay floats (WeightQuantBatchMatmul)
  int64_t columns, depth, group;  // group 0: one scale per column
};

// Returns the size of the packed weight, or 0 if the weight is invalid.
int64_t primitive_blob_bytes(const PrimitiveWeight& weight);

// Writes the blob (64-byte aligned). Returns 0, or an error code after one line on standard error.
int pack_primitive(const char* op, const PrimitiveWeight& weight, void* blob);

int keep_primitive(const PrimitiveWeight& weight, void* blob, int64_t blob_bytes);
void forget_primitive(const void* values);

// Returns the blob of a kept weight, or null for an unknown address. Sets `error` if the kept weight differs.
const void* kept_blob(const char* op, const PrimitiveWeight& weight, int* error);

}  // namespace llmk
