// Small operations, row by row: a row's bits depend on the row alone. Strides are between rows, in elements; a row itself is contiguous.
// Inputs and outputs may be the same memory. Everything is computed in float32 and rounded to the dtype where said.
#pragma once
#include "element.h"
#include "parallel.h"

namespace forkpoint {

enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, quick_gelu = 4, sigmoid = 5, tanh = 6, relu_squared = 7 };

// x / sqrt(mean(x^2) + epsilon) times (offset + weight). With offset 0 the normalised row is rounded before it is multiplied, as Llama
// does, unless rounds_once; with another offset all is float32 and rounded once, as Gemma does. A null weight multiplies by nothing.
void rms_norm(const void* x, int64_t x_stride, const void* weight, float epsilon, float offset, void* y, int64_t y_stride,
              int64_t rows, int64_t dim, Dtype, Slice, bool rounds_once = false);

// (x - mean) / sqrt(variance + epsilon) times weight plus bias (either may be null), rounded once.
void layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, float epsilon, void* y, int64_t y_stride,
                int64_t rows, int64_t dim, Dtype, Slice);

void activation(int kind, const void* x, int64_t x_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim, Dtype, Slice);

// activation(gate), rounded, times up, rounded.
void activation_product(int kind, const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, void* y, int64_t y_stride,
                        int64_t rows, int64_t dim, Dtype, Slice);

// a + b, a * b, x * factor, rounded.
void add(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim, Dtype,
         Slice);
void multiply(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* y, int64_t y_stride, int64_t rows, int64_t dim,
              Dtype, Slice);
void scale(const void* x, int64_t x_stride, float factor, void* y, int64_t y_stride, int64_t rows, int64_t dim, Dtype, Slice);

// Rotates the first rotary_dim of every head by its row's position: x * cos + rotate_half(x) * sin, each product and the sum rounded. The
// rest of a head is copied. x and y rows are [heads, dim]; cos and sin are [positions, rotary_dim] of the same dtype.
void rotary(const void* x, int64_t x_stride, int64_t heads, int64_t dim, int64_t rotary_dim, const void* cos, const void* sin,
            const int64_t* positions, void* y, int64_t y_stride, int64_t rows, Dtype, Slice);

}  // namespace forkpoint
