// A model's forward pass as a list of kernel calls, run over any number of rows by one call. Built in Python, see resident/placement.py.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "routes.h"

namespace forkpoint {

// Numbers as in resident/instructions.py.
enum class Opcode : int {
  embed, lookup, dense, rms_norm, layer_norm, activation, activation_product, add, subtract, multiply, divide, copy, rotary, append, attend, gather
};
enum class Space : int { none, buffer, constant, table, logits };

struct Operand {
  Space space;
  int64_t base;  // an address, or for buffers an offset in bytes; for logits an offset in elements
  int64_t row_stride, outer_stride, inner_stride;  // in elements
  Dtype dtype;
};

struct Instruction {
  Opcode opcode;
  bool waits;
  int64_t outer, inner;
  int64_t numbers[4];
  float scalars[2];
  Operand inputs[3], output;
};

struct Pages {
  char* data = nullptr;
  int64_t count = 0;
  PageGeometry geometry{};
};

// What one pass runs over.
struct Call {
  int64_t rows = 0, outputs = 0;
  const int64_t *tokens = nullptr, *positions = nullptr, *output_rows = nullptr;
  std::vector<int64_t> output_tokens, output_positions;
  std::vector<std::unique_ptr<Routes>> routes;  // of each state group
  float* logits = nullptr;
};

struct RowRange {
  int64_t rows, first_output;  // first_output: -1 where all rows run
};

class Program {
 public:
  // The first `body` instructions run over all rows, so do those up to `middle`, where logits are wanted; the others over `tail_rows` of the
  // wanted rows at a time.
  Program(std::vector<Instruction>, int64_t body, int64_t middle, int64_t tail_rows, int64_t buffer_bytes, int64_t vocabulary,
          int64_t max_rows, int64_t max_context, int64_t groups);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void bind(int64_t group, Pages pages) { pages_.at(size_t(group)) = pages; }
  const Pages& pages(int64_t group) const { return pages_.at(size_t(group)); }
  // Throws std::invalid_argument, with nothing changed.
  void run(Call& call, int threads);

  const int64_t vocabulary, max_rows, max_context, groups;

 private:
  void check(const Call&) const;
  void execute(const Call&, int64_t begin, int64_t end, RowRange, Slice);
  void step(const Instruction&, const Call&, RowRange, Slice);
  void norm(const Instruction&, const Call&, RowRange, Slice);
  Strided strided(const Operand&, const Call&, RowRange) const;
  char* address(const Operand&, const Call&, RowRange) const;

  std::vector<Instruction> instructions_;
  int64_t body_, middle_, tail_rows_;
  char* buffers_;
  std::vector<Pages> pages_;
  // Of each state group and number of query heads.
  std::map<std::pair<int64_t, int64_t>, Scratch> scratch_;
};

}  // namespace forkpoint
