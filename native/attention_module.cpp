// Attention for Python: one call appends a pass's keys and values and attends.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "attention.h"

namespace nb = nanobind;

namespace forkpoint {
namespace {

using Address = uintptr_t;
using Rows = std::tuple<Address, int64_t>;  // address of the first row, elements between rows
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int>;

PageGeometry geometry_of(const Shape& shape) {
  auto [page_tokens, num_layers, heads, key_dim, value_dim, dtype] = shape;
  return {page_tokens, num_layers, heads, key_dim, value_dim, Dtype(dtype)};
}

const void* at(Address address) { return reinterpret_cast<const void*>(address); }

// `rows` and `num_pages` bound what the segments and tables may lead to.
void append_and_attend(Rows query, Rows key, Rows value, Rows out, int64_t rows, int64_t query_heads, Address pages, int64_t num_pages,
                       const Shape& shape, Address segments, int64_t num_segments, Address tables, int64_t table_width, int64_t layer,
                       float scaling, int64_t window, float softcap, Address sinks, int threads) {
  nb::gil_scoped_release released;
  static thread_local Scratch scratch;
  Routes routes(static_cast<const int64_t*>(at(segments)), num_segments, static_cast<const int32_t*>(at(tables)), table_width,
                geometry_of(shape), rows, num_pages);
  Attention call{layer, scaling, window, softcap, static_cast<const float*>(at(sinks)), query_heads};
  scratch.prepare(routes, query_heads, threads);
  Scratch& own = scratch;
  parallel(threads, [&](Slice slice) {
    void* arena = const_cast<void*>(at(pages));
    append(routes, layer, at(std::get<0>(key)), std::get<1>(key), at(std::get<0>(value)), std::get<1>(value), arena, slice);
    barrier();
    attend(routes, call, at(std::get<0>(query)), std::get<1>(query), const_cast<void*>(at(std::get<0>(out))), std::get<1>(out), arena, own,
           slice);
  });
  own.next_item = own.next_merge = 0;
}

// What is read once for whom: (block, the segments that share it), and row tiles as (segment, first row, rows). For tests and profiles.
nb::tuple describe_routes(const Shape& shape, int64_t rows, int64_t num_pages, Address segments, int64_t num_segments, Address tables,
                          int64_t table_width) {
  Routes routes(static_cast<const int64_t*>(at(segments)), num_segments, static_cast<const int32_t*>(at(tables)), table_width,
                geometry_of(shape), rows, num_pages);
  nb::list shared, tiles;
  for (const SharedBlock& block : routes.shared_blocks) {
    nb::list members;
    for (int64_t m = 0; m < block.num_members; m++) members.append(routes.members[size_t(block.first_member + m)]);
    shared.append(nb::make_tuple(block.block, members));
  }
  for (const RowTile& tile : routes.row_tiles) tiles.append(nb::make_tuple(tile.segment, tile.first, tile.rows));
  return nb::make_tuple(shared, tiles);
}

}  // namespace

void register_attention(nb::module_& m) {
  m.def("append_and_attend", &append_and_attend);
  m.def("describe_routes", &describe_routes);
}

}  // namespace forkpoint
