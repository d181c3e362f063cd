// Weights in the layouts of MindSpore's matrix products, and their packed form (linear.h), which the CPU kernels read.
//
//  MatMul                  values [columns, depth] of the activations' type
//  QuantBatchMatmul        int8 values [columns, depth], or [depth, columns] if not transposed; scales [columns];
//                          after QuantV2 also int32 sum offsets [columns]
//  WeightQuantBatchMatmul  int8 or int4 values, [columns, depth], or [depth, columns] if not transposed;
//                          two int4 values share a byte, the even index of the last axis in the low half;
//                          a weight is (value + offset) * scale; scales and offsets are [columns], or with groups
//                          of the depth [columns, groups], or [groups, columns] if not transposed
//  GroupedMatmulV4         several weights of equal size, one after another; each has one of the forms above and is
//                          [depth, columns]
//
// A weight that never changes is packed once, by keep_primitive(). Then the address of its values identifies the
// weight. A primitive fails if it gets this address with other sizes or types. Other weights are packed in each call.
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
  const void* offsets;  // null: all 0; otherwise whole numbers (int4: -8 to 8) in the type and shape of the scales
  const int32_t* sum_offsets;  // [columns], added to the integer sums after QuantV2; null: all 0
  ValueType type;
  int32_t scale_type;      // a DType
  // 1: values are [columns, depth], scales [columns, groups]. 0: values are [depth, columns], scales [groups, columns].
  int32_t transposed;
  int32_t float_products;  // for int8 values: 1 if the activations stay floats (WeightQuantBatchMatmul)
  int64_t columns, depth, group;  // group: number of depths that share a scale; 0: one scale per column
  // 1: the columns are gate and `up` of Swiglu, so the packed form is a gated weight (linear.h). A primitive that
  // multiplies by the weight does not know this, so kept_blob() does not compare it.
  int32_t gated;
};

// Returns the size of the packed weight, or 0 if the weight is invalid.
int64_t primitive_blob_bytes(const PrimitiveWeight& weight);

// Writes the packed weight to `blob`, which is aligned to 64 bytes. Returns 0. After an error, writes one line to
// standard error and returns an error code.
int pack_primitive(const char* op, const PrimitiveWeight& weight, void* blob);

int keep_primitive(const PrimitiveWeight& weight, void* blob, int64_t blob_bytes);
void forget_primitive(const void* values);

// Returns the blob that keep_primitive() has stored for the address weight.values, or null if there is none. If the
// stored weight has other sizes, types or scales than `weight`, sets `error` and returns null.
const void* kept_blob(const char* op, const PrimitiveWeight& weight, int* error);

// Returns true if keep_primitive() has stored a gated weight for this address.
bool has_gated_blob(const void* values);

}  // namespace llmk
