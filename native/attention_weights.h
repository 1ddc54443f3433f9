// From dot products to weights, and slots: one row's result over some leading blocks, merged with the next and divided at the end.
#pragma once
#include <cmath>

#include "attention.h"
#include "vector.h"

namespace forkpoint {
namespace FORKPOINT_ISA {
namespace {

constexpr float log2_e = 1.44269504f;

// x * 2^power for whole powers that keep it a normal number.
inline Vector scaled(Vector x, Vector power) {
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(x.value, power.value)};
#else
  return x * power_of_two(power);
#endif
}

// The largest of sixteen; the sum in the order of sum_of.
#if defined(__AVX512F__)
inline float largest(Vector x) { return _mm512_reduce_max_ps(x.value); }
inline float added(Vector x) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.value), _mm512_extractf32x8_ps(x.value, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float largest(Vector x) { return maximum_of(x); }
inline float added(Vector x) { return sum_of(x); }
#endif

// 2^x for x up to 126, at least 2^-125. Relative error below 2e-7. NaN stays NaN.
inline Vector power(Vector x) {
  x = maximum(broadcast(-125.0f), x);
  Vector whole = round_even(x), rest = x - whole;
  Vector sum = broadcast(0.00132647271f);
  sum = multiply_add(sum, rest, broadcast(0.00967151268f));
  sum = multiply_add(sum, rest, broadcast(0.0555073374f));
  sum = multiply_add(sum, rest, broadcast(0.240222421f));
  sum = multiply_add(sum, rest, broadcast(0.693146978f));
  sum = multiply_add(sum, rest, broadcast(1.0f));
  return scaled(sum, whole);
}

// From dot products to exponents of two: dot * scale + offset, or capped: tanh(y) * cap + offset, tanh(y) = 1 - 2 / (e^2y + 1).
// Both grow with the dot product, so the largest dot product has the largest exponent; a negative scaling is moved to the query.
struct Logits {
  float sign, scale, cap;
  bool is_capped;

  explicit Logits(const Attention& call) : is_capped(call.softcap != 0) {
    float scaling = std::fabs(call.scaling);
    sign = call.scaling < 0 ? -1.0f : 1.0f;
    scale = is_capped ? scaling / call.softcap * (2 * log2_e) : scaling * log2_e;
    cap = call.softcap * log2_e;
  }
  Vector operator()(Vector dot, Vector offset) const {
    if (!is_capped) return multiply_add(dot, broadcast(scale), offset);
    Vector two = broadcast(2), one = broadcast(1);
    Vector bounded = one - two / (power(minimum(broadcast(126.0f), dot * broadcast(scale))) + one);
    return multiply_add(bounded, broadcast(cap), offset);
  }
};

// The lanes of the tile at `start` that lie in [low, high).
inline Mask seen(int start, int low, int high) {
  static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vector number = load(numbers), far = broadcast(1e9f);
  return less(select(less(number, broadcast(float(low - start))), far, number), broadcast(float(high - start)));
}

// Turns one row's dot products into weights; sets the slot's maximum and sum.
inline void weights_of(float* scores, int low, int high, const Logits& logits, float* maximum_and_sum) {
  constexpr int size = int(tile_tokens);
  int first = low / size * size, last = (high + size - 1) / size * size;
  Vector hidden = broadcast(-__builtin_inff()), most = hidden;
  for (int start = first; start < last; start += size) {
    Vector dot = load(scores + start);
    if (start < low || start + size > high) dot = select(seen(start, low, high), dot, hidden);
    most = maximum(most, dot);
  }
  float tops[16];
  store(tops, logits(broadcast(largest(most)), zero()));
  Vector offset = zero() - broadcast(tops[0]), sum = zero();
  for (int start = first; start < last; start += size) {
    Vector weight = power(logits(load(scores + start), offset));
    if (start < low || start + size > high) weight = select(seen(start, low, high), weight, zero());
    store(scores + start, weight);
    sum = sum + weight;
  }
  maximum_and_sum[0] = tops[0];
  maximum_and_sum[1] = added(sum);
}

// running = running and `next`, which comes after it.
inline void merge(float* running, const float* next, int64_t width) {
  float a = running[width], b = next[width], top = a > b ? a : b;
  Vector keep = power(broadcast(a - top)), add = power(broadcast(b - top));
  Vector sum = multiply_add(broadcast(running[width + 1]), keep, broadcast(next[width + 1]) * add);
  for (int64_t c = 0; c < width; c += lanes) store(running + c, multiply_add(load(running + c), keep, load(next + c) * add));
  float sums[16];
  store(sums, sum);
  running[width] = top;
  running[width + 1] = sums[0];
}

inline void copy_slot(float* to, const float* from, int64_t width) {
  for (int64_t c = 0; c < width + lanes; c += lanes) store(to + c, load(from + c));
}

// Divides by the sum of weights and rounds once.
template <class T>
void finish(float* slot, const float* sink, int64_t value_dim, int64_t width, T* out) {
  Vector sum = broadcast(slot[width + 1]), keep = broadcast(1.0f);
  if (sink) {
    float logit = *sink * log2_e, top = slot[width] > logit ? slot[width] : logit;
    keep = power(broadcast(slot[width] - top));
    sum = multiply_add(sum, keep, power(broadcast(logit - top)));
  }
  for (int64_t c = 0; c < value_dim; c += lanes) {
    Vector value = load(slot + c) * keep / sum;
    if (c + lanes <= value_dim) store(out + c, value);
    else store_some(out + c, value, value_dim - c);
  }
}

}  // namespace
}  // namespace FORKPOINT_ISA
}  // namespace forkpoint
