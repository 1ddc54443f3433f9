// Dense product y = x W^T + bias with weights packed once. Every (row, output) is one float32 accumulator summed over the inputs in one
// order (for bfloat16 pair by pair, the second of a pair first, as the BF16 instruction of x86 does), so that a row's bits depend on
// nothing but the row: not on the number of rows, the tile, the thread or the instruction set (subnormal numbers excepted: the BF16
// instruction takes them for zero).
//
// Packed: bfloat16 [outputs/16][inputs/2][16][2], others [outputs/16][inputs][16]; outputs padded with zeros to a multiple of 16, bfloat16
// inputs to a multiple of 2.
#pragma once
#include "element.h"
#include "parallel.h"

namespace forkpoint {

struct Dense {
  const void* packed;
  const void* bias;  // of the same dtype, or null; added in float32 before rounding
  int64_t inputs, outputs;
  Dtype dtype;
};

int64_t packed_elements(int64_t inputs, int64_t outputs, Dtype);

// plain is [outputs, inputs], contiguous. unpack gives the same bytes back.
void pack(const void* plain, void* packed, int64_t inputs, int64_t outputs, Dtype, Slice);
void unpack(const void* packed, void* plain, int64_t inputs, int64_t outputs, Dtype, Slice);

// x [rows, inputs], y [rows, outputs]; strides in elements; y in the dtype of the weights.
void dense(const Dense&, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, Slice);

// Rows of the plain weights: y[i] = W[ids[i]]. Ids must be in range.
void packed_embedding(const Dense&, const int64_t* ids, void* y, int64_t y_stride, int64_t rows, Slice);

}  // namespace forkpoint
