// Which rows attend to which pages in one pass. Built once per pass, used by every layer. Knows no element values.
#pragma once
#include <vector>

#include "element.h"

namespace forkpoint {

constexpr int64_t tile_tokens = 16;   // tokens that lie side by side in a tile of a page
constexpr int64_t block_tokens = 256; // keys of one partial sum, at absolute positions [256 b, 256 (b + 1))
constexpr int64_t block_tiles = block_tokens / tile_tokens;
constexpr int64_t long_rows = 32;     // a segment of so many rows is computed tile by tile of rows, a shorter one block by block of keys

// How a group's pages lie in memory: for each layer keys `[T/16][heads][key_dim][16]`, then values `[T/16][heads][16][value_dim]`.
struct PageGeometry {
  int64_t page_tokens, num_layers, heads, key_dim, value_dim;
  Dtype dtype;

  int64_t layer_elements() const { return page_tokens * heads * (key_dim + value_dim); }
  int64_t page_elements() const { return num_layers * layer_elements(); }
  // Offsets in elements from the start of a page.
  int64_t key_tile(int64_t layer, int64_t tile, int64_t head) const {
    return layer * layer_elements() + (tile * heads + head) * key_dim * tile_tokens;
  }
  int64_t value_tile(int64_t layer, int64_t tile, int64_t head) const {
    return layer * layer_elements() + page_tokens * heads * key_dim + (tile * heads + head) * value_dim * tile_tokens;
  }
};

// Rows [first_row, first_row + rows) at positions from first_position on, of one lane.
struct Segment {
  int64_t first_row, rows, first_position;
  const int32_t* table;   // page numbers of the lane
  int64_t first_partial;  // of its rows among the rows of short segments; -1 for a long segment

  int64_t stop() const { return first_position + rows; }
};

// Short segments whose pages in one block of keys are the same: the block is read once for all of them.
struct SharedBlock {
  int64_t block;
  int64_t first_member, num_members;  // in Routes::members
};

// Up to long_rows rows of a long segment.
struct RowTile {
  int64_t segment, first, rows;  // `first` counts from the segment's first row
};

struct PartialRow {
  int64_t row, position;
};

class Routes {
 public:
  // `segments` is [num_segments, 3]: first row, rows, first position; `tables` is [num_segments, table_width], -1 where a lane has no
  // more. Both are copied. Throws std::invalid_argument where they lead outside `num_rows` rows or `num_pages` pages, or overlap.
  Routes(const int64_t* segments, int64_t num_segments, const int32_t* tables, int64_t table_width, const PageGeometry&,
         int64_t num_rows, int64_t num_pages);
  Routes(const Routes&) = delete;
  Routes& operator=(const Routes&) = delete;

  PageGeometry geometry;
  std::vector<Segment> segments;
  std::vector<SharedBlock> shared_blocks;  // by block
  std::vector<int32_t> members;
  std::vector<PartialRow> partial_rows;    // rows of short segments
  std::vector<RowTile> row_tiles;          // those with most to read first
  std::vector<int64_t> padding_rows;       // rows of no segment

 private:
  void check(int64_t num_rows, int64_t num_pages, int64_t table_width) const;
  void find_padding(int64_t num_rows);
  void share_blocks();
  void share_block(int64_t block);
  void cut_tiles();

  std::vector<int32_t> tables_;
};

}  // namespace forkpoint
