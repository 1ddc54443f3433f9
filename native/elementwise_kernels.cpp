#include "elementwise.h"
#include "vector.h"

namespace forkpoint::FORKPOINT_ISA {
namespace {

template <Elementwise operation, class V>
inline V combined(V left, V right) {
  if constexpr (operation == Elementwise::add) return left + right;
  if constexpr (operation == Elementwise::subtract) return left - right;
  if constexpr (operation == Elementwise::multiply) return left * right;
  if constexpr (operation == Elementwise::divide) return left / right;
  return left;
}

// A run of elements side by side. An operand of stride 0 is one element for all.
template <Elementwise operation, class From, class To>
void run_dense(const From* left, const From* right, int64_t right_stride, float number, To* out, int64_t count) {
  Vector same = broadcast(right && !right_stride ? to_float(*right) : number);
  bool varies = right && right_stride;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    store(out + i, combined<operation>(load(left + i), varies ? load(right + i) : same));
  if (int64_t rest = count - i)
    store_some(out + i, combined<operation>(load_some(left + i, rest), varies ? load_some(right + i, rest) : same), rest);
}

float load_any(const char* base, int64_t index, Dtype dtype) {
  return by_dtype(dtype, [&](auto type) { return to_float(reinterpret_cast<const decltype(type)*>(base)[index]); });
}

// Any strides and dtypes, one element at a time.
template <Elementwise operation>
void run_any(const Strided& left, const char* a, const Strided& right, const char* b, float number, const Strided& out, char* c,
             int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    float other = b ? load_any(b, i * right.inner_stride, right.dtype) : number;
    float value = combined<operation>(load_any(a, i * left.inner_stride, left.dtype), other);
    by_dtype(out.dtype, [&](auto type) { from_float(value, reinterpret_cast<decltype(type)*>(c)[i * out.inner_stride]); });
  }
}

template <Elementwise operation>
void run_one(const Strided& left, const Strided& right, float number, const Strided& out, int64_t row, int64_t outer, int64_t begin,
             int64_t end) {
  const char* a = left.at(row, outer) + begin * left.inner_stride * element_bytes(left.dtype);
  const char* b = right.base ? right.at(row, outer) + begin * right.inner_stride * element_bytes(right.dtype) : nullptr;
  char* c = out.at(row, outer) + begin * out.inner_stride * element_bytes(out.dtype);
  bool side_by_side = left.inner_stride == 1 && out.inner_stride == 1 && (!b || right.inner_stride <= 1);
  bool is_copy = operation == Elementwise::copy;
  if (!side_by_side || (b && right.dtype != left.dtype) || (!is_copy && left.dtype != out.dtype))
    return run_any<operation>(left, a, right, b, number, out, c, end - begin);
  by_dtype(left.dtype, [&](auto from) {
    using From = decltype(from);
    auto run = [&](auto to) {
      using To = decltype(to);
      run_dense<operation>(reinterpret_cast<const From*>(a), reinterpret_cast<const From*>(b), right.inner_stride, number,
                           reinterpret_cast<To*>(c), end - begin);
    };
    if constexpr (operation == Elementwise::copy) return by_dtype(out.dtype, run);
    return run(from);
  });
}

template <Elementwise operation>
void run_all(const Strided& left, const Strided& right, float number, const Strided& out, int64_t rows, int64_t outer, int64_t inner,
             Slice slice) {
  int64_t runs = rows * outer;
  if (runs >= slice.threads) {
    for (int64_t i = slice.begin(runs); i < slice.end(runs); i++)
      run_one<operation>(left, right, number, out, i / outer, i % outer, 0, inner);
    return;
  }
  int64_t groups = (inner + lanes - 1) / lanes, begin = slice.begin(groups) * lanes, end = slice.end(groups) * lanes;
  if (end > inner) end = inner;
  if (begin >= end) return;
  for (int64_t i = 0; i < runs; i++) run_one<operation>(left, right, number, out, i / outer, i % outer, begin, end);
}

void run_elementwise(Elementwise operation, const Strided& left, const Strided& right, float number, const Strided& out, int64_t rows,
                 int64_t outer, int64_t inner, Slice slice) {
  switch (operation) {
    case Elementwise::add: return run_all<Elementwise::add>(left, right, number, out, rows, outer, inner, slice);
    case Elementwise::subtract: return run_all<Elementwise::subtract>(left, right, number, out, rows, outer, inner, slice);
    case Elementwise::multiply: return run_all<Elementwise::multiply>(left, right, number, out, rows, outer, inner, slice);
    case Elementwise::divide: return run_all<Elementwise::divide>(left, right, number, out, rows, outer, inner, slice);
    case Elementwise::copy: return run_all<Elementwise::copy>(left, right, number, out, rows, outer, inner, slice);
  }
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels{&run_elementwise};

}  // namespace forkpoint::FORKPOINT_ISA
