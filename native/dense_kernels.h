// The part of the dense product that exists once for each instruction set.
#pragma once
#include "dense.h"
#include "dispatch.h"

namespace forkpoint {

struct DenseKernels {
  void (*dense)(const Dense&, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, Slice);
};
FORKPOINT_DECLARE_TABLE(DenseKernels, dense_kernels)

}  // namespace forkpoint
