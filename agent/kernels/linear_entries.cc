// Plain C entries for ctypes around linear.h: packing for the agent, and the kernel itself for tests and benchmarks.
#include <vector>

#include "common/check.h"
#include "common/floating_point.h"
#include "common/kernel_table.h"
#include "ops/linear_reference.h"
#include "ops/primitive_weight.h"

namespace llmk {
namespace {

void reference_quantize(DType dtype, const void* x, const QuantizedRows& rows, int64_t row, const void* blob) {
  const PackedWeightHeader& header = header_of(blob);
  if (dtype == DType::kFloat32) reference::quantize_row(static_cast<const float*>(x), rows, row, header);
  if (dtype == DType::kFloat16) reference::quantize_row(static_cast<const half_t*>(x), rows, row, header);
  if (dtype == DType::kBFloat16) reference::quantize_row(static_cast<const bfloat_t*>(x), rows, row, header);
}

// How test entries quantise: all rows into memory of their own.
struct OwnRows {
  OwnRows(const LinearArgs& args, bool use_reference) {
    if (!wants_quantized_rows(args.weight)) return;
    memory.resize(static_cast<size_t>(quantized_rows_bytes(args.weight, args.rows)) + 64);
    char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    rows = quantized_rows(args.weight, args.rows, aligned);
    for (int64_t row = 0; row < args.rows; ++row) {
      const char* x = static_cast<const char*>(args.x) + row * args.x_stride * size_of(args.dtype);
      (use_reference ? reference_quantize : kernels().quantize_row)(args.dtype, x, rows, row, args.weight);
    }
  }
  std::vector<char> memory;
  QuantizedRows rows{};
};

}  // namespace
}  // namespace llmk

#define LLMK_ENTRY __attribute__((visibility("default")))

extern "C" {

LLMK_ENTRY int64_t llmk_packed_weight_bytes(int format, int64_t columns, int64_t depth, int64_t group, int biased) {
  return llmk::packed_weight_bytes(static_cast<llmk::WeightFormat>(format), columns, depth, group, biased != 0);
}

LLMK_ENTRY int llmk_pack_weight(const llmk::PackSource* source, void* blob, int64_t blob_bytes) {
  const llmk::StandardFloatingPoint scope;
  const int64_t needed = llmk::packed_weight_bytes(source->format, source->columns, source->depth, source->group,
                                                   source->bias != nullptr);
  if (blob_bytes < needed) {
    return llmk::refuse_text("pack_weight", "the blob has %lld bytes; it needs %lld",
                             static_cast<long long>(blob_bytes), static_cast<long long>(needed));
  }
  return llmk::pack_weight(*source, blob);
}

LLMK_ENTRY int llmk_join_weight_parts(void* blob, int64_t blob_bytes, int parts) {
  return llmk::join_weight_parts(blob, blob_bytes, parts);
}

LLMK_ENTRY int llmk_check_packed_weight(const void* blob, int64_t blob_bytes) {
  return llmk::check_packed_weight("check_packed_weight", blob, blob_bytes);
}

// Bytes of the packed form of a primitive's weight, and what keeps and forgets one (ops/primitive_weight.h).
LLMK_ENTRY int64_t llmk_primitive_blob_bytes(const llmk::PrimitiveWeight* weight) {
  return llmk::primitive_blob_bytes(*weight);
}

LLMK_ENTRY int llmk_keep_primitive(const llmk::PrimitiveWeight* weight, void* blob, int64_t blob_bytes) {
  const llmk::StandardFloatingPoint scope;
  return llmk::keep_primitive(*weight, blob, blob_bytes);
}

LLMK_ENTRY void llmk_forget_primitive(const void* values) { llmk::forget_primitive(values); }

// mode 0: the kernel quantises x itself; 1: rows quantised first, as a fused operator does; 2: the scalar reference.
LLMK_ENTRY int llmk_test_linear(const llmk::LinearArgs* given, int64_t blob_bytes, int mode) {
  const llmk::StandardFloatingPoint scope;
  llmk::LinearArgs args = *given;
  int error = llmk::check_packed_weight("Linear", args.weight, blob_bytes);
  if (error == 0) error = llmk::check_linear("Linear", args);
  if (error != 0) return error;
  if (mode == 0) {
    llmk::kernels().linear(args);
    return 0;
  }
  const llmk::OwnRows own(args, mode == 2);
  if (mode == 2) {
    llmk::reference::linear(args, own.rows);
  } else {
    args.quantized = llmk::wants_quantized_rows(args.weight) ? &own.rows : nullptr;
    llmk::kernels().linear(args);
  }
  return 0;
}

}  // extern "C"
