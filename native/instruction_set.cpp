#include "element.h"

#include <atomic>

namespace forkpoint {
namespace {

InstructionSet best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return InstructionSet::avx512_bf16;
  if (avx512) return InstructionSet::avx512;
  if (avx2) return InstructionSet::avx2;
#endif
  return InstructionSet::portable;
}

// Intel's processors run two fused products of float32 in a cycle, but one BF16 instruction in one cycle or two (measured: expanding
// bfloat16 is twice as fast), so there that instruction is used only when it is asked for.
InstructionSet preferred() {
  InstructionSet set = best();
#if defined(__x86_64__)
  if (set == InstructionSet::avx512_bf16 && __builtin_cpu_is("intel")) return InstructionSet::avx512;
#endif
  return set;
}

std::atomic<int> chosen{int(preferred())};

}  // namespace

InstructionSet instruction_set() { return InstructionSet(chosen.load(std::memory_order_relaxed)); }

InstructionSet best_instruction_set() { return best(); }

void use_instruction_set(InstructionSet set) { chosen.store(int(set)); }

const char* name_of(InstructionSet set) {
  static const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return names[int(set)];
}

}  // namespace forkpoint
