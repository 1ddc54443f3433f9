#include "rows.h"

#include <nanobind/nanobind.h>

#include "rows_kernels.h"

namespace nb = nanobind;

namespace forkpoint {

void rms_norm(const void* x, int64_t x_stride, const void* weight, float epsilon, float offset, void* y, int64_t y_stride,
              int64_t rows, int64_t dim, Dtype dtype, Slice slice, bool rounds_once) {
  chosen_rows_kernels().rms({epsilon, offset, rounds_once}, {x, x_stride}, weight, {y, y_stride, rows, dim}, dtype, slice);
}

void layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, float epsilon, void* y, int64_t y_stride,
                int64_t rows, int64_t dim, Dtype dtype, Slice slice) {
  chosen_rows_kernels().layer(epsilon, {x, x_stride}, weight, bias, {y, y_stride, rows, dim}, dtype, slice);
}

void activation(int kind, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim, Dtype dtype,
                Slice slice) {
  chosen_rows_kernels().activate(Activation(kind), {x, x_stride}, {y, y_stride, rows, dim}, dtype, slice);
}

void activation_product(int kind, const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, void* y, int64_t y_stride,
                        int64_t rows, int64_t dim, Dtype dtype, Slice slice) {
  chosen_rows_kernels().activate_multiply(Activation(kind), {gate, gate_stride}, {up, up_stride}, {y, y_stride, rows, dim}, dtype, slice);
}

void add(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim,
         Dtype dtype, Slice slice) {
  chosen_rows_kernels().sum({a, a_stride}, {b, b_stride}, {y, y_stride, rows, dim}, dtype, slice);
}

void multiply(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim,
              Dtype dtype, Slice slice) {
  chosen_rows_kernels().product({a, a_stride}, {b, b_stride}, {y, y_stride, rows, dim}, dtype, slice);
}

void scale(const void* x, int64_t x_stride, float factor, void* y, int64_t y_stride, int64_t rows, int64_t dim, Dtype dtype,
           Slice slice) {
  chosen_rows_kernels().scaled({x, x_stride}, factor, {y, y_stride, rows, dim}, dtype, slice);
}

void rotary(const void* x, int64_t x_stride, int64_t heads, int64_t dim, int64_t rotary_dim, const void* cos, const void* sin,
            const int64_t* positions, void* y, int64_t y_stride, int64_t rows, Dtype dtype, Slice slice) {
  Angles angles{cos, sin, positions, heads, dim, rotary_dim};
  chosen_rows_kernels().rotate(angles, {x, x_stride}, {y, y_stride, rows, heads * dim}, dtype, slice);
}

namespace {

template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void register_rows(nb::module_& m) {
  m.def("rms_norm", [](uintptr_t x, int64_t x_stride, uintptr_t weight, float epsilon, float offset, bool rounds_once, uintptr_t y,
                       int64_t y_stride, int64_t rows, int64_t dim, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) {
      rms_norm(at(x), x_stride, at(weight), epsilon, offset, at(y), y_stride, rows, dim, Dtype(dtype), slice, rounds_once);
    });
  });
  m.def("layer_norm", [](uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, float epsilon, uintptr_t y, int64_t y_stride,
                         int64_t rows, int64_t dim, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) {
      layer_norm(at(x), x_stride, at(weight), at(bias), epsilon, at(y), y_stride, rows, dim, Dtype(dtype), slice);
    });
  });
  m.def("activation", [](int kind, uintptr_t x, int64_t x_stride, uintptr_t y, int64_t y_stride, int64_t rows, int64_t dim, int dtype,
                         int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) { activation(kind, at(x), x_stride, at(y), y_stride, rows, dim, Dtype(dtype), slice); });
  });
  m.def("activation_product", [](int kind, uintptr_t gate, int64_t gate_stride, uintptr_t up, int64_t up_stride, uintptr_t y,
                                 int64_t y_stride, int64_t rows, int64_t dim, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) {
      activation_product(kind, at(gate), gate_stride, at(up), up_stride, at(y), y_stride, rows, dim, Dtype(dtype), slice);
    });
  });
  m.def("rotary", [](uintptr_t x, int64_t x_stride, int64_t heads, int64_t dim, int64_t rotary_dim, uintptr_t cos, uintptr_t sin,
                     uintptr_t positions, uintptr_t y, int64_t y_stride, int64_t rows, int dtype, int threads) {
    nb::gil_scoped_release released;
    parallel(threads, [&](Slice slice) {
      rotary(at(x), x_stride, heads, dim, rotary_dim, at(cos), at(sin), at<int64_t>(positions), at(y), y_stride, rows, Dtype(dtype),
             slice);
    });
  });
}

}  // namespace forkpoint
