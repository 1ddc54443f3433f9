#include "program.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "dense.h"
#include "parallel.h"
#include "rows.h"

namespace nb = nanobind;

namespace forkpoint {
namespace {

constexpr size_t huge_page = size_t(1) << 21;

char* allocate(size_t bytes) {
  size_t size = (bytes + huge_page - 1) / huge_page * huge_page;
  void* found = std::aligned_alloc(huge_page, size ? size : huge_page);
  if (!found) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(found, size, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(found);
}

void check_range(const int64_t* values, int64_t count, int64_t limit, const char* what) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] < 0 || values[i] >= limit)
      throw std::invalid_argument(std::string(what) + " " + std::to_string(values[i]) + " is outside [0, " + std::to_string(limit) + ")");
}

void lookup(const Operand& table, int64_t width, const int64_t* ids, char* out, int64_t out_stride, int64_t rows, Slice slice) {
  int64_t bytes = width * element_bytes(table.dtype);
  for (int64_t row = slice.begin(rows); row < slice.end(rows); row++)
    std::memcpy(out + row * out_stride * element_bytes(table.dtype), reinterpret_cast<const char*>(table.base) + ids[row] * bytes, size_t(bytes));
}

}  // namespace

Program::Program(std::vector<Instruction> instructions, int64_t body, int64_t middle, int64_t tail_rows, int64_t buffer_bytes,
                 int64_t vocabulary, int64_t max_rows, int64_t max_context, int64_t groups)
    : vocabulary(vocabulary), max_rows(max_rows), max_context(max_context), groups(groups), instructions_(std::move(instructions)), body_(body),
      middle_(middle), tail_rows_(tail_rows), buffers_(allocate(size_t(buffer_bytes))), pages_(size_t(groups)) {
  for (const Instruction& it : instructions_)
    if (it.opcode == Opcode::attend) scratch_[{it.numbers[1], it.numbers[3]}];
}

Program::~Program() { std::free(buffers_); }

void Program::check(const Call& call) const {
  if (call.rows < 1 || call.rows > max_rows) throw std::invalid_argument(std::to_string(call.rows) + " rows do not fit this program");
  check_range(call.tokens, call.rows, vocabulary, "token");
  check_range(call.positions, call.rows, max_context, "position");
  check_range(call.output_rows, call.outputs, call.rows, "row");
}

void Program::run(Call& call, int threads) {
  check(call);
  for (int64_t i = 0; i < call.outputs; i++) {
    call.output_tokens.push_back(call.tokens[call.output_rows[i]]);
    call.output_positions.push_back(call.positions[call.output_rows[i]]);
  }
  for (auto& [key, scratch] : scratch_) {
    scratch.prepare(*call.routes.at(size_t(key.first)), key.second, threads);
    scratch.next_item = scratch.next_merge = 0;
  }
  int64_t end = int64_t(instructions_.size());
  parallel(threads, [&](Slice slice) {
    RowRange all{call.rows, -1};
    execute(call, 0, body_, all, slice);
    if (!call.outputs) return;
    execute(call, body_, middle_, all, slice);
    for (int64_t first = 0; first < call.outputs; first += tail_rows_)
      execute(call, middle_, end, RowRange{std::min(tail_rows_, call.outputs - first), first}, slice);
  });
}

void Program::execute(const Call& call, int64_t begin, int64_t end, RowRange range, Slice slice) {
  for (int64_t i = begin; i < end; i++) {
    const Instruction& instruction = instructions_[size_t(i)];
    if (instruction.waits && slice.threads > 1) barrier();
    step(instruction, call, range, slice);
  }
}

char* Program::address(const Operand& operand, const Call& call, RowRange range) const {
  switch (operand.space) {
    case Space::none: return nullptr;
    case Space::buffer: return buffers_ + operand.base;
    case Space::logits: return reinterpret_cast<char*>(call.logits + range.first_output * vocabulary + operand.base);
    default: return reinterpret_cast<char*>(operand.base);
  }
}

Strided Program::strided(const Operand& operand, const Call& call, RowRange range) const {
  Strided found{address(operand, call, range), operand.row_stride, operand.outer_stride, operand.inner_stride, operand.dtype, nullptr};
  if (operand.space == Space::table)
    found.row_of = range.first_output < 0 ? call.positions : call.output_positions.data() + range.first_output;
  return found;
}

