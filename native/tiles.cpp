#include "tiles.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <tuple>

namespace nb = nanobind;

namespace forkpoint {
namespace {

// Square pieces are read a cache line at a time and kept in registers or the first cache.
constexpr int64_t piece = 16;

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows, c < columns; both at most `piece`.
template <class U>
void transpose_piece(const U* from, int64_t from_stride, U* to, int64_t to_stride, int64_t rows, int64_t columns) {
  if (rows == piece && columns == piece) {
    U square[piece][piece];
    for (int64_t r = 0; r < piece; r++)
      for (int64_t c = 0; c < piece; c++) square[c][r] = from[r * from_stride + c];
    for (int64_t c = 0; c < piece; c++) std::memcpy(to + c * to_stride, square[c], sizeof(square[c]));
    return;
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) to[c * to_stride + r] = from[r * from_stride + c];
}

#if defined(__SSE2__)
// Eight by eight halves, in registers.
inline void transpose_eight(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) {
  __m128i row[8], pairs[8], fours[8];
  for (int r = 0; r < 8; r++) row[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * from_stride));
  for (int r = 0; r < 4; r++) {
    pairs[2 * r] = _mm_unpacklo_epi16(row[2 * r], row[2 * r + 1]);
    pairs[2 * r + 1] = _mm_unpackhi_epi16(row[2 * r], row[2 * r + 1]);
  }
  for (int half = 0; half < 2; half++)
    for (int side = 0; side < 2; side++) {
      fours[4 * half + 2 * side] = _mm_unpacklo_epi32(pairs[4 * half + side], pairs[4 * half + 2 + side]);
      fours[4 * half + 2 * side + 1] = _mm_unpackhi_epi32(pairs[4 * half + side], pairs[4 * half + 2 + side]);
    }
  for (int c = 0; c < 4; c++) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * c * to_stride), _mm_unpacklo_epi64(fours[c], fours[4 + c]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (2 * c + 1) * to_stride), _mm_unpackhi_epi64(fours[c], fours[4 + c]));
  }
}

template <>
void transpose_piece(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride, int64_t rows, int64_t columns) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    int64_t c = 0;
    for (; c + 8 <= columns; c += 8) transpose_eight(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    for (; c < columns; c++)
      for (int64_t i = r; i < r + 8; i++) to[c * to_stride + i] = from[i * from_stride + c];
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) to[c * to_stride + r] = from[r * from_stride + c];
}
#endif

template <class U>
void transpose(const U* from, int64_t from_stride, U* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += piece)
    for (int64_t c = 0; c < columns; c += piece)
      transpose_piece(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride, std::min(piece, rows - r),
                      std::min(piece, columns - c));
}

// Calls body(tokens done before, how many now, start of the tile's page, tile, place in the tile) for each tile that is touched.
template <class Body>
void each_tile(const PageGeometry& g, const ChunkPlace& place, Body body) {
  for (int64_t done = 0, now; done < place.count; done += now) {
    int64_t position = place.start + done, inside = position % g.page_tokens, lane = inside % tile_tokens;
    now = std::min(tile_tokens - lane, place.count - done);
    body(done, now, place.table[position / g.page_tokens] * g.page_elements(), inside / tile_tokens, lane);
  }
}

template <class U>
void scatter(const PageGeometry& g, const ChunkPlace& place, const U* keys, const U* values, U* pages) {
  int64_t key_row = g.heads * g.key_dim, value_row = g.heads * g.value_dim;
  each_tile(g, place, [&](int64_t done, int64_t now, int64_t page, int64_t tile, int64_t lane) {
    for (int64_t layer = 0; layer < g.num_layers; layer++)
      for (int64_t head = 0; head < g.heads; head++) {
        int64_t token = layer * place.count + done;
        transpose(keys + token * key_row + head * g.key_dim, key_row, pages + page + g.key_tile(layer, tile, head) + lane, tile_tokens, now,
                  g.key_dim);
        U* to = pages + page + g.value_tile(layer, tile, head) + lane * g.value_dim;
        for (int64_t t = 0; t < now; t++, to += g.value_dim)
          std::memcpy(to, values + (token + t) * value_row + head * g.value_dim, size_t(g.value_dim) * sizeof(U));
      }
  });
}

template <class U>
void gather(const PageGeometry& g, const ChunkPlace& place, const U* pages, U* keys, U* values) {
  int64_t key_row = g.heads * g.key_dim, value_row = g.heads * g.value_dim;
  each_tile(g, place, [&](int64_t done, int64_t now, int64_t page, int64_t tile, int64_t lane) {
    for (int64_t layer = 0; layer < g.num_layers; layer++)
      for (int64_t head = 0; head < g.heads; head++) {
        int64_t token = layer * place.count + done;
        transpose(pages + page + g.key_tile(layer, tile, head) + lane, tile_tokens, keys + token * key_row + head * g.key_dim, key_row,
                  g.key_dim, now);
        const U* from = pages + page + g.value_tile(layer, tile, head) + lane * g.value_dim;
        for (int64_t t = 0; t < now; t++, from += g.value_dim)
          std::memcpy(values + (token + t) * value_row + head * g.value_dim, from, size_t(g.value_dim) * sizeof(U));
      }
  });
}

template <class Body>
void by_size(Dtype dtype, Body body) {
  if (element_bytes(dtype) == 4) body(uint32_t{});
  else body(uint16_t{});
}

using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int>;

PageGeometry geometry_of(const Shape& shape) {
  auto [page_tokens, num_layers, heads, key_dim, value_dim, dtype] = shape;
  return {page_tokens, num_layers, heads, key_dim, value_dim, Dtype(dtype)};
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void pages_from_chunk(const PageGeometry& g, const ChunkPlace& place, const void* keys, const void* values, void* pages) {
  by_size(g.dtype, [&](auto unit) {
    using U = decltype(unit);
    scatter(g, place, static_cast<const U*>(keys), static_cast<const U*>(values), static_cast<U*>(pages));
  });
}

void chunk_from_pages(const PageGeometry& g, const ChunkPlace& place, const void* pages, void* keys, void* values) {
  by_size(g.dtype, [&](auto unit) {
    using U = decltype(unit);
    gather(g, place, static_cast<const U*>(pages), static_cast<U*>(keys), static_cast<U*>(values));
  });
}

void register_pages(nb::module_& m) {
  m.def("pages_from_chunk", [](const Shape& shape, uintptr_t table, int64_t start, int64_t count, uintptr_t keys, uintptr_t values, uintptr_t pages) {
    nb::gil_scoped_release released;
    pages_from_chunk(geometry_of(shape), {at<int32_t>(table), start, count}, at<void>(keys), at<void>(values), at<void>(pages));
  });
  m.def("chunk_from_pages", [](const Shape& shape, uintptr_t table, int64_t start, int64_t count, uintptr_t pages, uintptr_t keys, uintptr_t values) {
    nb::gil_scoped_release released;
    chunk_from_pages(geometry_of(shape), {at<int32_t>(table), start, count}, at<void>(pages), at<void>(keys), at<void>(values));
  });
}

}  // namespace forkpoint
