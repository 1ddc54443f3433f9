// Attention of a few query rows to one block of keys and values, as they lie in pages or converted to float32 before. Knows no pages.
#pragma once
#include <utility>

#include "attention_weights.h"

namespace forkpoint {
namespace FORKPOINT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int most_rows = 12;
constexpr int vectors_beside(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }
#else
constexpr int most_rows = 2;
constexpr int vectors_beside(int) { return 2; }
#endif

// Tiles that all rows are done with before the next are read: few enough to stay in the nearest cache, and so that memory is asked for
// evenly.
constexpr int64_t near_tiles = 4;

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Keys and values of one head in one block, by tiles of sixteen tokens. Elements are the pages' own, or float32 converted before.
template <class E>
struct Block {
  const E* keys[block_tiles];    // [key_dim, 16]
  const E* values[block_tiles];  // [16, value_stride]
  int64_t key_dim, value_stride, first, last;  // tiles that are there

  // What is read once the keys before `tile` were: worth asking memory for.
  const E* after(int64_t tile) const { return tile < last ? keys[tile] : values[first]; }
  const E* values_after(int64_t tile) const { return values[tile < last ? tile : first]; }
};

// Query rows computed together. Each sees keys [low, high) of the block, at least one, and has a slot for its result.
struct Rows {
  int count = 0;
  const char* query[micro_rows];
  int low[micro_rows], high[micro_rows];
  float* slot[micro_rows];
  int64_t tag[micro_rows];
};

struct Workspace {
  float *query, *scores, *slots, *keys, *values, *running;