// Norms of heads: where the heads of all rows lie side by side, each head is a row.
void Program::norm(const Instruction& it, const Call& call, RowRange range, Slice slice) {
  const Operand &x = it.inputs[0], &y = it.output;
  char *from = address(x, call, range), *to = address(y, call, range);
  const void *weight = address(it.inputs[1], call, range), *bias = address(it.inputs[2], call, range);
  bool joined = it.outer == 1 || (x.row_stride == it.outer * x.outer_stride && y.row_stride == it.outer * y.outer_stride);
  int64_t rows = joined ? range.rows * it.outer : range.rows, times = joined ? 1 : it.outer;
  int64_t x_stride = joined && it.outer > 1 ? x.outer_stride : x.row_stride, y_stride = joined && it.outer > 1 ? y.outer_stride : y.row_stride;
  for (int64_t i = 0; i < times; i++) {
    const char* part = from + i * x.outer_stride * element_bytes(x.dtype);
    char* out = to + i * y.outer_stride * element_bytes(y.dtype);
    if (it.opcode == Opcode::rms_norm)
      rms_norm(part, x_stride, weight, it.scalars[0], it.scalars[1], out, y_stride, rows, it.inner, x.dtype, slice,
               it.numbers[0] != 0);
    else
      layer_norm(part, x_stride, weight, bias, it.scalars[0], out, y_stride, rows, it.inner, x.dtype, slice);
  }
}

void Program::step(const Instruction& it, const Call& call, RowRange range, Slice slice) {
  const Operand &a = it.inputs[0], &b = it.inputs[1], &c = it.inputs[2], &y = it.output;
  char *x = address(a, call, range), *second = address(b, call, range), *third = address(c, call, range), *out = address(y, call, range);
  bool is_tail = range.first_output >= 0;
  const int64_t* tokens = is_tail ? call.output_tokens.data() + range.first_output : call.tokens;
  const int64_t* positions = is_tail ? call.output_positions.data() + range.first_output : call.positions;
  switch (it.opcode) {
    case Opcode::embed:
      return packed_embedding(Dense{x, nullptr, it.numbers[0], it.numbers[1], a.dtype}, tokens, out, y.row_stride, range.rows, slice);
    case Opcode::lookup: return lookup(a, it.numbers[0], tokens, out, y.row_stride, range.rows, slice);
    case Opcode::dense:
      return dense(Dense{second, third, it.numbers[0], it.numbers[1], a.dtype}, x, a.row_stride, out, y.row_stride, range.rows, slice);
    case Opcode::rms_norm:
    case Opcode::layer_norm: return norm(it, call, range, slice);
    case Opcode::activation:
      return activation(int(it.numbers[0]), x, a.row_stride, out, y.row_stride, range.rows, it.inner, a.dtype, slice);
    case Opcode::activation_product:
      return activation_product(int(it.numbers[0]), x, a.row_stride, second, b.row_stride, out, y.row_stride, range.rows, it.inner, a.dtype, slice);
    case Opcode::add:
    case Opcode::subtract:
    case Opcode::multiply:
    case Opcode::divide:
    case Opcode::copy:
      return elementwise(Elementwise(int(it.opcode) - int(Opcode::add)), strided(a, call, range), strided(b, call, range), it.scalars[0],
                         strided(y, call, range), range.rows, it.outer, it.inner, slice);
    case Opcode::rotary:
      return rotary(x, a.row_stride, it.outer, it.inner, it.numbers[0], second, third, positions, out, y.row_stride, range.rows, a.dtype, slice);
    case Opcode::append:
      return append(*call.routes[size_t(it.numbers[1])], it.numbers[0], x, a.row_stride, second, b.row_stride,
                    pages_[size_t(it.numbers[1])].data, slice);
    case Opcode::attend: {
      Scratch& scratch = scratch_.find({it.numbers[1], it.numbers[3]})->second;
      Attention attention{it.numbers[0], it.scalars[0], it.numbers[2], it.scalars[1], reinterpret_cast<const float*>(second), it.numbers[3]};
      return attend(*call.routes[size_t(it.numbers[1])], attention, x, a.row_stride, out, y.row_stride, pages_[size_t(it.numbers[1])].data,
                    scratch, slice);
    }
    case Opcode::gather: {
      int64_t bytes = it.inner * element_bytes(a.dtype), stride = a.row_stride * element_bytes(a.dtype);
      for (int64_t row = slice.begin(range.rows); row < slice.end(range.rows); row++)
        std::memcpy(out + row * bytes, x + call.output_rows[range.first_output + row] * stride, size_t(bytes));
    }
  }
}

namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntegerRows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NumberRows = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t operand_fields = 6, head_fields = 8;

Operand read_operand(const int64_t* from) {
  return Operand{Space(from[0]), from[1], from[2], from[3], from[4], Dtype(from[5])};
}

// A row: opcode, waits, outer, inner, four numbers, then three inputs and the output of six fields each.
Instruction read_instruction(const int64_t* from, const double* scalars) {
  Instruction made{Opcode(from[0]), from[1] != 0, from[2], from[3], {from[4], from[5], from[6], from[7]}, {float(scalars[0]), float(scalars[1])}, {}, {}};
  for (int i = 0; i < 3; i++) made.inputs[i] = read_operand(from + head_fields + i * operand_fields);
  made.output = read_operand(from + head_fields + 3 * operand_fields);
  return made;
}

std::unique_ptr<Program> build(IntegerRows code, NumberRows scalars, int64_t body, int64_t middle, int64_t tail_rows, int64_t buffer_bytes,
                               int64_t vocabulary, int64_t max_rows, int64_t max_context, int64_t groups) {
  if (code.shape(1) != head_fields + 4 * operand_fields || scalars.shape(1) != 2 || scalars.shape(0) != code.shape(0))
    throw std::invalid_argument("instructions of another form");
  std::vector<Instruction> instructions;
  for (size_t i = 0; i < code.shape(0); i++)
    instructions.push_back(read_instruction(code.data() + i * code.shape(1), scalars.data() + 2 * i));
  return std::make_unique<Program>(std::move(instructions), body, middle, tail_rows, buffer_bytes, vocabulary, max_rows, max_context, groups);
}

void run(Program& program, Integers tokens, Integers positions, IntegerRows segments, const std::vector<Table>& tables,
         Integers output_rows, Logits logits, int threads) {
  Call call;
  call.rows = int64_t(tokens.shape(0)), call.outputs = int64_t(output_rows.shape(0));
  call.tokens = tokens.data(), call.positions = positions.data(), call.output_rows = output_rows.data(), call.logits = logits.data();
  if (int64_t(positions.shape(0)) != call.rows || segments.shape(1) != 3 || int64_t(logits.shape(0)) < call.outputs ||
      int64_t(logits.shape(1)) != program.vocabulary || int64_t(tables.size()) != program.groups || threads < 1)
    throw std::invalid_argument("arrays of a pass do not fit one another");
  nb::gil_scoped_release released;
  for (size_t group = 0; group < tables.size(); group++) {
    const Pages& pages = program.pages(int64_t(group));
    if (tables[group].shape(0) != segments.shape(0)) throw std::invalid_argument("a page table for another number of segments");
    call.routes.push_back(std::make_unique<Routes>(segments.data(), int64_t(segments.shape(0)), tables[group].data(),
                                                   int64_t(tables[group].shape(1)), pages.geometry, call.rows, pages.count));
  }
  program.run(call, threads);
}

void bind(Program& program, int64_t group, uintptr_t data, int64_t count, int64_t page_tokens, int64_t layers, int64_t heads,
          int64_t key_dim, int64_t value_dim, int dtype) {
  program.bind(group, Pages{reinterpret_cast<char*>(data), count, PageGeometry{page_tokens, layers, heads, key_dim, value_dim, Dtype(dtype)}});
}

}  // namespace

void register_program(nb::module_& m) {
  nb::set_leak_warnings(false);  // a program that a module's variable holds lives until the process ends
  nb::class_<Program>(m, "Program").def("bind", &bind).def("run", &run);
  m.def("build_program", &build);
}

}  // namespace forkpoint
