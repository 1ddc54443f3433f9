#include "elementwise.h"

#include "dispatch.h"

namespace forkpoint {

FORKPOINT_DECLARE_TABLE(ElementwiseKernels, elementwise_kernels)

void elementwise(Elementwise operation, const Strided& left, const Strided& right, float number, const Strided& out, int64_t rows,
                 int64_t outer, int64_t inner, Slice slice) {
  chosen_elementwise_kernels().run(operation, left, right, number, out, rows, outer, inner, slice);
}

}  // namespace forkpoint
