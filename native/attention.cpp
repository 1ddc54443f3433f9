#include "attention.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "dispatch.h"

namespace forkpoint {

FORKPOINT_DECLARE_TABLE(AttentionKernels, attention_kernels)

namespace {

constexpr int64_t most_partial_floats = int64_t(8) << 20;  // 32 MiB of partial results at a time

int64_t last_block(const Routes& routes) { return routes.shared_blocks.empty() ? -1 : routes.shared_blocks.back().block; }

void clear_padding(const Routes& routes, const Attention& call, char* out, int64_t out_stride, Slice slice) {
  int64_t bytes = element_bytes(routes.geometry.dtype), count = int64_t(routes.padding_rows.size());
  for (int64_t i = slice.begin(count); i < slice.end(count); i++)
    std::memset(out + routes.padding_rows[size_t(i)] * out_stride * bytes, 0, size_t(call.query_heads * routes.geometry.value_dim * bytes));
}

// Work of one round: all tiles of long segments in the first, and the shared blocks of the round.
struct Round {
  int64_t tiles, first_shared, num_shared;
};

void compute(const Pass& pass, const Round& round, const AttentionKernels& kernels, Scratch& scratch, int thread) {
  int64_t heads = pass.routes.geometry.heads, tile_items = round.tiles * heads, items = tile_items + round.num_shared * heads;
  float* workspace = scratch.thread_floats(thread);
  for (int64_t item; (item = scratch.next_item.fetch_add(1, std::memory_order_relaxed)) < items;) {
    if (item < tile_items) {
      kernels.attend_tile(pass, pass.routes.row_tiles[size_t(item / heads)], item % heads, workspace);
    } else {
      int64_t shared = round.first_shared + (item - tile_items) / heads;
      kernels.attend_shared(pass, pass.routes.shared_blocks[size_t(shared)], (item - tile_items) % heads, workspace);
    }
  }
}

void merge(const Pass& pass, const AttentionKernels& kernels, Scratch& scratch, bool is_last_round) {
  int64_t heads = pass.call.query_heads, items = int64_t(pass.routes.partial_rows.size()) * heads;
  for (int64_t item; (item = scratch.next_merge.fetch_add(1, std::memory_order_relaxed)) < items;)
    kernels.merge_partials(pass, item / heads, item % heads, is_last_round);
}

template <class T>
void append_row(const PageGeometry& g, int64_t layer, int64_t inside, const T* key, const T* value, T* page) {
  int64_t tile = inside / tile_tokens, lane = inside % tile_tokens;
  for (int64_t head = 0; head < g.heads; head++) {
    T* keys = page + g.key_tile(layer, tile, head) + lane;
    for (int64_t d = 0; d < g.key_dim; d++) keys[d * tile_tokens] = key[head * g.key_dim + d];
    std::memcpy(page + g.value_tile(layer, tile, head) + lane * g.value_dim, value + head * g.value_dim, size_t(g.value_dim) * sizeof(T));
  }
}

}  // namespace

int64_t workspace_floats(const PageGeometry& g, int64_t query_heads) {
  int64_t rows = micro_rows * ((g.key_dim + 15) / 16 * 16 + block_tokens + slot_floats(g));
  int64_t converted = block_tokens * (g.key_dim + slot_width(g)), running = long_rows * (query_heads / g.heads) * slot_floats(g);
  return (rows + converted + running + 31) / 16 * 16;
}

void Scratch::prepare(const Routes& routes, int64_t query_heads, int threads) {
  const PageGeometry& g = routes.geometry;
  int64_t rows = int64_t(routes.partial_rows.size()) * query_heads * slot_floats(g);
  blocks_per_round_ = std::max<int64_t>(1, std::min(last_block(routes) + 1, rows ? most_partial_floats / rows : 1));
  partial_floats_ = rows * (blocks_per_round_ + 1);
  thread_floats_ = workspace_floats(g, query_heads);
  int64_t need = partial_floats_ + threads * thread_floats_;
  if (need <= capacity_) return;
  floats_.reset(static_cast<float*>(std::aligned_alloc(64, size_t(need + 15) / 16 * 64)));
  capacity_ = floats_ ? need : 0;
  if (!floats_) throw std::bad_alloc();
}

void append(const Routes& routes, int64_t layer, const void* key, int64_t key_stride, const void* value, int64_t value_stride, void* pages,
            Slice slice) {
  const PageGeometry& g = routes.geometry;
  by_dtype(g.dtype, [&](auto element) {
    using T = decltype(element);
    for (const Segment& segment : routes.segments)
      for (int64_t r = slice.begin(segment.rows); r < slice.end(segment.rows); r++) {
        int64_t position = segment.first_position + r, row = segment.first_row + r;
        T* page = static_cast<T*>(pages) + segment.table[position / g.page_tokens] * g.page_elements();
        append_row(g, layer, position % g.page_tokens, static_cast<const T*>(key) + row * key_stride,
                   static_cast<const T*>(value) + row * value_stride, page);
      }
  });
}

void attend(const Routes& routes, const Attention& call, const void* query, int64_t query_stride, void* out, int64_t out_stride,
            const void* pages, Scratch& scratch, Slice slice) {
  const AttentionKernels& chosen = chosen_attention_kernels();
  clear_padding(routes, call, static_cast<char*>(out), out_stride, slice);
  int64_t blocks = last_block(routes) + 1, step = scratch.blocks_per_round(), shared = 0;
  for (int64_t first = 0; first == 0 || first < blocks; first += step) {
    Pass pass{routes, call, static_cast<const char*>(query), query_stride, static_cast<char*>(out), out_stride,
              static_cast<const char*>(pages), scratch.partials(), first, step};
    Round round{first == 0 ? int64_t(routes.row_tiles.size()) : 0, shared, 0};
    while (shared < int64_t(routes.shared_blocks.size()) && routes.shared_blocks[size_t(shared)].block < first + step) shared++;
    round.num_shared = shared - round.first_shared;
    compute(pass, round, chosen, scratch, slice.thread);
    if (slice.thread == 0) scratch.next_merge = 0;
    barrier();
    if (slice.thread == 0) scratch.next_item = 0;
    merge(pass, chosen, scratch, first + step >= blocks);
    if (first + step < blocks) barrier();
  }
}

}  // namespace forkpoint
