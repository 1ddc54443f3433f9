// Row operations, sixteen elements at a time. Sums run over sixteen accumulators and are then added in one order.
#include "rows_kernels.h"

#include "vector.h"

namespace forkpoint {
namespace {

// A row cut into sixteens and a rest; body(from, count) with count 16 or less at the end.
template <class Body>
inline void in_sixteens(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) body(i, lanes);
  if (i < end) body(i, end - i);
}

template <class T>
inline Vector take(const T* from, int64_t count) {
  return count == lanes ? load(from) : load_some(from, count);
}
template <class T>
inline void put(T* to, Vector x, int64_t count) {
  if (count == lanes) store(to, x);
  else store_some(to, x, count);
}
// Zero beyond the first `count`.
inline Vector only(Vector x, int64_t count) {
  if (count == lanes) return x;
  float whole[16];
  store(whole, x);
  return load_some(whole, count);
}

// Calls body(row, begin, end) for this thread's share: whole rows where there are enough, else sixteens of columns.
template <class Body>
inline void share(const Target& target, Slice slice, Body body) {
  if (target.rows >= slice.threads) {
    for (int64_t row = slice.begin(target.rows); row < slice.end(target.rows); row++) body(row, int64_t(0), target.dim);
    return;
  }
  int64_t units = (target.dim + lanes - 1) / lanes, end = slice.end(units) * lanes;
  for (int64_t row = 0; row < target.rows; row++) body(row, slice.begin(units) * lanes, end < target.dim ? end : target.dim);
}

template <class T>
inline const T* row_of(Matrix matrix, int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride;
}
template <class T>
inline T* row_of(Target target, int64_t row) {
  return static_cast<T*>(target.data) + row * target.stride;
}

template <class T>
void rms_row(Rms rms, const T* x, const T* weight, T* y, int64_t dim) {
  Vector squares = zero();
  in_sixteens(0, dim, [&](int64_t i, int64_t n) {
    Vector v = take(x + i, n);
    squares = multiply_add(v, v, squares);
  });
  Vector factor = broadcast(1.0f / __builtin_sqrtf(sum_of(squares) / float(dim) + rms.epsilon)), offset = broadcast(rms.offset);
  bool rounds_once = rms.rounds_once || rms.offset != 0.0f;
  in_sixteens(0, dim, [&](int64_t i, int64_t n) {
    Vector v = take(x + i, n) * factor;
    if (!rounds_once) v = rounded<T>(v);
    if (weight) v = v * (rms.offset != 0.0f ? take(weight + i, n) + offset : take(weight + i, n));
    put(y + i, v, n);
  });
}

template <class T>
void layer_row(float epsilon, const T* x, const T* weight, const T* bias, T* y, int64_t dim) {
  Vector total = zero(), squares = zero();
  in_sixteens(0, dim, [&](int64_t i, int64_t n) { total = total + take(x + i, n); });
  Vector mean = broadcast(sum_of(total) / float(dim));
  in_sixteens(0, dim, [&](int64_t i, int64_t n) {
    Vector v = only(take(x + i, n) - mean, n);
    squares = multiply_add(v, v, squares);
  });
  Vector factor = broadcast(1.0f / __builtin_sqrtf(sum_of(squares) / float(dim) + epsilon));
  in_sixteens(0, dim, [&](int64_t i, int64_t n) {
    Vector v = (take(x + i, n) - mean) * factor;
    if (weight) v = v * take(weight + i, n);
    if (bias) v = v + take(bias + i, n);
    put(y + i, v, n);
  });
}

inline Vector logistic(Vector x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(zero() - x)); }

inline Vector gelu_tanh(Vector x) {
  Vector cube = x * x * x;
  Vector inner = multiply_add(broadcast(0.044715f), cube, x) * broadcast(0.7978845608028654f);
  return broadcast(0.5f) * x * (broadcast(1.0f) + hyperbolic_tangent(inner));
}

template <Activation kind>
inline Vector activated(Vector x) {
  if constexpr (kind == Activation::silu) return x / (broadcast(1.0f) + exponential(zero() - x));
  if constexpr (kind == Activation::gelu)
    return broadcast(0.5f) * x * (broadcast(1.0f) + error_function(x * broadcast(0.7071067811865476f)));
  if constexpr (kind == Activation::gelu_tanh) return gelu_tanh(x);
  if constexpr (kind == Activation::relu) return select(less(x, zero()), zero(), x);
  if constexpr (kind == Activation::quick_gelu) return x * logistic(x * broadcast(1.702f));
  if constexpr (kind == Activation::sigmoid) return logistic(x);
  if constexpr (kind == Activation::tanh) return hyperbolic_tangent(x);
  Vector positive = select(less(x, zero()), zero(), x);
  return positive * positive;
}

template <Activation kind>
struct Activate {
  template <class T>
  static void run(const T* x, T* y, int64_t begin, int64_t end) {
    in_sixteens(begin, end, [&](int64_t i, int64_t n) { put(y + i, activated<kind>(take(x + i, n)), n); });
  }
  template <class T>
  static void run(const T* gate, const T* up, T* y, int64_t begin, int64_t end) {
    in_sixteens(begin, end, [&](int64_t i, int64_t n) {
      put(y + i, rounded<T>(activated<kind>(take(gate + i, n))) * take(up + i, n), n);
    });
  }
};

