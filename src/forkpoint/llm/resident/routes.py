"""What one forward pass computes, said by arrays alone: rows of (token, position, lane), and the pages each lane's state lies in.

Any number of lanes share a pass: each has a *segment* of rows, prefill or decode alike. Rows of no segment are padding, which
token-parallel layers compute and nothing keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forkpoint.llm.resident.base import Reservation

NO_PAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows ``[row, row + num_rows)`` of a pass: one lane's append."""

    row: int
    num_rows: int

    @property
    def rows(self) -> range:
        """Its rows."""
        return range(self.row, self.row + self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rows of one forward pass (docs/design/0011).

    Attributes:
        token_ids, positions: ``int64 [rows]``; padding is token 0 at position 0.
        routes: ``int64 [segments 3]``: first row, number of rows, first position.
        tables: for each state group ``int32 [segments pages]``, -1 where a lane has no more.
        segments: the same segments by name.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    routes: NDArray[np.int64]
    tables: tuple[NDArray[np.int32], ...]
    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return len(self.token_ids)

    def last_rows(self) -> NDArray[np.int64]:
        """The last row of every segment."""
        return np.array([segment.row + segment.num_rows - 1 for segment in self.segments], dtype=np.int64)

    def live_rows(self) -> NDArray[np.int64]:
        """Every row that is not padding."""
        return np.arange(sum(segment.num_rows for segment in self.segments))


def lay_out(lanes: Sequence[tuple[Sequence[int], Reservation]], *, min_rows: int = 1) -> Step:
    """Lay lanes' tokens end to end, padded up to ``min_rows`` rows."""
    segments: list[Segment] = []
    row = 0
    for tokens, reservation in lanes:
        assert len(tokens) == reservation.stop - reservation.start > 0
        segments.append(Segment(row=row, num_rows=len(tokens)))
        row += len(tokens)
    token_ids = np.zeros(max(row, min_rows), dtype=np.int64)
    positions = np.zeros(max(row, min_rows), dtype=np.int64)
    for segment, (tokens, reservation) in zip(segments, lanes, strict=True):
        rows = slice(segment.row, segment.row + segment.num_rows)
        token_ids[rows] = tokens
        positions[rows] = np.arange(reservation.start, reservation.stop)
    starts = [reservation.start for _, reservation in lanes]
    routes = [(segment.row, segment.num_rows, start) for segment, start in zip(segments, starts, strict=True)]
    return Step(
        token_ids=token_ids,
        positions=positions,
        routes=np.array(routes, dtype=np.int64),
        tables=_stacked([reservation.tables for _, reservation in lanes]),
        segments=tuple(segments),
    )


def _stacked(tables: Sequence[tuple[NDArray[np.int32], ...]]) -> tuple[NDArray[np.int32], ...]:
    """One array a group; lanes' tables one below the other, filled up to the longest."""
    stacked = []
    for group in zip(*tables, strict=True):
        rows = np.full((len(group), max(map(len, group))), NO_PAGE, dtype=np.int32)
        for row, pages in zip(rows, group, strict=True):
            row[: len(pages)] = pages
        stacked.append(rows)
    return tuple(stacked)
