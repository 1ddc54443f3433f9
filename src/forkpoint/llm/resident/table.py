"""The page table of one lineage: an append-only list of page numbers with a mark, shared by the states that grew from each other.

A state of length n is a view of the first n tokens. Pages below the mark hold tokens of some live state and are never rewritten; rows
behind the mark belong to whoever reserved the table. Counts nothing but its own states: pages are counted by the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from forkpoint.llm.resident.base import Fetch
from forkpoint.llm.resident.pages import PageNumbers
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import CHUNK_TOKENS

_FIRST_ROOM: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChunk:
    """The id of a full chunk, and where its bytes can be had again; None where nobody promised that."""

    ref: ChunkRef
    fetch: Fetch | None


@final
class PageTable:
    """Pages of tokens ``[0, mark)``, and of reserved rows behind them.

    Attributes:
        mark: length of the longest live state.
        live: how many live states there are of each length.
        is_reserved: rows behind the mark are being written.
        users: passes and reads that need every page where it is.
        last_used: the owner's clock when a pass last used it.
        known: full chunks whose id is known, by (group, index).
        num_missing: pages that were evicted; their place holds -1.
    """

    __slots__ = ("_pages", "is_reserved", "known", "last_used", "live", "mark", "num_missing", "num_pages", "users")

    def __init__(self) -> None:
        self._pages: PageNumbers = np.empty(_FIRST_ROOM, dtype=np.int32)
        self.num_pages = 0
        self.num_missing = 0
        self.mark = 0
        self.live: dict[int, int] = {}
        self.is_reserved = False
        self.users = 0
        self.last_used = 0
        self.known: dict[tuple[int, int], KnownChunk] = {}

    @property
    def pages(self) -> PageNumbers:
        """Page numbers in order of position: a view, which later appends leave as it is."""
        return self._pages[: self.num_pages]

    def extend(self, pages: PageNumbers) -> None:
        """Put pages at the end."""
        stop = self.num_pages + len(pages)
        if stop > len(self._pages):
            grown = np.empty(max(stop, 2 * len(self._pages)), dtype=np.int32)
            grown[: self.num_pages] = self._pages[: self.num_pages]
            self._pages = grown
        self._pages[self.num_pages : stop] = pages
        self.num_pages = stop

    def cut(self, num_pages: int) -> PageNumbers:
        """Take off and return the pages from place ``num_pages`` on."""
        dropped = self.pages[num_pages:].copy()
        self.num_pages = num_pages
        self.num_missing -= int((dropped < 0).sum())
        return dropped

    def add_state(self, length: int) -> None:
        """A state of ``length`` tokens lives."""
        self.live[length] = self.live.get(length, 0) + 1
        self.mark = max(self.mark, length)

    def drop_state(self, length: int) -> None:
        """A state of ``length`` tokens died; the owner lowers the mark when it was told of all."""
        count = self.live[length] - 1
        if count:
            self.live[length] = count
        else:
            del self.live[length]

    def forget_cut_chunks(self) -> None:
        """Forget the ids of chunks that are not wholly below the mark: other tokens may be appended there.

        Not while pages are missing: the beginning of such a chunk may still have to be fetched. Nothing is appended before that.
        """
        full = self.mark // CHUNK_TOKENS
        if not self.num_missing:
            self.known = {place: chunk for place, chunk in self.known.items() if place[1] < full}

    def take_out(self, first: int, stop: int) -> PageNumbers:
        """Evict the pages at places ``[first, stop)``; returns them."""
        pages = self._pages[first:stop].copy()
        assert (pages >= 0).all()
        self._pages[first:stop] = -1
        self.num_missing += stop - first
        return pages

    def put_back(self, first: int, pages: PageNumbers) -> None:
        """Fill places that were evicted."""
        self._pages[first : first + len(pages)] = pages
        self.num_missing -= len(pages)

    def holds(self, num_pages: int) -> bool:
        """Whether the first ``num_pages`` pages are resident."""
        return self.num_missing == 0 or bool((self._pages[:num_pages] >= 0).all())
