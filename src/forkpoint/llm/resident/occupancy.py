"""What the pool is full of, for people: figures, and the error that says what would free space."""

from __future__ import annotations

from collections.abc import Collection

from forkpoint.errors import CapacityExceeded
from forkpoint.llm.resident.pages import PagePool
from forkpoint.llm.resident.table import PageTable


def count_occupancy(pool: PagePool, tables: Collection[PageTable]) -> dict[str, int]:
    """Pages in all, free, held and evicted, and the lineages that hold them."""
    return {
        "lineages": len(tables),
        "pages": pool.num_pages,
        "pages_evicted": sum(table.num_missing for table in tables),
        "pages_free": pool.num_free,
        "pages_held": pool.num_held,
    }


def pool_full(pool: PagePool, tables: Collection[PageTable], *, want: int, evictable: int) -> CapacityExceeded:
    """The error for a lease that does not fit: what holds the pages, and what would free some."""
    in_use = int(sum(len(table.pages) for table in tables if table.is_reserved or table.users))
    return CapacityExceeded(
        f"free pages needed: {want} ({pool.page_tokens} tokens each); of {pool.num_pages} there are {pool.num_free} free and "
        f"{evictable} that could be evicted, {pool.num_held} are held by {len(tables)} lineages. To free some: close or let go "
        "of continuations, commit them so that they can be evicted, wait for running passes, or load with a larger pool_bytes",
        code="pages",
        want=want,
        have=pool.num_pages,
        free=pool.num_free,
        evictable=evictable,
        held=pool.num_held,
        in_use=in_use,
        lineages=len(tables),
    )
