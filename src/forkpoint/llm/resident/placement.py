"""In which order instructions run, for which rows, where their buffers lie, and where threads must wait for each other.

A program has three parts. The *body* runs over all rows and ends with the last layer's append: a pass that wants no logits stops there.
The *middle* is what the last attention needs beside it. The *tail* is everything after, row by row, so it runs over the wanted
rows alone, a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from forkpoint.llm.resident.instructions import Instruction, Kind, Listing, Opcode, Source
from forkpoint.llm.resident.layouts import View, row_major

TAIL_ROWS: Final = 64
"""Rows of a block of the tail."""

_ALIGNMENT: Final = 64
_REST: Final = 4
"""Instructions for which a buffer that nobody needs is not written again, so that fewer have to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A listing in the order it runs.

    Attributes:
        instructions: body, middle and tail, one after another.
        waits: for each instruction, whether threads wait for each other before it.
        body, middle: where the first two parts end.
        addresses: byte offset of each buffer's first row; 0 for other sources.
        num_bytes: of the memory that all buffers lie in.
    """

    instructions: tuple[Instruction, ...]
    sources: tuple[Source, ...]
    waits: tuple[bool, ...]
    body: int
    middle: int
    addresses: tuple[int, ...]
    num_bytes: int


def place(listing: Listing, *, max_rows: int) -> Placed:
    """Order, buffers and waits of a listing."""
    body, middle, tail = _parts(listing.instructions)
    sources = list(listing.sources)
    tail = _gathered(tail, {source for item in body + middle for source in _writes(item)}, sources)
    ends = len(body), len(body) + len(middle)
    everything = body + middle + tail
    addresses, num_bytes = _addresses(everything, sources, ends[1], max_rows)
    rows = [TAIL_ROWS if index >= ends[1] else max_rows for index in range(len(everything))]
    waits = _waits(everything, sources, addresses, rows, {0, *ends})
    return Placed(
        instructions=tuple(everything),
        sources=tuple(sources),
        waits=tuple(waits),
        body=ends[0],
        middle=ends[1],
        addresses=tuple(addresses),
        num_bytes=num_bytes,
    )


def _writes(instruction: Instruction) -> set[int]:
    return set() if instruction.output is None else {instruction.output.source}


def _needed(instructions: Sequence[Instruction], wanted: Iterable[int]) -> set[int]:
    """Indexes of instructions that the wanted ones need, themselves included."""
    found = set(wanted)
    sources: set[int] = set().union(*(instructions[index].reads for index in found)) if found else set()
    for index in range(max(found, default=-1), -1, -1):
        if index in found or _writes(instructions[index]) & sources:
            found.add(index)
            sources |= instructions[index].reads
    return found


def _parts(instructions: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction], list[Instruction]]:
    appends = [index for index, item in enumerate(instructions) if item.opcode == Opcode.APPEND]
    attends = [index for index, item in enumerate(instructions) if item.opcode == Opcode.ATTEND]
    body = _needed(instructions, appends)
    middle = _needed(instructions, appends + attends) - body
    tail = set(range(len(instructions))) - body - middle
    first, second, third = ([instructions[index] for index in sorted(part)] for part in (body, middle, tail))
    return first, second, third


def _gathered(tail: list[Instruction], outside: set[int], sources: list[Source]) -> list[Instruction]:
    """The tail over buffers of its own, into which the wanted rows of what it reads are gathered first."""
    crossing = sorted(
        {source for item in tail for source in item.reads if source in outside and sources[source].kind == Kind.BUFFER}
    )
    moved: dict[int, int] = {}
    gathers = []
    for source in crossing:
        sources.append(sources[source])
        moved[source] = len(sources) - 1
        whole = row_major(source, (-1, sources[source].width))
        gathers.append(Instruction(opcode=Opcode.GATHER, inputs=(whole,), output=replace(whole, source=moved[source])))

    def move(view: View) -> View:
        return replace(view, source=moved.get(view.source, view.source))

    return gathers + [Listing().map_views(move, item) for item in tail]


def _addresses(
    instructions: Sequence[Instruction], sources: Sequence[Source], tail: int, max_rows: int
) -> tuple[list[int], int]:
    """First fit by life: a buffer's bytes are free again after its last use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, item in enumerate(instructions):
        for source in item.reads | _writes(item):
            if sources[source].kind == Kind.BUFFER:
                first.setdefault(source, index)
                # A block of the tail is not the last: what it gathers from stays.
                last[source] = len(instructions) if index >= tail and first[source] < tail else index + _REST
    addresses = [0] * len(sources)
    taken: list[tuple[int, int, int]] = []
    total = 0
    for source in sorted(first, key=lambda item: first[item]):
        rows = TAIL_ROWS if first[source] >= tail else max_rows
        size = -(-rows * sources[source].width * sources[source].dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        taken = [span for span in taken if span[2] >= first[source]]
        addresses[source] = _fit([(start, stop) for start, stop, _ in taken], size)
        taken.append((addresses[source], addresses[source] + size, last[source]))
        total = max(total, addresses[source] + size)
    return addresses, total


def _fit(taken: list[tuple[int, int]], size: int) -> int:
    start = 0
    for low, high in sorted(taken):
        if low - start >= size:
            return start
        start = max(start, high)
    return start


def _waits(
    instructions: Sequence[Instruction],
    sources: Sequence[Source],
    addresses: Sequence[int],
    rows: Sequence[int],
    starts: set[int],
) -> list[bool]:
    """Threads wait before an instruction that touches what was written, or writes what was read, since they last did."""
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []
    waits = []
    for index, item in enumerate(instructions):

        def spans(touched: Iterable[int], index: int = index) -> list[tuple[int, int]]:
            return [
                (addresses[one], addresses[one] + rows[index] * sources[one].width * sources[one].dtype.itemsize)
                for one in touched
                if sources[one].kind == Kind.BUFFER
            ]

        own_reads, own_writes = spans(item.reads), spans(_writes(item))
        hazard = _overlap(own_reads + own_writes, writes) or _overlap(own_writes, reads)
        # Attention reads what its append wrote to the pages, and shares its scratch memory with the one before.
        wait = hazard or index in starts or item.opcode == Opcode.ATTEND
        if wait:
            reads, writes = [], []
        reads += own_reads
        writes += own_writes
        waits.append(wait)
    return waits


def _overlap(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)
