"""The owner of the pages: every table, one lock, and the transactions that move pages between tables and the free list.

States that die enqueue a release and nothing more (that may happen inside garbage collection); the owner applies releases before it counts
anything. Leases are decided as a whole before the first page moves: a lease that does not fit changes nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, final

import numpy as np

from forkpoint.llm.resident.eviction import Candidate, choose, find_candidates
from forkpoint.llm.resident.growth import Growth, decide_growth
from forkpoint.llm.resident.occupancy import count_occupancy, pool_full
from forkpoint.llm.resident.pages import PageNumbers, PagePool
from forkpoint.llm.resident.table import KnownChunk, PageTable
from forkpoint.state.prefix import CHUNK_TOKENS

_Copy: TypeAlias = tuple[int, int, int]
"""Source page, target page, number of tokens."""


@final
class PageLedger:
    """Tables over one pool. Methods without an underscore take the lock; none is held while bytes of state are moved."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.releases: deque[tuple[PageTable, int]] = deque()
        self.abandoned: deque[PageTable] = deque()
        self._lock = threading.Lock()
        self._tables: set[PageTable] = set()
        self._clock = 0
        self._num_evicted = 0
        self._num_refilled = 0

    def register(self, table: PageTable, length: int) -> None:
        """A state of ``length`` tokens of a table was made. It ends with an entry in ``releases``."""
        with self._lock:
            self._tables.add(table)
            table.add_state(length)

    def grow(self, wanted: Sequence[tuple[PageTable, int, int]], *, in_place: bool = True) -> list[PageTable]:
        """Reserve rows ``[start, stop)`` after states of tables, all or nothing; the tables that now hold them, in order.

        Each returned table is reserved until ``keep`` or ``discard``. Two of the same state never share one. The caller is ``using`` the
        tables, and all pages of the states are resident.

        Raises:
            CapacityExceeded: ``capacity.pages``; nothing was reserved.
        """
        copies: list[_Copy] = []
        with self._lock:
            self._settle()
            growths = decide_growth(wanted, self.pool, in_place=in_place)
            self._clock += 1
            self._ensure_free(sum(growth.num_new for growth in growths))
            tables = [self._apply(growth, copies) for growth in growths]
        if copies:
            self._copy(copies, tables)
        return tables

    def stage(self, num_tokens: int) -> PageTable:
        """A reserved table of new pages for so many tokens, all of which are written before anybody sees it."""
        num_full, rest = divmod(num_tokens, self.pool.page_tokens)
        num_pages = num_full + (rest > 0)
        with self._lock:
            self._settle()
            self._ensure_free(num_pages)
            return self._new_table(self.pool.lease(num_pages, num_overwritten=num_full))

    def keep(self, table: PageTable, stop: int) -> None:
        """End a reservation: tokens ``[0, stop)`` are now those of a state, which is registered by this."""
        with self._lock:
            table.add_state(stop)
            table.is_reserved = False

    def discard(self, table: PageTable) -> None:
        """End a reservation: its rows are forgotten, its new pages given back."""
        with self._lock:
            self._close(table)

    def num_fitting(self, table: PageTable, start: int, lengths: Sequence[int]) -> int:
        """How many of these alternatives after ``start`` tokens of a table in use can have pages at the same time."""
        with self._lock:
            self._settle()
            size = self.pool.page_tokens
            missing = len(self._missing(table, start)) * CHUNK_TOKENS // size
            free = self.pool.num_free + sum(each.num_pages for each in self._candidates()) - missing
            for count, length in enumerate(lengths):
                free -= -(-(start + length) // size) - start // size
                if free < 0:
                    return count
            return len(lengths)

    @contextmanager
    def using(self, tables: Collection[PageTable]) -> Iterator[None]:
        """No page of ``tables`` is evicted while the block runs."""
        with self._lock:
            for table in tables:
                table.users += 1
        try:
            yield
        finally:
            with self._lock:
                for table in tables:
                    table.users -= 1

    @contextmanager
    def reading(self, table: PageTable, start: int, stop: int) -> Iterator[PageNumbers]:
        """The pages of tokens ``[0, stop)``, those of ``[start, stop)`` pinned while the block runs; -1 for one that is not resident."""
        with self._lock:
            pages = table.pages[: -(-stop // self.pool.page_tokens)].copy()
            pinned = pages[start // self.pool.page_tokens :]
            self.pool.pin(pinned)
        try:
            yield pages
        finally:
            with self._lock:
                self.pool.unpin(pinned)

    def missing_chunks(self, table: PageTable, length: int) -> list[int]:
        """Chunks of the first ``length`` tokens that are not resident, ascending."""
        with self._lock:
            return self._missing(table, length)

    def adopt(self, table: PageTable, staged: PageTable, chunks: Sequence[int]) -> None:
        """Put the pages of ``staged``, one chunk after another, where chunks were evicted from ``table``; end the staging."""
        size = CHUNK_TOKENS // self.pool.page_tokens
        with self._lock:
            for place, index in enumerate(chunks):
                first = index * size
                if first < table.num_pages and table.pages[first] < 0:
                    pages = staged.pages[place * size : (place + 1) * size][: table.num_pages - first]
                    table.put_back(first, pages)
                    self.pool.share(pages)
                    self._num_refilled += 1
            table.forget_cut_chunks()
            self._close(staged)

    def remember(self, table: PageTable, group: int, index: int, chunk: KnownChunk) -> None:
        """Note what is known of a full chunk; a source that was known stays."""
        with self._lock:
            before = table.known.get((group, index))
            if chunk.fetch is not None or before is None or before.fetch is None:
                table.known[group, index] = chunk

    def evict(self, num_pages: int | None, only: PageTable | None) -> int:
        """Evict chunks until ``num_pages`` pages were freed, or all that may go; returns how many pages became free."""
        with self._lock:
            self._settle()
            found = [each for each in self._candidates() if only is None or only in each.holders]
            chosen = found if num_pages is None else choose(found, num_pages) or found
            return sum(self._evict(each) for each in chosen)

    def figures(self) -> dict[str, int]:
        """What the pool holds, in pages and lineages."""
        with self._lock:
            self._settle()
            figures = {
                "chunks_evicted_ever": self._num_evicted,
                "chunks_refilled_ever": self._num_refilled,
                "pages_evictable": sum(each.num_pages for each in self._candidates()),
            }
            return count_occupancy(self.pool, self._tables) | figures

    def check(self) -> None:
        """Raises Corrupt ``corrupt.pool`` when counts and tables disagree."""
        with self._lock:
            self._settle()
            self.pool.check(table.pages for table in self._tables)

    def _missing(self, table: PageTable, length: int) -> list[int]:
        if table.num_missing == 0:
            return []
        pages = table.pages[: -(-length // self.pool.page_tokens)]
        size = CHUNK_TOKENS // self.pool.page_tokens
        return sorted({place // size for place in np.flatnonzero(pages < 0).tolist()})

    def _apply(self, growth: Growth, copies: list[_Copy]) -> PageTable:
        table = growth.table
        table.last_used = self._clock
        if not growth.in_place:
            return self._branch(table, growth.start, self.pool.lease(growth.num_new), copies)
        if growth.num_new:
            table.extend(self.pool.lease(growth.num_new))
        table.is_reserved = True
        return table

    def _branch(self, source: PageTable, length: int, pages: PageNumbers, copies: list[_Copy]) -> PageTable:
        """A reserved table that shares the full pages of ``source`` and has ``pages`` from there on; a partial one is to be copied."""
        full, rest = divmod(length, self.pool.page_tokens)
        shared = source.pages[:full]
        self.pool.share(shared)
        if rest:
            self.pool.pin(source.pages[full : full + 1])
            copies.append((int(source.pages[full]), int(pages[0]), rest))
        table = self._new_table(shared)
        table.extend(pages)
        table.mark, table.last_used = length, self._clock
        num_chunks = length // CHUNK_TOKENS
        table.known = {place: chunk for place, chunk in source.known.items() if place[1] < num_chunks}
        return table

    def _copy(self, copies: Sequence[_Copy], tables: Sequence[PageTable]) -> None:
        """Copy partial pages, which were pinned; what was reserved for them is given back on an error."""
        try:
            for source, target, num_tokens in copies:
                self.pool.copy_tokens(source, target, num_tokens)
        except BaseException:
            for table in tables:
                self.discard(table)
            raise
        finally:
            with self._lock:
                for source, _, _ in copies:
                    self.pool.unpin(np.array([source], dtype=np.int32))

    def _new_table(self, pages: PageNumbers) -> PageTable:
        table = PageTable()
        table.extend(pages)
        table.is_reserved = True
        self._tables.add(table)
        return table

    def _close(self, table: PageTable) -> None:
        table.is_reserved = False
        self._trim(table)

    def _settle(self) -> None:
        """Apply what was enqueued. New entries may come in meanwhile."""
        while self.abandoned:
            self._close(self.abandoned.popleft())
        touched = set()
        while self.releases:
            table, length = self.releases.popleft()
            table.drop_state(length)
            if length >= table.mark or not table.live:
                touched.add(table)
        for table in touched:
            self._trim(table)

    def _trim(self, table: PageTable) -> None:
        """Give back what is behind the longest live state; a table without any ends."""
        if table.is_reserved:
            return
        table.mark = max(table.live, default=0)
        keep = -(-table.mark // self.pool.page_tokens)
        if keep < table.num_pages:
            self.pool.release(table.cut(keep))
        table.forget_cut_chunks()
        if not table.live:
            self._tables.discard(table)
            if not self._tables:
                self.pool.check(())

    def _candidates(self) -> list[Candidate]:
        return find_candidates(self._tables, self.pool)

    def _evict(self, candidate: Candidate) -> int:
        size = candidate.num_pages
        freed = 0
        for table in candidate.holders:
            freed += self.pool.release(table.take_out(candidate.index * size, (candidate.index + 1) * size))
            for group, known in enumerate(candidate.known):
                table.known[group, candidate.index] = known
        self._num_evicted += 1
        return freed

    def _ensure_free(self, want: int) -> None:
        """Evict until ``want`` pages are free. Raises CapacityExceeded ``capacity.pages``, and then evicts nothing."""
        missing = want - self.pool.num_free
        if missing <= 0:
            return
        candidates = self._candidates()
        chosen = choose(candidates, missing)
        if not chosen:
            raise pool_full(self.pool, self._tables, want=want, evictable=sum(each.num_pages for each in candidates))
        for candidate in chosen:
            self._evict(candidate)
