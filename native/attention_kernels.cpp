// Attention of a few query rows to one block of keys, and the merging of blocks. See attention.h for the order of every sum.
#include <cmath>
#include <utility>

#include "attention.h"
#include "vector.h"

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
constexpr float log2_e = 1.44269504f;

// Tiles that all rows are done with before the next are read: few enough to stay in the nearest cache, and so that memory is asked for
// evenly.
constexpr int64_t near_tiles = 4;

// x * 2^power for whole powers that keep it a normal number.
inline Vector scaled(Vector x, Vector power) {
#if defined(__AVX512F__)
  return {_mm512_scalef_ps(x.value, power.value)};
#else
  return x * power_of_two(power);
#endif
}

// The largest of sixteen; the sum in the order of sum_of.
#if defined(__AVX512F__)
inline float largest(Vector x) { return _mm512_reduce_max_ps(x.value); }
inline float added(Vector x) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.value), _mm512_extractf32x8_ps(x.value, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float largest(Vector x) { return maximum_of(x); }
inline float added(Vector x) { return sum_of(x); }
#endif

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// 2^x for x up to 126, at least 2^-125. Relative error below 2e-7. NaN stays NaN.
inline Vector power(Vector x) {
  x = maximum(broadcast(-125.0f), x);
  Vector whole = round_even(x), rest = x - whole;
  Vector sum = broadcast(0.00132647271f);
  sum = multiply_add(sum, rest, broadcast(0.00967151268f));
  sum = multiply_add(sum, rest, broadcast(0.0555073374f));
  sum = multiply_add(sum, rest, broadcast(0.240222421f));
  sum = multiply_add(sum, rest, broadcast(0.693146978f));
  sum = multiply_add(sum, rest, broadcast(1.0f));
  return scaled(sum, whole);
}

// From dot products to exponents of two: dot * scale + offset, or capped: tanh(y) * cap + offset, tanh(y) = 1 - 2 / (e^2y + 1).
// Both grow with the dot product, so the largest dot product has the largest exponent; a negative scaling is moved to the query.
struct Logits {
  float sign, scale, cap;
  bool is_capped;

  explicit Logits(const Attention& call) : is_capped(call.softcap != 0) {
    float scaling = std::fabs(call.scaling);
    sign = call.scaling < 0 ? -1.0f : 1.0f;
    scale = is_capped ? scaling / call.softcap * (2 * log2_e) : scaling * log2_e;
    cap = call.softcap * log2_e;
  }
  Vector operator()(Vector dot, Vector offset) const {
    if (!is_capped) return multiply_add(dot, broadcast(scale), offset);
    Vector two = broadcast(2), one = broadcast(1);
    Vector bounded = one - two / (power(minimum(broadcast(126.0f), dot * broadcast(scale))) + one);
    return multiply_add(bounded, broadcast(cap), offset);
  }
};

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

// The lanes of the tile at `start` that lie in [low, high).
inline Mask seen(int start, int low, int high) {
  static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vector number = load(numbers), far = broadcast(1e9f);
  return less(select(less(number, broadcast(float(low - start))), far, number), broadcast(float(high - start)));
}

// Turns one row's dot products into weights; sets the slot's maximum and sum.
inline void weights_of(float* scores, int low, int high, const Logits& logits, float* maximum_and_sum) {
  constexpr int size = int(tile_tokens);
  int first = low / size * size, last = (high + size - 1) / size * size;
  Vector hidden = broadcast(-__builtin_inff()), most = hidden;
  for (int start = first; start < last; start += size) {
    Vector dot = load(scores + start);
    if (start < low || start + size > high) dot = select(seen(start, low, high), dot, hidden);
    most = maximum(most, dot);
  }
  float tops[16];
  store(tops, logits(broadcast(largest(most)), zero()));
  Vector offset = zero() - broadcast(tops[0]), sum = zero();
  for (int start = first; start < last; start += size) {
    Vector weight = power(logits(load(scores + start), offset));
    if (start < low || start + size > high) weight = select(seen(start, low, high), weight, zero());
    store(scores + start, weight);
    sum = sum + weight;
  }
  maximum_and_sum[0] = tops[0];
  maximum_and_sum[1] = added(sum);
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

// running = running and `next`, which comes after it.
inline void merge(float* running, const float* next, int64_t width) {
  float a = running[width], b = next[width], top = a > b ? a : b;
  Vector keep = power(broadcast(a - top)), add = power(broadcast(b - top));
  Vector sum = multiply_add(broadcast(running[width + 1]), keep, broadcast(next[width + 1]) * add);
  for (int64_t c = 0; c < width; c += lanes) store(running + c, multiply_add(load(running + c), keep, load(next + c) * add));
  float sums[16];
  store(sums, sum);
  running[width] = top;
  running[width + 1] = sums[0];
}

inline void copy_slot(float* to, const float* from, int64_t width) {
  for (int64_t c = 0; c < width + lanes; c += lanes) store(to + c, load(from + c));
}

// Divides by the sum of weights and rounds once.
template <class T>
void finish(float* slot, const float* sink, int64_t value_dim, int64_t width, T* out) {
  Vector sum = broadcast(slot[width + 1]), keep = broadcast(1.0f);
  if (sink) {
    float logit = *sink * log2_e, top = slot[width] > logit ? slot[width] : logit;
    keep = power(broadcast(slot[width] - top));
    sum = multiply_add(sum, keep, power(broadcast(logit - top)));
  }
  for (int64_t c = 0; c < value_dim; c += lanes) {
    Vector value = load(slot + c) * keep / sum;
    if (c + lanes <= value_dim) store(out + c, value);
    else store_some(out + c, value, value_dim - c);
  }
}

// Tiles of one block as they lie in the pages of `segment`, as far as [first, last) goes.
template <class T>
void find_tiles(const Pass& pass, const Segment& segment, int64_t block, int64_t head, int64_t first, int64_t last, Block<T>& out) {
  const PageGeometry& g = pass.routes.geometry;
  out.key_dim = g.key_dim;
  out.value_stride = g.value_dim;
  out.first = first;
  out.last = last;
  for (int64_t tile = first; tile < last; tile++) {
    int64_t position = block * block_tokens + tile * tile_tokens, inside = position % g.page_tokens / tile_tokens;
    const T* page = reinterpret_cast<const T*>(pass.pages) + segment.table[position / g.page_tokens] * g.page_elements();
    out.keys[tile] = page + g.key_tile(pass.call.layer, inside, head);
    out.values[tile] = page + g.value_tile(pass.call.layer, inside, head);
  }
}

// Values of a tile as float32, each row padded with zeros to `width`.
template <class T>
void convert_values(const T* from, const T* next, int64_t value_dim, int64_t width, float* to) {
  for (int64_t token = 0; token < tile_tokens; token++, from += value_dim, next += value_dim, to += width) {
    int64_t c = 0;
    for (; c + lanes <= value_dim; c += lanes) {
      prefetch(next + c);
      store(to + c, load(from + c));
    }
    if (c < value_dim) store(to + c, load_some(from + c, value_dim - c));
  }
}

template <class T>
Block<float> convert(const Block<T>& block, const Workspace& work, int64_t value_dim, int64_t width, int64_t first, int64_t last) {
  Block<float> out;
  out.key_dim = block.key_dim;
  out.value_stride = width;
  out.first = first;
  out.last = last;
  for (int64_t tile = first; tile < last; tile++) {
    float* keys = work.keys + tile * tile_tokens * block.key_dim;
    float* values = work.values + tile * tile_tokens * width;
    const T* next = block.keys[tile + 1 < last ? tile + 1 : first];
    for (int64_t d = 0; d < block.key_dim; d++) {
      prefetch(next + d * lanes);
      store(keys + d * lanes, load(block.keys[tile] + d * lanes));
    }
    convert_values(block.values[tile], block.values_after(tile + 1), value_dim, width, values);
    out.keys[tile] = keys;
    out.values[tile] = values;
  }
  return out;
}

// Collects query rows that see a block and computes them as many at a time as are best.
template <class T>
class Gatherer {
 public:
  Gatherer(const Pass& pass, int64_t block, int64_t head, const Workspace& work)
      : pass_(pass), work_(work), logits_(pass.call), geometry_(pass.routes.geometry), block_(block), head_(head),
        width_(slot_width(geometry_)), group_(pass.call.query_heads / geometry_.heads) {
    limit_ = group_ <= micro_rows ? int(micro_rows / group_ * group_) : int(micro_rows);
  }

  // The keys of the block that a position sees, as [low, high); false where there are none.
  bool sees(int64_t position, int& low, int& high) const {
    int64_t start = block_ * block_tokens, from = pass_.call.window ? position - pass_.call.window + 1 - start : 0;
    low = from > 0 ? int(from < block_tokens ? from : block_tokens) : 0;
    high = position + 1 - start < block_tokens ? int(position + 1 - start) : int(block_tokens);
    return low < high;
  }

  // Reads tiles [first, last) from the pages of `segment`; converted before use where many rows will read them.
  void open(const Segment& segment, int64_t first, int64_t last, bool is_converted) {
    is_converted_ = !std::is_same<T, float>::value && is_converted;
    is_converted_ = is_converted_ || geometry_.value_dim % lanes;
    find_tiles(pass_, segment, block_, head_, first, last, plain_);
    if (is_converted_) converted_ = convert(plain_, work_, geometry_.value_dim, width_, first, last);
  }

  // Adds the query heads of one row; slot(query head of the group) says where each result goes.
  template <class Slot, class Done>
  void add(int64_t row, int low, int high, Slot slot, Done done) {
    const T* query = reinterpret_cast<const T*>(pass_.query) + row * pass_.query_stride + head_ * group_ * geometry_.key_dim;
    for (int64_t g = 0; g < group_; g++) {
      int r = rows_.count++;
      rows_.query[r] = reinterpret_cast<const char*>(query + g * geometry_.key_dim);
      rows_.low[r] = low;
      rows_.high[r] = high;
      rows_.slot[r] = slot(g, r);
      rows_.tag[r] = row * group_ + g;
      if (rows_.count == limit_) flush(done);
    }
  }

  // Computes what is collected; done(tag, slot) for each row.
  template <class Done>
  void flush(Done done) {
    if (!rows_.count) return;
    if (is_converted_) attend_rows<T>(converted_, rows_, logits_, work_, width_);
    else attend_rows<T>(plain_, rows_, logits_, work_, width_);
    for (int r = 0; r < rows_.count; r++) done(rows_.tag[r], rows_.slot[r]);
    rows_.count = 0;
  }

  int64_t width() const { return width_; }
  int64_t group() const { return group_; }

 private:
  const Pass& pass_;
  const Workspace& work_;
  Logits logits_;
  const PageGeometry& geometry_;
  int64_t block_, head_, width_, group_;
  int limit_;
  bool is_converted_ = false;
  Block<T> plain_;
  Block<float> converted_;
  Rows rows_;
};

inline float* partial_slot(const Pass& pass, int64_t partial_row, int64_t query_head, int64_t block) {
  int64_t index = (partial_row * pass.call.query_heads + query_head) * pass.num_blocks + block - pass.first_block;
  return pass.partials + index * slot_floats(pass.routes.geometry);
}

template <class T>
void attend_shared_as(const Pass& pass, const SharedBlock& shared, int64_t head, const Workspace& work) {
  Gatherer<T> gatherer(pass, shared.block, head, work);
  const int32_t* members = pass.routes.members.data() + shared.first_member;
  int64_t first = block_tiles, last = 0, count = 0;
  auto each_row = [&](auto body) {
    for (int64_t m = 0; m < shared.num_members; m++) {
      const Segment& segment = pass.routes.segments[size_t(members[m])];
      for (int64_t r = 0; r < segment.rows; r++) {
        int low, high;
        if (gatherer.sees(segment.first_position + r, low, high)) body(segment, r, low, high);
      }
    }
  };
  each_row([&](const Segment&, int64_t, int low, int high) {
    first = low / tile_tokens < first ? low / tile_tokens : first;
    last = (high + tile_tokens - 1) / tile_tokens > last ? (high + tile_tokens - 1) / tile_tokens : last;
    count++;
  });
  if (!count) return;
  gatherer.open(pass.routes.segments[size_t(members[0])], first, last, count * gatherer.group() > micro_rows);
  auto done = [](int64_t, float*) {};
  each_row([&](const Segment& segment, int64_t r, int low, int high) {
    auto slot = [&](int64_t g, int) { return partial_slot(pass, segment.first_partial + r, head * gatherer.group() + g, shared.block); };
    gatherer.add(segment.first_row + r, low, high, slot, done);
  });
  gatherer.flush(done);
}

template <class T>
void attend_tile_as(const Pass& pass, const RowTile& tile, int64_t head, const Workspace& work) {
  const Segment& segment = pass.routes.segments[size_t(tile.segment)];
  const PageGeometry& g = pass.routes.geometry;
  int64_t group = pass.call.query_heads / g.heads, width = slot_width(g), floats = slot_floats(g);
  int64_t start = segment.first_position + tile.first, stop = start + tile.rows, row = segment.first_row + tile.first;
  int64_t seen_from = pass.call.window && start - pass.call.window + 1 > 0 ? start - pass.call.window + 1 : 0;
  auto running = [&](int64_t tag) { return work.running + (tag - row * group) * floats; };
  for (int64_t i = 0; i < tile.rows * group; i++) work.running[i * floats + width + 1] = -1;  // nothing yet
  for (int64_t block = seen_from / block_tokens; block * block_tokens < stop; block++) {
    Gatherer<T> gatherer(pass, block, head, work);
    int64_t from = seen_from - block * block_tokens, to = stop - block * block_tokens;
    int64_t first = from > 0 ? from / tile_tokens : 0, last = to < block_tokens ? (to + tile_tokens - 1) / tile_tokens : block_tiles;
    gatherer.open(segment, first, last, true);
    auto slot = [&](int64_t, int r) { return work.slots + r * floats; };
    auto done = [&](int64_t tag, float* next) {
      float* sum = running(tag);
      if (sum[width + 1] == -1) copy_slot(sum, next, width);
      else merge(sum, next, width);
    };
    for (int64_t r = 0; r < tile.rows; r++) {
      int low, high;
      if (gatherer.sees(start + r, low, high)) gatherer.add(row + r, low, high, slot, done);
    }
    gatherer.flush(done);
  }
  for (int64_t r = 0; r < tile.rows; r++)
    for (int64_t q = 0; q < group; q++) {
      T* out = reinterpret_cast<T*>(pass.out) + (row + r) * pass.out_stride + (head * group + q) * g.value_dim;
      finish(running((row + r) * group + q), pass.call.sinks ? pass.call.sinks + head * group + q : nullptr, g.value_dim, width, out);
    }
}

template <class T>
void merge_partials_as(const Pass& pass, int64_t partial_row, int64_t query_head, bool is_last_round) {
  const PageGeometry& g = pass.routes.geometry;
  const PartialRow& place = pass.routes.partial_rows[size_t(partial_row)];
  int64_t width = slot_width(g), block_of_row = place.position / block_tokens;
  int64_t seen_from = pass.call.window && place.position - pass.call.window + 1 > 0 ? place.position - pass.call.window + 1 : 0;
  float* running = pass.partials + pass.routes.partial_rows.size() * pass.call.query_heads * pass.num_blocks * slot_floats(g);
  running += (partial_row * pass.call.query_heads + query_head) * slot_floats(g);
  for (int64_t block = pass.first_block; block < pass.first_block + pass.num_blocks && block <= block_of_row; block++) {
    if (block < seen_from / block_tokens) continue;
    const float* next = partial_slot(pass, partial_row, query_head, block);
    if (block == seen_from / block_tokens) copy_slot(running, next, width);
    else merge(running, next, width);
  }
  if (!is_last_round) return;
  T* out = reinterpret_cast<T*>(pass.out) + place.row * pass.out_stride + query_head * g.value_dim;
  finish(running, pass.call.sinks ? pass.call.sinks + query_head : nullptr, g.value_dim, width, out);
}

}  // namespace

void attend_shared(const Pass& pass, const SharedBlock& shared, int64_t head, float* workspace) {
  by_dtype(pass.routes.geometry.dtype, [&](auto element) {
    attend_shared_as<decltype(element)>(pass, shared, head, Workspace(workspace, pass.routes.geometry));
  });
}

void attend_tile(const Pass& pass, const RowTile& tile, int64_t head, float* workspace) {
  by_dtype(pass.routes.geometry.dtype, [&](auto element) {
    attend_tile_as<decltype(element)>(pass, tile, head, Workspace(workspace, pass.routes.geometry));
  });
}

void merge_partials(const Pass& pass, int64_t partial_row, int64_t query_head, bool is_last_round) {
  by_dtype(pass.routes.geometry.dtype, [&](auto element) {
    merge_partials_as<decltype(element)>(pass, partial_row, query_head, is_last_round);
  });
}

}  // namespace FORKPOINT_ISA
}  // namespace forkpoint
