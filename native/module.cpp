// The Python module forkpoint.llm.kernels._native. Arguments are addresses and sizes: nothing here depends on a tensor library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "element.h"

namespace nb = nanobind;

namespace forkpoint {

InstructionSet best_instruction_set();
void use_instruction_set(InstructionSet);

// Each part registers its own functions. Weak, so that a part can be absent.
#define FORKPOINT_PARTS(PART) PART(dense) PART(rows) PART(attention) PART(program) PART(pages)
#define DECLARE(NAME) __attribute__((weak)) void register_##NAME(nb::module_&);
FORKPOINT_PARTS(DECLARE)

namespace {

void use_named(const std::string& name) {
  for (int set = 0; set <= int(best_instruction_set()); set++)
    if (name == name_of(InstructionSet(set))) return use_instruction_set(InstructionSet(set));
  throw std::invalid_argument("this processor has no instruction set " + name);
}

}  // namespace
}  // namespace forkpoint

NB_MODULE(_native, m) {
  using namespace forkpoint;
  m.def("instruction_set", [] { return std::string(name_of(instruction_set())); });
  m.def("best_instruction_set", [] { return std::string(name_of(best_instruction_set())); });
  m.def("use_instruction_set", &use_named, nb::arg("name"));
#define REGISTER(NAME) \
  if (&register_##NAME) register_##NAME(m);
  FORKPOINT_PARTS(REGISTER)
}
