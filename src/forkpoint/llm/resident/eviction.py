"""Which chunks may leave memory: those that can be fetched again, that nobody writes or reads now, least recently used first.

Pure decisions over page tables and counts; the owner of the pages carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.llm.resident.pages import PagePool
from forkpoint.llm.resident.table import KnownChunk, PageTable
from forkpoint.state.prefix import CHUNK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A full chunk that may be evicted from all the tables that hold it.

    Attributes:
        index: which chunk of those tables.
        num_pages: pages that become free.
        known: where its bytes can be had again, one a group.
        last_used: when any of its holders was last used.
    """

    index: int
    num_pages: int
    holders: tuple[PageTable, ...]
    known: tuple[KnownChunk, ...]
    last_used: int


def find_candidates(tables: Iterable[PageTable], pool: PagePool) -> list[Candidate]:
    """Chunks that may be evicted, the one to go first in front.

    A chunk may go when every table that refers to its pages is idle (no reservation, no reader), no reader pins them,
    and one of the tables knows for every group where the bytes can be had again: equal pages are equal bytes.
    """
    size = CHUNK_TOKENS // pool.page_tokens
    candidates = []
    for (index, pages), holders in _held_chunks(tables, size).items():
        known = _sources(holders, index, len(pool.tensors))
        numbers = np.frombuffer(pages, dtype=np.int32)
        if known and (pool.references[numbers] == len(holders)).all() and not pool.pins[numbers].any():
            last_used = max(table.last_used for table in holders)
            candidates.append(
                Candidate(index=index, num_pages=size, holders=tuple(holders), known=known, last_used=last_used)
            )
    return sorted(candidates, key=lambda candidate: (candidate.last_used, -candidate.index))


def choose(candidates: Sequence[Candidate], num_pages: int) -> list[Candidate]:
    """The first candidates that free ``num_pages`` pages; none at all where all together do not."""
    chosen: list[Candidate] = []
    missing = num_pages
    for candidate in candidates:
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.num_pages
    return chosen if missing <= 0 else []


def _held_chunks(tables: Iterable[PageTable], size: int) -> dict[tuple[int, bytes], list[PageTable]]:
    """Resident full chunks of idle tables by index and pages, ``size`` pages each, with the tables that hold them there."""
    found: dict[tuple[int, bytes], list[PageTable]] = {}
    if size == 0:  # one page holds more than a chunk
        return found
    for table in tables:
        if table.is_reserved or table.users:
            continue
        for index in range(table.mark // CHUNK_TOKENS):
            pages = table.pages[index * size : (index + 1) * size]
            if (pages >= 0).all():
                found.setdefault((index, pages.tobytes()), []).append(table)
    return found


def _sources(holders: Sequence[PageTable], index: int, num_groups: int) -> tuple[KnownChunk, ...]:
    """Where chunk ``index`` can be had again, one a group; nothing where some group has no source."""
    found = []
    for group in range(num_groups):
        known = (table.known.get((group, index)) for table in holders)
        source = next((chunk for chunk in known if chunk is not None and chunk.fetch is not None), None)
        if source is None:
            return ()
        found.append(source)
    return tuple(found)
