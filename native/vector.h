// Sixteen float32 values, the unit of every kernel, for the instruction set that FORKPOINT_ISA names. The same operations give the same
// bits on every path: all are single IEEE 754 operations, multiply_add is fused everywhere, and conversions round to nearest even.
#pragma once
#include <cmath>

#include "element.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace forkpoint {
namespace {

constexpr int64_t lanes = 16;

#if defined(__AVX512F__)

struct Vector {
  __m512 value;
};
struct Mask {
  __mmask16 value;
};

inline Vector zero() { return {_mm512_setzero_ps()}; }
inline Vector broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x.value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.value, b.value)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.value, b.value)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.value, b.value)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.value, b.value)}; }
inline Vector maximum(Vector a, Vector b) { return {_mm512_max_ps(a.value, b.value)}; }
inline Vector minimum(Vector a, Vector b) { return {_mm512_min_ps(a.value, b.value)}; }
inline Vector square_root(Vector x) { return {_mm512_sqrt_ps(x.value)}; }
inline Vector round_even(Vector x) { return {_mm512_roundscale_ps(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^x for whole x in [-126, 127].
inline Vector power_of_two(Vector x) {
  __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(x.value), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
inline Mask less(Vector a, Vector b) { return {_mm512_cmp_ps_mask(a.value, b.value, _CMP_LT_OQ)}; }
inline Mask is_nan(Vector a) { return {_mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q)}; }
inline Vector select(Mask where, Vector yes, Vector no) { return {_mm512_mask_blend_ps(where.value, no.value, yes.value)}; }
inline Vector magnitude(Vector x) { return {_mm512_abs_ps(x.value)}; }
inline Vector with_sign(Vector x, Vector sign) {
  __m512i mask = _mm512_set1_epi32(int(0x80000000u));
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(mask, _mm512_castps_si512(sign.value), _mm512_castps_si512(x.value), 0xca))};
}

inline Vector load(const bfloat16* from) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline void store(bfloat16* to, Vector x) {
  __m512i bits = _mm512_castps_si512(x.value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  up = _mm512_mask_blend_epi32(is_nan(x).value, up, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(up));
}
inline Vector load(const float16* from) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}; }
inline void store(float16* to, Vector x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

struct Vector {
  __m256 low, high;
};
struct Mask {
  __m256 low, high;
};

inline Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vector broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vector load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Vector x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
inline Vector multiply_add(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vector maximum(Vector a, Vector b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vector minimum(Vector a, Vector b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vector square_root(Vector x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline Vector round_even(Vector x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}
inline __m256 power_of_two_half(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
inline Vector power_of_two(Vector x) { return {power_of_two_half(x.low), power_of_two_half(x.high)}; }
inline Mask less(Vector a, Vector b) { return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)}; }
inline Mask is_nan(Vector a) { return {_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q)}; }
inline Vector select(Mask where, Vector yes, Vector no) {
  return {_mm256_blendv_ps(no.low, yes.low, where.low), _mm256_blendv_ps(no.high, yes.high, where.high)};
}
inline Vector magnitude(Vector x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Vector with_sign(Vector x, Vector sign) {
  __m256 mask = _mm256_set1_ps(-0.0f);
  Vector size = magnitude(x);
  return {_mm256_or_ps(size.low, _mm256_and_ps(mask, sign.low)), _mm256_or_ps(size.high, _mm256_and_ps(mask, sign.high))};
}

inline __m256 load_half(const bfloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
}
inline __m256 load_half(const float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline Vector load(const bfloat16* from) { return {load_half(from), load_half(from + 8)}; }
inline Vector load(const float16* from) { return {load_half(from), load_half(from + 8)}; }
inline void store_half(bfloat16* to, __m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
inline void store_half(float16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bfloat16* to, Vector x) { store_half(to, x.low), store_half(to + 8, x.high); }
inline void store(float16* to, Vector x) { store_half(to, x.low), store_half(to + 8, x.high); }

#else

struct Vector {
  float value[16];
};
struct Mask {
  bool value[16];
};

template <class Operation>
inline Vector each(Operation operation) {
  Vector out;
  for (int i = 0; i < 16; i++) out.value[i] = operation(i);
  return out;
}

inline Vector zero() { return each([](int) { return 0.0f; }); }
inline Vector broadcast(float x) { return each([&](int) { return x; }); }
inline Vector multiply_add(Vector a, Vector b, Vector c) {
  return each([&](int i) { return __builtin_fmaf(a.value[i], b.value[i], c.value[i]); });
}
inline Vector operator+(Vector a, Vector b) { return each([&](int i) { return a.value[i] + b.value[i]; }); }
inline Vector operator-(Vector a, Vector b) { return each([&](int i) { return a.value[i] - b.value[i]; }); }
inline Vector operator*(Vector a, Vector b) { return each([&](int i) { return a.value[i] * b.value[i]; }); }
inline Vector operator/(Vector a, Vector b) { return each([&](int i) { return a.value[i] / b.value[i]; }); }
inline Vector maximum(Vector a, Vector b) { return each([&](int i) { return a.value[i] > b.value[i] ? a.value[i] : b.value[i]; }); }
inline Vector minimum(Vector a, Vector b) { return each([&](int i) { return a.value[i] < b.value[i] ? a.value[i] : b.value[i]; }); }
inline Vector square_root(Vector x) { return each([&](int i) { return __builtin_sqrtf(x.value[i]); }); }
inline Vector round_even(Vector x) { return each([&](int i) { return __builtin_rintf(x.value[i]); }); }
inline Vector power_of_two(Vector x) { return each([&](int i) { return float_of(uint32_t(int(x.value[i]) + 127) << 23); }); }
inline Mask less(Vector a, Vector b) {
  Mask out;
  for (int i = 0; i < 16; i++) out.value[i] = a.value[i] < b.value[i];
  return out;
}
inline Mask is_nan(Vector a) {
  Mask out;
  for (int i = 0; i < 16; i++) out.value[i] = a.value[i] != a.value[i];
  return out;
}
inline Vector select(Mask where, Vector yes, Vector no) {
  return each([&](int i) { return where.value[i] ? yes.value[i] : no.value[i]; });
}
inline Vector magnitude(Vector x) { return each([&](int i) { return float_of(bits_of(x.value[i]) & 0x7fffffff); }); }
inline Vector with_sign(Vector x, Vector sign) {
  return each([&](int i) { return float_of((bits_of(x.value[i]) & 0x7fffffff) | (bits_of(sign.value[i]) & 0x80000000)); });
}
template <class T>
inline Vector load(const T* from) {
  return each([&](int i) { return to_float(from[i]); });
}
template <class T>
inline void store(T* to, Vector x) {
  for (int i = 0; i < 16; i++) from_float(x.value[i], to[i]);
}

#endif

// The first `count` (1 to 15) of sixteen; the others read as zero and are not written.
template <class T>
inline Vector load_some(const T* from, int64_t count) {
  T whole[16] = {};
  std::memcpy(whole, from, size_t(count) * sizeof(T));
  return load(whole);
}
template <class T>
inline void store_some(T* to, Vector x, int64_t count) {
  T whole[16];
  store(whole, x);
  std::memcpy(to, whole, size_t(count) * sizeof(T));
}

// Rounded to T and back.
template <class T>
inline Vector rounded(Vector x) {
  T whole[16];
  store(whole, x);
  return load(whole);
}
template <>
inline Vector rounded<float>(Vector x) {
  return x;
}

// The sum in one order, the same on every path.
inline float sum_of(Vector x) {
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
inline float maximum_of(Vector x) {
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}

// e^x. Error below 2 units in the last place; 0 below -86.64, infinity above 88.72; NaN stays NaN.
inline Vector exponential(Vector x) {
  Vector low = broadcast(-86.64f), high = broadcast(88.72283f);
  Vector inside = minimum(maximum(x, low), high);
  Vector whole = round_even(inside * broadcast(1.44269504f));
  Vector rest = multiply_add(whole, broadcast(-0.693145752f), inside);
  rest = multiply_add(whole, broadcast(-1.42860677e-6f), rest);
  Vector sum = broadcast(1.38427734e-3f);
  sum = multiply_add(sum, rest, broadcast(8.36624149e-3f));
  sum = multiply_add(sum, rest, broadcast(4.16696407e-2f));
  sum = multiply_add(sum, rest, broadcast(1.66664720e-1f));
  sum = multiply_add(sum, rest, broadcast(4.99999851e-1f));
  sum = multiply_add(sum, rest, broadcast(1.0f));
  sum = multiply_add(sum, rest, broadcast(1.0f));
  Vector result = sum * power_of_two(whole - broadcast(1.0f)) * broadcast(2.0f);  // 2^128 has no float32
  result = select(less(x, low), zero(), result);
  result = select(less(high, x), broadcast(__builtin_inff()), result);
  return select(is_nan(x), x, result);
}

// Error below 2 units in the last place. Polynomial near zero as in Cephes' tanhf.
inline Vector hyperbolic_tangent(Vector x) {
  Vector size = magnitude(x), square = x * x;
  Vector near = broadcast(-5.70498872745e-3f);
  near = multiply_add(near, square, broadcast(2.06390887954e-2f));
  near = multiply_add(near, square, broadcast(-5.37397155531e-2f));
  near = multiply_add(near, square, broadcast(1.33314422036e-1f));
  near = multiply_add(near, square, broadcast(-3.33332819422e-1f));
  near = multiply_add(near * square, x, x);
  Vector decay = exponential(size * broadcast(-2.0f));
  Vector far = with_sign((broadcast(1.0f) - decay) / (broadcast(1.0f) + decay), x);
  return select(less(size, broadcast(0.625f)), near, select(is_nan(x), x, far));
}

// Error below 2 units in the last place. Polynomials after N. Juffa.
inline Vector error_function(Vector x) {
  Vector size = magnitude(x), square = x * x;
  Vector far = multiply_add(broadcast(-1.72853470e-5f), size, broadcast(3.83197126e-4f));
  Vector more = multiply_add(broadcast(-3.88396438e-3f), size, broadcast(2.42546219e-2f));
  far = multiply_add(far, square, more);
  far = multiply_add(far, size, broadcast(-1.06777877e-1f));
  far = multiply_add(far, size, broadcast(-6.34846687e-1f));
  far = multiply_add(far, size, broadcast(-1.28717512e-1f));
  far = multiply_add(far, size, zero() - size);
  far = with_sign(broadcast(1.0f) - exponential(far), x);
  Vector near = broadcast(-5.96761703e-4f);
  near = multiply_add(near, square, broadcast(4.99119423e-3f));
  near = multiply_add(near, square, broadcast(-2.67681349e-2f));
  near = multiply_add(near, square, broadcast(1.12819925e-1f));
  near = multiply_add(near, square, broadcast(-3.76125336e-1f));
  near = multiply_add(near, square, broadcast(1.28379166e-1f));
  near = multiply_add(near, x, x);
  return select(less(broadcast(0.927734375f), size), far, select(is_nan(x), x, near));
}

}  // namespace
}  // namespace forkpoint
