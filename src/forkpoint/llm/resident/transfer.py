"""Between chunks of 256 tokens and pages: restoring a state, bringing evicted chunks back, reading canonical bytes.

A chunk was verified by whoever fetched it before its first byte is copied. Bytes go straight between a chunk and its pages; nothing is
visible before all have arrived, and what fails gives its pages back. Reading pins pages and holds no lock while it copies: no pass waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import Corrupt
from forkpoint.ids import Bytes
from forkpoint.llm.kernels.transfer import gather_chunk, scatter_chunk
from forkpoint.llm.resident.base import Fetch
from forkpoint.llm.resident.ledger import PageLedger
from forkpoint.llm.resident.pages import PageNumbers
from forkpoint.llm.resident.table import KnownChunk, PageTable
from forkpoint.state.chunk import Chunk
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import CHUNK_TOKENS

Slabs = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Keys and values as bytes, ``[layers tokens bytes_of_a_token]`` each."""

_State = TypeVar("_State")


@final
class PagedRestoration(Generic[_State]):
    """A table being filled. Chunks touch disjoint tokens, so threads need no lock. Dropping it unfinished gives the pages back."""

    def __init__(
        self, ledger: PageLedger, length: int, fetch: Fetch | None, make: Callable[[PageTable, int, int], _State]
    ) -> None:
        self._ledger = ledger
        self._length = length
        self._fetch = fetch
        self._make = make
        self._is_open = False
        self._table = ledger.stage(length)
        self._is_open = True

    def write_chunk(self, group: int, start: int, chunk: Chunk, ref: ChunkRef) -> None:
        """Copy one parsed and checked chunk to its tokens' pages."""
        count = chunk.specs["k"].shape[1]
        write_slabs(self._ledger, self._table.pages, group, start, chunk)
        if count == CHUNK_TOKENS and start % CHUNK_TOKENS == 0:
            self._table.known[group, start // CHUNK_TOKENS] = KnownChunk(ref=ref, fetch=self._fetch)

    def finish(self, *, prefilled: int) -> _State:
        """The restored state."""
        assert self._is_open
        self._is_open = False
        self._ledger.keep(self._table, self._length)
        return self._make(self._table, self._length, prefilled)

    def abort(self) -> None:
        """Give the pages back; nothing has changed. Safe to call twice, and after ``finish``."""
        if self._is_open:
            self._is_open = False
            self._ledger.discard(self._table)

    def __del__(self) -> None:
        if self._is_open:
            self._ledger.abandoned.append(self._table)


def write_slabs(ledger: PageLedger, pages: PageNumbers, group: int, start: int, chunk: Chunk) -> None:
    """Copy a chunk's keys and values to tokens ``start`` on of a table."""
    pool, count = ledger.pool, chunk.specs["k"].shape[1]
    keys, values = chunk.slabs["k"], chunk.slabs["v"]
    scatter_chunk(pool.tensors[group], pages, start, count, keys, values, pool.arenas[group].geometry)


def read_slabs(ledger: PageLedger, table: PageTable, group: int, start: int, stop: int) -> Slabs:
    """Canonical bytes of tokens ``[start, stop)``, which must be below the mark. Evicted chunks are read from their source.

    Raises:
        NotFound, Corrupt: what the source of an evicted chunk raises.
    """
    with ledger.reading(table, start, stop) as pages:
        borders = [start, *range((start // CHUNK_TOKENS + 1) * CHUNK_TOKENS, stop, CHUNK_TOKENS), stop]
        if (pages[start // ledger.pool.page_tokens :] >= 0).all():
            borders = [start, stop]
        parts = [_read_part(ledger, table, pages, group, *ends) for ends in pairwise(borders)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([keys for keys, _ in parts], axis=1), np.concatenate([values for _, values in parts], axis=1)


def _read_part(ledger: PageLedger, table: PageTable, pages: PageNumbers, group: int, start: int, stop: int) -> Slabs:
    pool, geometry = ledger.pool, ledger.pool.arenas[group].geometry
    if pages[start // pool.page_tokens] >= 0:
        keys, values = gather_chunk(pool.tensors[group], pages, start, stop - start, geometry)
        shape = (geometry.num_layers, stop - start, -1)
        return keys.reshape(shape), values.reshape(shape)
    index = start // CHUNK_TOKENS
    chunk = fetch_chunk(table.known[group, index])
    inside = slice(start - index * CHUNK_TOKENS, stop - index * CHUNK_TOKENS)
    slabs = (np.frombuffer(chunk.slabs[name], dtype=np.uint8) for name in ("k", "v"))
    keys, values = (slab.reshape(geometry.num_layers, CHUNK_TOKENS, -1)[:, inside] for slab in slabs)
    return keys, values


def layer_pieces(slab: NDArray[np.uint8]) -> Sequence[Bytes]:
    """One piece of bytes a layer."""
    return [np.ascontiguousarray(layer).reshape(-1).data for layer in slab]


def refill(ledger: PageLedger, table: PageTable, length: int) -> None:
    """Bring back evicted chunks of the first ``length`` tokens. The caller is using the table.

    Raises:
        CapacityExceeded: ``capacity.pages``. NotFound, Corrupt: what a chunk's source raises. The table is as before then.
    """
    chunks = ledger.missing_chunks(table, length)
    if not chunks:
        return
    staged = ledger.stage(len(chunks) * CHUNK_TOKENS)
    try:
        for place, index in enumerate(chunks):
            for group in range(len(ledger.pool.tensors)):
                chunk = fetch_chunk(table.known[group, index])
                write_slabs(ledger, staged.pages, group, place * CHUNK_TOKENS, chunk)
    except BaseException:
        ledger.discard(staged)
        raise
    ledger.adopt(table, staged, chunks)


def fetch_chunk(known: KnownChunk) -> Chunk:
    """An evicted chunk, verified by its source. Raises Corrupt ``corrupt.chunk`` when it covers other tokens than its id promised."""
    assert known.fetch is not None
    chunk = known.fetch(known.ref)
    if chunk.domain != known.ref.domain:
        message = f"chunk {known.ref.chunk_id} covers {chunk.domain}, not {known.ref.domain}; fetch it from elsewhere"
        raise Corrupt(message, code="chunk", id=known.ref.chunk_id)
    return chunk
