"""Rows being appended to paged states: a transaction over all groups and layers, ended by exactly one of commit and abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from forkpoint.llm.resident.pages import PageNumbers
from forkpoint.llm.resident.table import PageTable
from forkpoint.state.prefix import CHUNK_TOKENS

if TYPE_CHECKING:
    from forkpoint.llm.resident.paged import PagedState


@final
class PagedReservation:
    """Rows ``[start, stop)`` being appended.

    Attributes:
        tables: for each group, the numbers of the pages of tokens ``[0, stop)``, ``int32``.
    """

    def __init__(self, base: PagedState, table: PageTable, stop: int) -> None:
        self.start = base.length
        self.stop = stop
        self.tables: tuple[PageNumbers, ...] = (table.pages,) * len(base.strategy.groups)
        self._base = base
        self._table = table
        self._is_open = True

    def commit(self, *, is_invariant: bool = False) -> PagedState:
        """Make the rows visible; where results do not depend on how rows were computed, every full chunk counts as prefilled."""
        self._end()
        base = self._base
        base.strategy.ledger.keep(self._table, self.stop)
        prefilled = count_prefilled(base.prefilled, self.start, self.stop, is_invariant=is_invariant)
        return base.strategy.state(self._table, self.stop, prefilled)

    def abort(self) -> None:
        """Give the rows back; the state is as before. Safe to call twice."""
        if self._is_open:
            self._end()
            self._base.strategy.ledger.discard(self._table)

    def __del__(self) -> None:
        if self._is_open:
            self._base.strategy.ledger.abandoned.append(self._table)

    def _end(self) -> None:
        assert self._is_open
        self._is_open = False


@final
class PagedBranches:
    """Owns the rows of alternatives, none of which is kept."""

    def __init__(self, branches: Sequence[PagedReservation]) -> None:
        self._branches = tuple(branches)

    def abort(self) -> None:
        """Give back all rows of all alternatives."""
        for branch in self._branches:
            branch.abort()


def count_prefilled(before: int, start: int, stop: int, *, is_invariant: bool) -> int:
    """Leading tokens that have the bits of any cold start, after rows ``[start, stop)`` were appended in one pass.

    Args:
        before: the same of the state of ``start`` tokens.
        is_invariant: bits do not depend on how rows were computed.
    """
    if is_invariant and before == start // CHUNK_TOKENS * CHUNK_TOKENS:
        return stop // CHUNK_TOKENS * CHUNK_TOKENS
    is_whole_piece = stop - start == CHUNK_TOKENS and before == start
    return stop if is_whole_piece else before
