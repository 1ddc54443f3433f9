// Chooses among the versions of a table of functions that were compiled for each instruction set.
#pragma once
#include "element.h"

#ifdef FORKPOINT_HAS_avx2
#define FORKPOINT_DECLARE_TABLE(TYPE, NAME)            \
  namespace portable { extern const TYPE NAME; }       \
  namespace avx2 { extern const TYPE NAME; }           \
  namespace avx512 { extern const TYPE NAME; }         \
  namespace avx512_bf16 { extern const TYPE NAME; }    \
  static inline const TYPE& chosen_##NAME() {          \
    switch (instruction_set()) {                       \
      case InstructionSet::avx512_bf16: return avx512_bf16::NAME; \
      case InstructionSet::avx512: return avx512::NAME; \
      case InstructionSet::avx2: return avx2::NAME;    \
      default: return portable::NAME;                  \
    }                                                  \
  }
#else
#define FORKPOINT_DECLARE_TABLE(TYPE, NAME)      \
  namespace portable { extern const TYPE NAME; } \
  static inline const TYPE& chosen_##NAME() { return portable::NAME; }
#endif
