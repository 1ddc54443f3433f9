// Sums, products, copies and conversions of rows that may lie strided. Computed in float32 and rounded once, as torch does.
#pragma once
#include "element.h"
#include "parallel.h"

namespace forkpoint {

enum class Elementwise : int { add, subtract, multiply, divide, copy };

// Element (row, outer, inner) is at base + (row_of[row] * row_stride + outer * outer_stride + inner * inner_stride) elements.
struct Strided {
  char* base = nullptr;
  int64_t row_stride = 0, outer_stride = 0, inner_stride = 0;
  Dtype dtype = Dtype::float32;
  const int64_t* row_of = nullptr;  // null: the row itself

  char* at(int64_t row, int64_t outer) const {
    return base + ((row_of ? row_of[row] : row) * row_stride + outer * outer_stride) * element_bytes(dtype);
  }
};

// Where `right.base` is null the right operand is `number`. `inner` elements lie at the inner strides, `outer` such runs at the outer ones.
void elementwise(Elementwise, const Strided& left, const Strided& right, float number, const Strided& out, int64_t rows, int64_t outer,
                 int64_t inner, Slice);

// The function above, as compiled for one instruction set.
struct ElementwiseKernels {
  decltype(&elementwise) run;
};

}  // namespace forkpoint
