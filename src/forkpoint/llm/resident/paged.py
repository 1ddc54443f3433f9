"""The paged strategy: states over shared pages, appended by transactions, restored and evicted by chunks.

A state is a view of the first tokens of a page table. The longest state of a table goes on in place; another one goes on in a table of its
own that shares all full pages and has a copy of the partial one. With pages of the maximum length this is the contiguous strategy.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Final, final

import torch

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.ids import Bytes
from forkpoint.llm.resident.base import Fetch, GroupSpec, beyond_context
from forkpoint.llm.resident.ledger import PageLedger
from forkpoint.llm.resident.pages import (
    DEFAULT_PAGE_TOKENS,
    PagePool,
    PageSize,
    check_page_size,
    count_pages,
)
from forkpoint.llm.resident.reservation import PagedBranches, PagedReservation
from forkpoint.llm.resident.table import KnownChunk, PageTable
from forkpoint.llm.resident.transfer import PagedRestoration, layer_pieces, read_slabs, refill
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import CHUNK_TOKENS


@final
class PagedState:
    """Tokens ``[0, length)`` of a page table; see ``State``. Its end is enqueued and applied later, by the owner of the pages."""

    __slots__ = ("__weakref__", "length", "prefilled", "strategy", "table")

    def __init__(self, strategy: PagedStrategy, table: PageTable, length: int, prefilled: int) -> None:
        """Only the strategy makes states: it has told the ledger of this one."""
        self.strategy = strategy
        self.table = table
        self.length: Final = length
        self.prefilled: Final = prefilled

    def __del__(self) -> None:
        self.strategy.ledger.releases.append((self.table, self.length))

    @property
    def is_resident(self) -> bool:
        """Whether every page is in memory. Using a state that is not makes it so."""
        return self.table.holds(-(-self.length // self.strategy.page_size))

    def prefix(self, length: int) -> PagedState:
        """The state of the first ``length`` tokens, sharing the table."""
        assert 0 <= length <= self.length
        prefilled = min(self.prefilled, length // CHUNK_TOKENS * CHUNK_TOKENS)
        self.strategy.ledger.register(self.table, length)
        return PagedState(self.strategy, self.table, length, prefilled)

    def reserve(self, num_rows: int) -> PagedReservation:
        """See ``PagedStrategy.reserve_many``."""
        return self.strategy.reserve_many([(self, num_rows)])[0]

    def reserve_branches(self, lengths: Sequence[int]) -> tuple[PagedBranches, list[PagedReservation]]:
        """Alternatives of ``lengths`` tokens after this state, each in pages of its own; none is kept."""
        return self.strategy.reserve_branches(self, lengths)

    def slab_pieces(self, group: int, start: int, stop: int) -> tuple[Sequence[Bytes], Sequence[Bytes]]:
        """Canonical bytes of keys and of values of ``[start, stop)``, one piece a layer; no pass waits while they are copied."""
        assert stop <= self.length
        if stop <= start:
            return [], []
        keys, values = read_slabs(self.strategy.ledger, self.table, group, start, stop)
        return layer_pieces(keys), layer_pieces(values)

    def chunk_ref(self, group: int, index: int) -> ChunkRef | None:
        """The stored chunk that holds full chunk ``index``, if it was ever hashed."""
        known = self.table.known.get((group, index))
        return None if known is None else known.ref

    def remember_chunk(self, group: int, index: int, ref: ChunkRef, fetch: Fetch | None = None) -> None:
        """Note the id of full chunk ``index`` and, where it is durable, how to read it again: then it may be evicted."""
        assert (index + 1) * CHUNK_TOKENS <= self.length
        self.strategy.ledger.remember(self.table, group, index, KnownChunk(ref=ref, fetch=fetch))


@final
class PagedStrategy:
    """States in pages of one pool on one device, at most ``max_context`` tokens each.

    Args:
        page_size: tokens of a page: 16, 32, 64, 128 or 256; or ``contiguous``, one page that holds the longest context.
        pool_bytes: what pages may take in all; by default a quarter of the memory that is free now.

    Attributes:
        pages: for each group the tensor that holds its pages, ``[pages, layers, elements]``; never replaced.

    Raises:
        InvalidInput: ``invalid_input.page_tokens``, ``invalid_input.pool_bytes`` or ``invalid_input.dtype``.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        max_context: int,
        device: torch.device,
        page_size: PageSize = DEFAULT_PAGE_TOKENS,
        pool_bytes: int | None = None,
    ) -> None:
        self.kind = "contiguous" if page_size == "contiguous" else "paged"
        self.groups = tuple(groups)
        self.max_context = max_context
        self.page_size = check_page_size(page_size, max_context)
        num_pages = count_pages(
            groups, page_tokens=self.page_size, max_context=max_context, pool_bytes=pool_bytes, device=device
        )
        pool = PagePool(groups, page_tokens=self.page_size, num_pages=num_pages, device=device)
        self.ledger = PageLedger(pool)
        self.pages = pool.tensors

    def empty(self) -> PagedState:
        """The state of no tokens; it holds no pages."""
        table = PageTable()
        self.ledger.register(table, 0)
        return PagedState(self, table, 0, 0)

    def reserve_many(self, wanted: Sequence[tuple[PagedState, int]]) -> list[PagedReservation]:
        """Reserve rows after several states for one pass, all or nothing; states that are not resident become so.

        Raises:
            CapacityExceeded: ``capacity.context`` or ``capacity.pages``. InvalidInput: ``invalid_input.engine`` for a state of another
                strategy. NotFound, Corrupt: from the source of an evicted chunk. Nothing was reserved then.
        """
        return self._reserve(wanted, in_place=True)

    def reserve_branches(
        self, state: PagedState, lengths: Sequence[int]
    ) -> tuple[PagedBranches, list[PagedReservation]]:
        """See ``State.reserve_branches``."""
        branches = self._reserve([(state, length) for length in lengths], in_place=False)
        return PagedBranches(branches), branches

    def num_fitting_branches(self, state: PagedState, lengths: Sequence[int]) -> int:
        """How many of these alternatives, from the first on, can be reserved at the same time; 0 where not even one can."""
        with self.ledger.using([state.table]):
            return self.ledger.num_fitting(state.table, state.length, lengths)

    def restore(self, length: int, fetch: Fetch | None = None) -> PagedRestoration[PagedState]:
        """Begin to fill new pages. With ``fetch`` the chunks can be read again, so the state may be evicted.

        Raises:
            CapacityExceeded: ``capacity.context`` or ``capacity.pages``.
        """
        if length > self.max_context:
            raise beyond_context(length, self.max_context)
        return PagedRestoration(self.ledger, length, fetch, self.state)

    def state(self, table: PageTable, length: int, prefilled: int) -> PagedState:
        """A state that the ledger was told of already: when rows were kept or a restoration finished."""
        return PagedState(self, table, length, prefilled)

    def evict(self, num_pages: int | None = None, *, state: PagedState | None = None) -> int:
        """Let go of chunks that can be fetched again, least recently used first, until ``num_pages`` are free or all that may go are.

        With ``state``, only chunks that it holds. Returns how many pages became free.
        """
        return self.ledger.evict(num_pages, None if state is None else state.table)

    def num_resident_bytes(self) -> int:
        """Bytes of the pages that live states hold."""
        return self.ledger.figures()["pages_held"] * self.ledger.pool.page_bytes

    def num_lineages(self) -> int:
        """Page tables that live states hold."""
        return self.ledger.figures()["lineages"]

    def stats(self) -> dict[str, int]:
        """Pages free, held, evictable and evicted, lineages, and what was evicted and brought back so far."""
        return self.ledger.figures()

    def check(self) -> None:
        """Compare every count with the page tables. Raises Corrupt ``corrupt.pool``."""
        self.ledger.check()

    def _reserve(self, wanted: Sequence[tuple[PagedState, int]], *, in_place: bool) -> list[PagedReservation]:
        """As :meth:`_reserve_now`; before a full pool is an error, states that only garbage still refers to are let go of."""
        try:
            return self._reserve_now(wanted, in_place=in_place)
        except CapacityExceeded as error:
            if error.code != "capacity.pages":
                raise
        gc.collect()  # for one, an error that was caught keeps the values of its frames in a cycle
        return self._reserve_now(wanted, in_place=in_place)

    def _reserve_now(self, wanted: Sequence[tuple[PagedState, int]], *, in_place: bool) -> list[PagedReservation]:
        if any(state.strategy is not self for state, _ in wanted):
            raise InvalidInput(
                "a state of another engine cannot go on in this one; commit and check it out", code="engine"
            )
        asked = [(state.table, state.length, state.length + num_rows) for state, num_rows in wanted]
        for _, _, stop in asked:
            if stop > self.max_context:
                raise beyond_context(stop, self.max_context)
        with self.ledger.using([table for table, _, _ in asked]):
            for table, length, _ in asked:
                if table.num_missing:
                    refill(self.ledger, table, length)
            tables = self.ledger.grow(asked, in_place=in_place)
        return [
            PagedReservation(state, table, stop)
            for (state, _), table, (_, _, stop) in zip(wanted, tables, asked, strict=True)
        ]