template <class... Arguments>
void activate_row(Activation kind, Arguments... arguments) {
  switch (kind) {
    case Activation::silu: return Activate<Activation::silu>::run(arguments...);
    case Activation::gelu: return Activate<Activation::gelu>::run(arguments...);
    case Activation::gelu_tanh: return Activate<Activation::gelu_tanh>::run(arguments...);
    case Activation::relu: return Activate<Activation::relu>::run(arguments...);
    case Activation::quick_gelu: return Activate<Activation::quick_gelu>::run(arguments...);
    case Activation::sigmoid: return Activate<Activation::sigmoid>::run(arguments...);
    case Activation::tanh: return Activate<Activation::tanh>::run(arguments...);
    case Activation::relu_squared: return Activate<Activation::relu_squared>::run(arguments...);
  }
}

// One half of a rotated head: own * cos + sign * other * sin, each rounded.
template <class T>
inline Vector rotated(Vector own, Vector other, const T* cos, const T* sin, int64_t n, bool negative) {
  Vector turned = rounded<T>(other * take(sin, n));
  return rounded<T>(own * take(cos, n)) + (negative ? zero() - turned : turned);
}

template <class T>
void rotate_head(const Angles& angles, const T* x, const T* cos, const T* sin, T* y) {
  int64_t half = angles.rotary_dim / 2;
  in_sixteens(0, half, [&](int64_t i, int64_t n) {
    Vector first = take(x + i, n), second = take(x + half + i, n);
    put(y + i, rotated(first, second, cos + i, sin + i, n, true), n);
    put(y + half + i, rotated(second, first, cos + half + i, sin + half + i, n, false), n);
  });
  if (x != y) std::memcpy(y + 2 * half, x + 2 * half, size_t(angles.dim - 2 * half) * sizeof(T));
}

void rms(Rms rms, Matrix x, const void* weight, Target target, Dtype dtype, Slice slice) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = slice.begin(target.rows); row < slice.end(target.rows); row++)
      rms_row(rms, row_of<T>(x, row), static_cast<const T*>(weight), row_of<T>(target, row), target.dim);
  });
}

void layer(float epsilon, Matrix x, const void* weight, const void* bias, Target target, Dtype dtype, Slice slice) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = slice.begin(target.rows); row < slice.end(target.rows); row++)
      layer_row(epsilon, row_of<T>(x, row), static_cast<const T*>(weight), static_cast<const T*>(bias), row_of<T>(target, row),
                target.dim);
  });
}

void activate(Activation kind, Matrix x, Target target, Dtype dtype, Slice slice) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    share(target, slice, [&](int64_t row, int64_t begin, int64_t end) {
      activate_row(kind, row_of<T>(x, row), row_of<T>(target, row), begin, end);
    });
  });
}

void activate_multiply(Activation kind, Matrix gate, Matrix up, Target target, Dtype dtype, Slice slice) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    share(target, slice, [&](int64_t row, int64_t begin, int64_t end) {
      activate_row(kind, row_of<T>(gate, row), row_of<T>(up, row), row_of<T>(target, row), begin, end);
    });
  });
}

template <class Operation>
void combine(Matrix a, Matrix b, Target target, Dtype dtype, Slice slice, Operation operation) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    share(target, slice, [&](int64_t row, int64_t begin, int64_t end) {
      const T *left = row_of<T>(a, row), *right = row_of<T>(b, row);
      T* y = row_of<T>(target, row);
      in_sixteens(begin, end, [&](int64_t i, int64_t n) { put(y + i, operation(take(left + i, n), take(right + i, n)), n); });
    });
  });
}

void sum(Matrix a, Matrix b, Target target, Dtype dtype, Slice slice) {
  combine(a, b, target, dtype, slice, [](Vector x, Vector y) { return x + y; });
}

void product(Matrix a, Matrix b, Target target, Dtype dtype, Slice slice) {
  combine(a, b, target, dtype, slice, [](Vector x, Vector y) { return x * y; });
}

void scaled(Matrix x, float factor, Target target, Dtype dtype, Slice slice) {
  Vector by = broadcast(factor);
  combine(x, x, target, dtype, slice, [&](Vector v, Vector) { return v * by; });
}

void rotate(const Angles& angles, Matrix x, Target target, Dtype dtype, Slice slice) {
  by_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    int64_t count = target.rows * angles.heads;
    for (int64_t item = slice.begin(count); item < slice.end(count); item++) {
      int64_t row = item / angles.heads, head = item % angles.heads, at = angles.positions[row] * angles.rotary_dim;
      rotate_head(angles, row_of<T>(x, row) + head * angles.dim, static_cast<const T*>(angles.cos) + at,
                  static_cast<const T*>(angles.sin) + at, row_of<T>(target, row) + head * angles.dim);
    }
  });
}

}  // namespace

namespace FORKPOINT_ISA {
extern const RowsKernels rows_kernels = {rms, layer, activate, activate_multiply, sum, product, scaled, rotate};
}

}  // namespace forkpoint
