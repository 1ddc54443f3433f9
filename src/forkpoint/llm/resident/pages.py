"""The page pool: which pages are free, and how often each is used. The one owner of reference counts and of the free list.

A page number stands for 'the same tokens' in every state group, so one page table serves all groups. Pages are handed out zeroed: what a
freed page held can reach nobody. Knows nothing of continuations; its callers hold one lock around everything that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import Corrupt, Error, InvalidInput
from forkpoint.llm.kernels.geometry import PageGeometry
from forkpoint.llm.resident.arena import Arena, available_bytes
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.state.prefix import CHUNK_TOKENS

PageNumbers = NDArray[np.int32]
PageSize = int | Literal["contiguous"]

PAGE_SIZES: Final = (16, 32, 64, 128, 256)
DEFAULT_PAGE_TOKENS: Final = 16
DEFAULT_SHARE: Final = 0.25
"""Share of the memory that is free at load which a pool may grow to, unless a budget is given."""


@final
class PagePool:
    """``num_pages`` pages of ``page_tokens`` tokens in every group.

    Attributes:
        tensors: one a group, ``[pages, layers, elements]`` (docs/design/0011); their addresses never change.
        references: how many page tables hold each page.
        pins: how many readers hold each page beside its tables.
    """

    def __init__(self, groups: Sequence[GroupSpec], *, page_tokens: int, num_pages: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.arenas = tuple(Arena(geometry_of(group, page_tokens), num_pages, device) for group in groups)
        self.tensors: tuple[Tensor, ...] = tuple(arena.tensor for arena in self.arenas)
        self.references = np.zeros(num_pages, dtype=np.int32)
        self.pins = np.zeros(num_pages, dtype=np.int32)
        self._freed: list[int] = []
        self._num_touched = 0  # pages from here on were never handed out: still zero, not yet backed by memory

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all groups."""
        return sum(arena.geometry.page_bytes for arena in self.arenas)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self.num_pages - self._num_touched + len(self._freed)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return self._num_touched - len(self._freed)

    def lease(self, count: int, *, num_overwritten: int = 0) -> PageNumbers:
        """``count`` zeroed pages with one reference each. The caller has made sure that so many are free.

        The first ``num_overwritten`` are not zeroed: the caller writes every byte of them before anybody else can name them, or gives
        them back.
        """
        assert count <= self.num_free
        taken = [self._take() for _ in range(count)]
        for page, was_used in taken[num_overwritten:]:
            if was_used:
                self._clear(page)
        leased = np.array([page for page, _ in taken], dtype=np.int32)
        self.references[leased] = 1
        return leased

    def share(self, pages: PageNumbers) -> None:
        """Add a reference to each of ``pages``, all different."""
        self.references[pages] += 1

    def release(self, pages: PageNumbers) -> int:
        """Take a reference from each of ``pages``, all different; returns how many became free. -1 stands for no page."""
        pages = pages[pages >= 0]
        self.references[pages] -= 1
        return self._collect(pages)

    def pin(self, pages: PageNumbers) -> None:
        """Keep ``pages`` as they are for a reader, whatever becomes of the tables that hold them. -1 stands for no page."""
        self.pins[pages[pages >= 0]] += 1

    def unpin(self, pages: PageNumbers) -> None:
        """End what ``pin`` began."""
        pages = pages[pages >= 0]
        self.pins[pages] -= 1
        self._collect(pages)

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a page, in every group."""
        for arena in self.arenas:
            arena.copy_tokens(source, target, count)

    def check(self, tables: Iterable[PageNumbers]) -> None:
        """Compare every count with what ``tables``, all there are, say.

        Raises:
            Corrupt: ``corrupt.pool``: a page is lost, held twice, or counted wrongly.
        """
        counted = np.zeros(self.num_pages, dtype=np.int32)
        for pages in tables:
            np.add.at(counted, pages[pages >= 0], 1)
        if (wrong := np.flatnonzero(counted != self.references)).size:
            page = int(wrong[0])
            raise _damaged(
                f"page {page} has {self.references[page]} references where tables hold it {counted[page]} times"
            )
        freed = np.array(self._freed, dtype=np.int64)
        held = (self.references > 0) | (self.pins > 0)
        if np.unique(freed).size != freed.size or held[freed].any() or held[self._num_touched :].any():
            raise _damaged("a page is free twice, or free and held")
        if int(held.sum()) + self.num_free != self.num_pages:
            raise _damaged(f"{held.sum()} held and {self.num_free} free pages are not {self.num_pages}")

    def _take(self) -> tuple[int, bool]:
        """A free page, and whether it may hold something."""
        if self._freed:
            return self._freed.pop(), True
        self._num_touched += 1
        return self._num_touched - 1, False

    def _clear(self, page: int) -> None:
        for arena in self.arenas:
            arena.clear(page)

    def _collect(self, pages: PageNumbers) -> int:
        freed: list[int] = pages[(self.references[pages] == 0) & (self.pins[pages] == 0)].tolist()
        self._freed.extend(reversed(freed))
        return len(freed)


def geometry_of(group: GroupSpec, page_tokens: int) -> PageGeometry:
    """How pages of a group are laid out."""
    return PageGeometry(
        page_tokens=page_tokens,
        num_layers=len(group.layers),
        heads=group.num_heads,
        key_dim=group.key_dim,
        value_dim=group.value_dim,
        dtype=group.dtype,
    )


def check_page_size(page_size: PageSize, max_context: int) -> int:
    """Tokens of a page; ``contiguous`` is one page that holds the longest context.

    Raises:
        InvalidInput: ``invalid_input.page_tokens`` for a size that does not divide a chunk into whole tiles.
    """
    if page_size == "contiguous":
        return -(-max_context // CHUNK_TOKENS) * CHUNK_TOKENS
    if type(page_size) is not int or page_size not in PAGE_SIZES:
        raise InvalidInput(
            f"a page of {page_size!r} tokens does not fit a chunk; use one of {PAGE_SIZES} or 'contiguous'",
            code="page_tokens",
            page_tokens=str(page_size),
        )
    return page_size


def count_pages(
    groups: Sequence[GroupSpec], *, page_tokens: int, max_context: int, pool_bytes: int | None, device: torch.device
) -> int:
    """Pages that a budget pays for. Without one it is a quarter of the free memory, and at least one context.

    Raises:
        InvalidInput: ``invalid_input.pool_bytes`` for a budget below one context.
    """
    page_bytes = page_tokens * sum(group.token_bytes for group in groups)
    least = -(-max_context // page_tokens)
    if pool_bytes is None:
        return max(int(available_bytes(device) * DEFAULT_SHARE) // max(1, page_bytes), least)
    if isinstance(pool_bytes, bool) or not isinstance(pool_bytes, int) or pool_bytes < least * page_bytes:
        raise InvalidInput(
            f"pool_bytes={pool_bytes!r} holds no context of {max_context} tokens, which takes {least * page_bytes} bytes; "
            "raise it or lower max_context",
            code="pool_bytes",
            have=str(pool_bytes),
            want=least * page_bytes,
        )
    return pool_bytes // page_bytes


def _damaged(why: str) -> Error:
    return Corrupt(f"the page pool is not sound: {why}; please report this", code="pool")
