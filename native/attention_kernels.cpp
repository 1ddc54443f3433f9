// From pages to blocks, from segments to rows of queries. See attention.h for the order of every sum.
#include "attention_block.h"

namespace forkpoint {
namespace FORKPOINT_ISA {
namespace {

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

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{&attend_shared, &attend_tile, &merge_partials};

}  // namespace FORKPOINT_ISA
}  // namespace forkpoint
