// Element types of tensors, and which instruction set runs. Knows no kernel.
//
// Files named *_kernels.cpp are compiled once for each instruction set with FORKPOINT_ISA defined as its name; each exports its functions
// in namespace forkpoint::FORKPOINT_ISA, and the plain .cpp file beside it chooses by instruction_set(). Everything defined in headers has
// internal linkage, so that no code compiled for one instruction set is ever linked into another.
#pragma once
#include <cstdint>
#include <cstring>

#ifndef FORKPOINT_ISA
#define FORKPOINT_ISA portable
#endif

namespace forkpoint {

enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class InstructionSet : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// The one in use: the best of this processor unless a lower one was chosen.
InstructionSet instruction_set();
const char* name_of(InstructionSet);

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

static inline int64_t element_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Calls body(float{}), body(bfloat16{}) or body(float16{}).
template <class Body>
static inline auto by_dtype(Dtype dtype, Body body) {
  if (dtype == Dtype::float32) return body(float{});
  if (dtype == Dtype::bfloat16) return body(bfloat16{});
  return body(float16{});
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline float to_float(float value) { return value; }
static inline float to_float(bfloat16 value) { return float_of(uint32_t(value.bits) << 16); }

// Exact, subnormal numbers included.
static inline float to_float(float16 value) {
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = uint32_t(value.bits & 0x7fff) << 13;
  uint32_t magnitude = (value.bits & 0x7c00) == 0x7c00 ? rest + (uint32_t(112 + 112) << 23)
                                                       : bits_of(float_of(rest) * float_of(uint32_t(127 + 112) << 23));
  return float_of(sign | magnitude);
}

// All roundings are to nearest, ties to even.
static inline void from_float(float value, float& out) { out = value; }

static inline void from_float(float value, bfloat16& out) {
  uint32_t bits = bits_of(value);
  out.bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline void from_float(float value, float16& out) {
  uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // 65520 and more round to infinity
    out.bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded count of 2^-24 in the low bits
    out.bits = uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  } else {
    out.bits = uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
}

template <class T>
static inline float round_to(float value) {
  T rounded;
  from_float(value, rounded);
  return to_float(rounded);
}

}  // namespace forkpoint
