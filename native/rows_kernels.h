// The part of the row operations that exists once for each instruction set.
#pragma once
#include "dispatch.h"
#include "rows.h"

namespace forkpoint {

struct Rms {
  float epsilon, offset;
  bool rounds_once;
};

// A matrix in memory: rows of contiguous elements.
struct Matrix {
  const void* data;
  int64_t stride;
};
struct Target {
  void* data;
  int64_t stride, rows, dim;
};

struct Angles {
  const void *cos, *sin;
  const int64_t* positions;
  int64_t heads, dim, rotary_dim;
};

struct RowsKernels {
  void (*rms)(Rms, Matrix x, const void* weight, Target, Dtype, Slice);
  void (*layer)(float epsilon, Matrix x, const void* weight, const void* bias, Target, Dtype, Slice);
  void (*activate)(Activation, Matrix x, Target, Dtype, Slice);
  void (*activate_multiply)(Activation, Matrix gate, Matrix up, Target, Dtype, Slice);
  void (*sum)(Matrix a, Matrix b, Target, Dtype, Slice);
  void (*product)(Matrix a, Matrix b, Target, Dtype, Slice);
  void (*scaled)(Matrix x, float factor, Target, Dtype, Slice);
  void (*rotate)(const Angles&, Matrix x, Target, Dtype, Slice);
};
FORKPOINT_DECLARE_TABLE(RowsKernels, rows_kernels)

}  // namespace forkpoint
