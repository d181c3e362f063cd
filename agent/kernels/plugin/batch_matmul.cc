// Runs BatchMatMul(x [..., rows, depth], y [..., depth, columns], transpose_x, transpose_y): one matrix product for
// each index of the leading axes. The leading axes of x and y must be equal.
//
// The native graphs use BatchMatMul for the up-projections of latent attention, which have one weight for each head.
// These weights were packed once (keep_primitive() in ops/primitive_weight.h), and the kernel of ops/linear.h
// multiplies by the packed form. So a row's result does not depend on other rows. Other matrices go to
// ops/matmul_any.h.
#include <cstring>

#include "../common/dtype_bytes.h"
#include "../common/kernel_table.h"
#include "../common/thread_pool.h"
#include "../ops/matmul_any.h"
#include "call.h"
#include "packed_product.h"

namespace llmk {
namespace {

enum Argument { kX, kY, kTransposeX, kTransposeY, kOut, kArguments };

constexpr int64_t kPieceRows = 256;  // number of rows that a task multiplies by one weight

struct Batch {
  AnyMatMulArgs first;  // arguments of the product of the first matrix of x and the first of y
  int64_t count;        // number of products
  int64_t x_bytes, y_bytes, out_bytes;  // bytes of one matrix of x, y and the output
};

bool have_equal_batches(const Call& call) {
  if (call.ndims[kX] < 2 || call.ndims[kX] != call.ndims[kY]) return false;
  for (int axis = 0; axis < call.ndims[kX] - 2; ++axis) {
    if (call.dim(kX, axis) != call.dim(kY, axis)) return false;
  }
  return true;
}

int read_batch(const Call& call, Batch* batch) {
  const bool of_one_type = std::strcmp(call.dtypes[kX], call.dtypes[kY]) == 0;
  if (call.count != kArguments || !of_one_type || !have_equal_batches(call)) {
    return refuse_text(call.op, "takes matrices of one type with equal leading axes; they are %s of %d and %s of %d "
                       "dimensions", call.dtypes[kX], call.ndims[kX], call.dtypes[kY], call.ndims[kY]);
  }
  AnyMatMulArgs& args = batch->first;
  const int last = call.ndims[kX] - 1;
  args.a = call.data[kX];
  args.b = call.data[kY];
  args.out = call.data[kOut];
  args.transpose_a = call.boolean(kTransposeX);
  args.transpose_b = call.boolean(kTransposeY);
  args.rows = call.dim(kX, args.transpose_a ? last : last - 1);
  args.depth = call.dim(kX, args.transpose_a ? last - 1 : last);
  args.columns = call.dim(kY, args.transpose_b ? last - 1 : last);
  args.dtype = call.dtypes[kX];
  args.out_dtype = call.dtypes[kOut];
  if (call.dim(kY, args.transpose_b ? last : last - 1) != args.depth) {
    return refuse_text(call.op, "inner dimensions %lld and %lld differ", static_cast<long long>(args.depth),
                       static_cast<long long>(call.dim(kY, args.transpose_b ? last : last - 1)));
  }
  batch->count = call.size(kX, 0, last - 1);
  batch->x_bytes = args.rows * args.depth * dtype_bytes(args.dtype);
  batch->y_bytes = args.depth * args.columns * dtype_bytes(args.dtype);
  batch->out_bytes = args.rows * args.columns * dtype_bytes(args.out_dtype);
  return 0;
}

AnyMatMulArgs product(const Batch& batch, int64_t index) {
  AnyMatMulArgs args = batch.first;
  args.a = static_cast<const char*>(args.a) + index * batch.x_bytes;
  args.b = static_cast<const char*>(args.b) + index * batch.y_bytes;
  args.out = static_cast<char*>(args.out) + index * batch.out_bytes;
  return args;
}

// Finds the packed form of the weight of each matrix product (keep_primitive()). Leaves `blobs` empty if there is none.
int find_blobs(const Call& call, const Batch& batch, std::vector<const void*>* blobs) {
  const DType dtype = call.dtype(kX);
  if (dtype == DType::kUnsupported || batch.first.transpose_a) return 0;
  for (int64_t index = 0; index < batch.count; ++index) {
    PrimitiveWeight weight{};
    weight.values = product(batch, index).b;
    weight.type = static_cast<ValueType>(dtype);
    weight.transposed = batch.first.transpose_b ? 1 : 0;
    weight.columns = batch.first.columns;
    weight.depth = batch.first.depth;
    int error = 0;
    const void* blob = kept_blob(call.op, weight, &error);
    if (error != 0) return error;
    if (blob == nullptr) break;
    blobs->push_back(blob);
  }
  if (static_cast<int64_t>(blobs->size()) != batch.count) blobs->clear();
  return 0;
}

}  // namespace

int plugin_batch_matmul(const Call& call) {
  Batch batch{};
  std::vector<const void*> blobs;
  int error = read_batch(call, &batch);
  if (error == 0) error = find_blobs(call, batch, &blobs);
  if (error != 0 || batch.count == 0 || batch.first.rows == 0) return error;
  if (blobs.empty()) {
    for (int64_t index = 0; error == 0 && index < batch.count; ++index) {
      error = any_matmul(call.op, product(batch, index));
    }
    return error;
  }
  const DType dtype = call.dtype(kX);
  const int64_t pieces = ceil_div(batch.first.rows, kPieceRows), element = size_of(dtype);
  parallel_for(batch.count * pieces, [&](int64_t task) {
    const int64_t index = task / pieces, row = task % pieces * kPieceRows;
    const AnyMatMulArgs args = product(batch, index);
    const int64_t rows = smaller(kPieceRows, args.rows - row);
    char* out = static_cast<char*>(args.out) + row * args.columns * element;
    LinearArgs linear = linear_args(blobs[static_cast<size_t>(index)], dtype, rows, out);
    linear.x = static_cast<const char*>(args.a) + row * args.depth * element;
    kernels().linear(linear);
  });
  return 0;
}

}  // namespace llmk
