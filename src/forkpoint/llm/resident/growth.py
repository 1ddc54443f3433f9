"""How appends to several tables will be served: in place, or in a table of their own. Decisions only; the ledger carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forkpoint.llm.resident.pages import PagePool
from forkpoint.llm.resident.table import PageTable


class Growth(NamedTuple):
    """How rows are to be appended after the first ``start`` tokens of ``table``.

    Attributes:
        in_place: they go behind the table's mark; else into a table of their own that shares all full pages.
        num_new: pages to be leased.
    """

    table: PageTable
    start: int
    in_place: bool
    num_new: int


def decide_growth(
    wanted: Sequence[tuple[PageTable, int, int]], pool: PagePool, *, in_place: bool = True
) -> list[Growth]:
    """How rows ``[start, stop)`` go behind the first ``start`` tokens of each table.

    A table takes one append in place; if it is wanted again, that is a fork. Without ``in_place`` all are.
    """
    taken: set[PageTable] = set()
    growths = []
    for table, start, stop in wanted:
        stays = in_place and table not in taken and may_append(table, start, pool)
        if stays:
            taken.add(table)
        have = table.num_pages if stays else start // pool.page_tokens
        growths.append(Growth(table, start, stays, -(-stop // pool.page_tokens) - have))
    return growths


def may_append(table: PageTable, start: int, pool: PagePool) -> bool:
    """Whether ``start`` is the end of a table that nobody appends to, and its last page is nobody else's.

    The last page may be shared, though only full pages are: the mark of this table may since have fallen below the page's end.
    """
    if table.mark != start or table.is_reserved:
        return False
    return start % pool.page_tokens == 0 or bool(pool.references[table.pages[-1]] == 1)
