// Copies between the canonical bytes of a chunk (keys and values `[layer, token, head, dim]`) and pages. Bits are moved, never computed with.
#pragma once
#include "routes.h"

namespace forkpoint {

// Tokens [start, start + count) of one lane, whose pages `table` names; the caller has checked that it leads to pages.
struct ChunkPlace {
  const int32_t* table;
  int64_t start, count;
};

void pages_from_chunk(const PageGeometry&, const ChunkPlace&, const void* keys, const void* values, void* pages);
void chunk_from_pages(const PageGeometry&, const ChunkPlace&, const void* pages, void* keys, void* values);

}  // namespace forkpoint