  Workspace(float* memory, const PageGeometry& g) {
    query = memory;
    scores = query + micro_rows * ((g.key_dim + 15) / 16 * 16);
    slots = scores + micro_rows * block_tokens;
    keys = slots + micro_rows * slot_floats(g);
    values = keys + block_tokens * g.key_dim;
    running = values + block_tokens * slot_width(g);
  }
};

template <class E, int R, int N>
inline void dot_tiles(const Block<E>& block, int64_t tile, const float* query, float* scores) {
  Vector sum[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[r][n] = zero();
  const E *keys[N], *next[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) {
    keys[n] = block.keys[tile + n];
    next[n] = block.after(tile + N + n);
  }
  for (int64_t d = 0; d < block.key_dim; d++) {
    Vector key[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      key[n] = load(keys[n] + d * tile_tokens);
      if (sizeof(E) == 2 && d % 2 == 0) prefetch(next[n] + d * tile_tokens);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      Vector q = broadcast(query[d * most_rows + r]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sum[r][n] = multiply_add(q, key[n], sum[r][n]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(scores + r * block_tokens + (tile + n) * tile_tokens, sum[r][n]);
}

// Dot products of R query rows with the keys of tiles [first, last).
template <class E, int R>
void dot_products(const Block<E>& block, int64_t first, int64_t last, const float* query, float* scores) {
  constexpr int N = vectors_beside(R);
  int64_t tile = first;
  for (; tile + N <= last; tile += N) dot_tiles<E, R, N>(block, tile, query, scores);
  if constexpr (N > 4)
    for (; tile + 4 <= last; tile += 4) dot_tiles<E, R, 4>(block, tile, query, scores);
  if constexpr (N > 2)
    for (; tile + 2 <= last; tile += 2) dot_tiles<E, R, 2>(block, tile, query, scores);
  for (; tile < last; tile++) dot_tiles<E, R, 1>(block, tile, query, scores);
}

template <class E, int R, int N>
inline void weigh_columns(const Block<E>& block, int first, int last, const float* weights, float* const* slots, int64_t column) {
  Vector sum[R][N];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[r][n] = load(slots[r] + column + n * lanes);
  for (int key = first; key < last;) {
    const E* values = block.values[key / tile_tokens] + (key % tile_tokens) * block.value_stride + column;
    int64_t ahead = block.values_after(key / tile_tokens + 1) - block.values[key / tile_tokens];
    int stop = (key / int(tile_tokens) + 1) * int(tile_tokens);
    for (stop = stop < last ? stop : last; key < stop; key++, values += block.value_stride) {
      Vector value[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        value[n] = load(values + n * lanes);
        if (sizeof(E) == 2 && n % 2 == 0) prefetch(values + ahead + n * lanes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        Vector weight = broadcast(weights[r * block_tokens + key]);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = multiply_add(weight, value[n], sum[r][n]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(slots[r] + column + n * lanes, sum[r][n]);
}

// Adds the weighted values of keys [first, last), in order, to R slots.
template <class E, int R>
void weigh_values(const Block<E>& block, int first, int last, const float* weights, float* const* slots, int64_t width) {
  constexpr int N = vectors_beside(R);
  int64_t column = 0;
  for (; column + N * lanes <= width; column += N * lanes) weigh_columns<E, R, N>(block, first, last, weights, slots, column);
  if constexpr (N > 4)
    for (; column + 4 * lanes <= width; column += 4 * lanes) weigh_columns<E, R, 4>(block, first, last, weights, slots, column);
  if constexpr (N > 2)
    for (; column + 2 * lanes <= width; column += 2 * lanes) weigh_columns<E, R, 2>(block, first, last, weights, slots, column);
  for (; column < width; column += lanes) weigh_columns<E, R, 1>(block, first, last, weights, slots, column);
}

// Calls body(constant) for the largest constant that fits, until `count` rows are done.
template <class Body, int... I>
inline void by_count(int count, Body body, std::integer_sequence<int, I...>) {
  ((count == I + 1 ? body(std::integral_constant<int, I + 1>{}) : void()), ...);
}
template <class Body>
inline void in_groups(int count, Body body) {
  for (int done = 0, now; done < count; done += now) {
    now = count - done < most_rows ? count - done : most_rows;
    by_count(now, [&](auto rows) { body(rows, done); }, std::make_integer_sequence<int, most_rows>{});
  }
}

// Weighted values of rows that may see different keys: each row's own first ones, those that all see, each row's own last ones.
template <class E>
void weigh_rows(const Block<E>& block, const Rows& rows, const float* weights, int64_t width) {
  int first = 0, last = block_tokens;
  for (int r = 0; r < rows.count; r++) {
    first = rows.low[r] > first ? rows.low[r] : first;
    last = rows.high[r] < last ? rows.high[r] : last;
  }
  bool is_common = first < last;
  for (int r = 0; r < rows.count; r++) {
    for (int64_t c = 0; c < width; c += lanes) store(rows.slot[r] + c, zero());
    int stop = is_common ? first : rows.high[r];
    if (rows.low[r] < stop) weigh_values<E, 1>(block, rows.low[r], stop, weights + r * block_tokens, rows.slot + r, width);
  }
  if (!is_common) return;
  constexpr int near = int(near_tiles * tile_tokens);
  for (int from = first, to; from < last; from = to) {
    to = (from / near + 1) * near;
    to = to < last ? to : last;
    in_groups(rows.count, [&](auto count, int done) {
      weigh_values<E, count>(block, from, to, weights + done * block_tokens, rows.slot + done, width);
    });
  }
  for (int r = 0; r < rows.count; r++)
    if (last < rows.high[r]) weigh_values<E, 1>(block, last, rows.high[r], weights + r * block_tokens, rows.slot + r, width);
}

// One row's query as float32, an element of each group of rows: what a group multiplies with lies side by side.
template <class T>
void convert_query(const char* from, int64_t count, float sign, float* to) {
  const T* values = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < count; i++) to[i * most_rows] = to_float(values[i]) * sign;
}

// The result of each row over one block, in its slot.
template <class T, class E>
void attend_rows(const Block<E>& block, const Rows& rows, const Logits& logits, const Workspace& work, int64_t width) {
  int64_t first = block_tiles, last = 0;
  for (int r = 0; r < rows.count; r++) {
    convert_query<T>(rows.query[r], block.key_dim, logits.sign, work.query + r / most_rows * most_rows * block.key_dim + r % most_rows);
    int64_t from = rows.low[r] / tile_tokens, to = (rows.high[r] + tile_tokens - 1) / tile_tokens;
    first = from < first ? from : first;
    last = to > last ? to : last;
  }
  for (int64_t tile = first; tile < last; tile += near_tiles)
    in_groups(rows.count, [&](auto count, int done) {
      int64_t stop = tile + near_tiles < last ? tile + near_tiles : last;
      dot_products<E, count>(block, tile, stop, work.query + done * block.key_dim, work.scores + done * block_tokens);
    });
  for (int r = 0; r < rows.count; r++) weights_of(work.scores + r * block_tokens, rows.low[r], rows.high[r], logits, rows.slot[r] + width);
  weigh_rows(block, rows, work.scores, width);
}

}  // namespace
}  // namespace FORKPOINT_ISA
}  // namespace forkpoint
