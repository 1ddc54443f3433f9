#include "routes.h"

#include <algorithm>
#include <stdexcept>

namespace forkpoint {

Routes::Routes(const int64_t* given, int64_t num_segments, const int32_t* tables, int64_t table_width, const PageGeometry& shape,
               int64_t num_rows, int64_t num_pages)
    : geometry(shape), tables_(tables, tables + num_segments * table_width) {
  for (int64_t s = 0; s < num_segments; s++) {
    const int64_t* one = given + 3 * s;
    if (one[1] == 0) continue;
    bool is_short = one[1] < long_rows;
    segments.push_back({one[0], one[1], one[2], tables_.data() + s * table_width, is_short ? int64_t(partial_rows.size()) : -1});
    for (int64_t r = 0; is_short && r < one[1]; r++) partial_rows.push_back({one[0] + r, one[2] + r});
  }
  check(num_rows, num_pages, table_width);
  find_padding(num_rows);
  share_blocks();
  cut_tiles();
}

void Routes::check(int64_t num_rows, int64_t num_pages, int64_t table_width) const {
  for (const Segment& segment : segments) {  // compared so that no sum can overflow
    if (segment.rows < 0 || segment.rows > num_rows || segment.first_row < 0 || segment.first_row > num_rows - segment.rows ||
        segment.first_position < 0)
      throw std::invalid_argument("a segment lies outside the rows of its pass");
    if (segment.first_position > table_width * geometry.page_tokens - segment.rows)
      throw std::invalid_argument("a page table is shorter than its lane");
    int64_t pages = (segment.stop() + geometry.page_tokens - 1) / geometry.page_tokens;
    for (int64_t p = 0; p < pages; p++)
      if (segment.table[p] < 0 || segment.table[p] >= num_pages) throw std::invalid_argument("a page table leads to no page");
  }
}

void Routes::find_padding(int64_t num_rows) {
  std::vector<char> is_used(size_t(num_rows), 0);
  for (const Segment& segment : segments)
    for (int64_t r = segment.first_row; r < segment.first_row + segment.rows; r++) {
      if (is_used[size_t(r)]) throw std::invalid_argument("two segments share a row");
      is_used[size_t(r)] = 1;
    }
  for (int64_t r = 0; r < num_rows; r++)
    if (!is_used[size_t(r)]) padding_rows.push_back(r);
}

void Routes::share_blocks() {
  int64_t stop = 0;
  for (const Segment& segment : segments)
    if (segment.first_partial >= 0) stop = std::max(stop, segment.stop());
  for (int64_t block = 0; block * block_tokens < stop; block++) share_block(block);
}

// Lanes are sorted by their page numbers within the block; equal ones come to lie side by side.
void Routes::share_block(int64_t block) {
  struct Lane {
    int32_t segment;
    const int32_t *first, *last;
    bool operator<(const Lane& other) const { return std::lexicographical_compare(first, last, other.first, other.last); }
    bool operator==(const Lane& other) const { return std::equal(first, last, other.first, other.last); }
  };
  std::vector<Lane> lanes;
  for (size_t s = 0; s < segments.size(); s++) {
    const Segment& segment = segments[s];
    int64_t start = block * block_tokens, stop = std::min(segment.stop(), start + block_tokens), page = geometry.page_tokens;
    if (segment.first_partial < 0 || start >= stop) continue;
    lanes.push_back({int32_t(s), segment.table + start / page, segment.table + (stop - 1) / page + 1});
  }
  std::stable_sort(lanes.begin(), lanes.end());
  for (size_t first = 0, next; first < lanes.size(); first = next) {
    for (next = first + 1; next < lanes.size() && lanes[next] == lanes[first];) next++;
    shared_blocks.push_back({block, int64_t(members.size()), int64_t(next - first)});
    for (size_t lane = first; lane < next; lane++) members.push_back(lanes[lane].segment);
  }
}

void Routes::cut_tiles() {
  for (size_t s = 0; s < segments.size(); s++)
    for (int64_t first = 0; segments[s].first_partial < 0 && first < segments[s].rows; first += long_rows)
      row_tiles.push_back({int64_t(s), first, std::min(long_rows, segments[s].rows - first)});
  std::stable_sort(row_tiles.begin(), row_tiles.end(), [this](const RowTile& a, const RowTile& b) {
    return segments[size_t(a.segment)].first_position + a.first > segments[size_t(b.segment)].first_position + b.first;
  });
}

}  // namespace forkpoint
