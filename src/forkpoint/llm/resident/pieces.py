"""How appends of any length are cut into passes. Pure: knows positions and lanes, no tokens and no states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from forkpoint.llm.resident.plan import MAX_ROWS
from forkpoint.state.prefix import CHUNK_TOKENS

PIECE_ROWS: Final = CHUNK_TOKENS
"""Rows of a piece at most. Pieces end where chunks do, so that a whole piece is a whole chunk."""


def cut_pieces(appends: Sequence[tuple[int, int]], *, shared: bool) -> Iterator[list[tuple[int, int, int]]]:
    """Cut appends into passes of at most 256 rows, in order; pieces end at absolute multiples of 256.

    Args:
        appends: (first position, number of tokens) of each lane.
        shared: whether pieces of different lanes may run in one pass.

    Yields:
        The pieces of a pass: (lane, first position, stop), no lane twice.
    """
    pieces = []
    for lane, (start, count) in enumerate(appends):
        position = start
        while position < start + count:
            stop = min(start + count, (position // PIECE_ROWS + 1) * PIECE_ROWS)
            pieces.append((lane, position, stop))
            position = stop
    batch: list[tuple[int, int, int]] = []
    for piece in pieces:
        rows = sum(stop - start for _, start, stop in batch) + piece[2] - piece[1]
        if batch and (not shared or rows > MAX_ROWS or batch[-1][0] == piece[0]):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
