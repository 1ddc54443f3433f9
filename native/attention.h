// Routed append and attention. One order for every sum, whatever runs beside a row:
// for each block of 256 absolute positions the scores (over the dimensions in order), their maximum, the weights' sum and the weighted
// values (over positions in order); then blocks in order. All in float32, fused. Weights are powers of two: log2(e) is part of the scale.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>

#include "parallel.h"
#include "routes.h"

namespace forkpoint {

struct Attention {
  int64_t layer;        // of the group
  float scaling;
  int64_t window;       // positions a row looks back, itself included; 0: to the start
  float softcap;        // 0: none
  const float* sinks;   // a further logit in the denominator per query head, or null
  int64_t query_heads;
};

// Memory of a pass, reused by every layer. One thread calls prepare() before the parallel region; it grows and never shrinks.
class Scratch {
 public:
  void prepare(const Routes&, int64_t query_heads, int threads);

  float* thread_floats(int thread) const { return floats_.get() + partial_floats_ + thread * thread_floats_; }
  float* partials() const { return floats_.get(); }
  int64_t blocks_per_round() const { return blocks_per_round_; }

  std::atomic<int64_t> next_item{0}, next_merge{0};

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> floats_;
  int64_t capacity_ = 0, partial_floats_ = 0, thread_floats_ = 0, blocks_per_round_ = 1;
};

// Writes each row's keys `[heads, key_dim]` and values `[heads, value_dim]` to its place in the pages. Strides are elements between rows.
void append(const Routes&, int64_t layer, const void* key, int64_t key_stride, const void* value, int64_t value_stride, void* pages, Slice);

// Attends each row to positions up to its own; writes `[query_heads, value_dim]`, zeros for rows of no segment. Every thread of the
// surrounding parallel() calls it, after a barrier that follows append; it has barriers inside, and needs one before the next call.
void attend(const Routes&, const Attention&, const void* query, int64_t query_stride, void* out, int64_t out_stride, const void* pages,
            Scratch&, Slice);

// What the files of one instruction set are given.
struct Pass {
  const Routes& routes;
  const Attention& call;
  const char* query;
  int64_t query_stride;
  char* out;
  int64_t out_stride;
  const char* pages;
  float* partials;             // slots of partial results of the rows of short segments, [partial row, query head, block of the round]
  int64_t first_block, num_blocks;  // of the round
};

constexpr int64_t micro_rows = 24;  // query rows that share what is read of a block

// One partial result: `width` weighted values, then maximum and sum.
inline int64_t slot_width(const PageGeometry& geometry) { return (geometry.value_dim + 15) / 16 * 16; }
inline int64_t slot_floats(const PageGeometry& geometry) { return slot_width(geometry) + 16; }
int64_t workspace_floats(const PageGeometry&, int64_t query_heads);

// The part that exists once for each instruction set.
struct AttentionKernels {
  void (*attend_shared)(const Pass&, const SharedBlock&, int64_t head, float* workspace);
  void (*attend_tile)(const Pass&, const RowTile&, int64_t head, float* workspace);
  void (*merge_partials)(const Pass&, int64_t partial_row, int64_t query_head, bool is_last_round);
};

}  // namespace forkpoint
