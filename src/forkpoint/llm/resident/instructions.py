"""What a program consists of: sources of rows, and instructions that read and write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from forkpoint.llm.resident.layouts import View

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in native code."""


class Opcode(IntEnum):
    """Kernels, with the numbers that ``native/program.cpp`` knows them by."""

    EMBED = 0
    LOOKUP = 1
    DENSE = 2
    RMS_NORM = 3
    LAYER_NORM = 4
    ACTIVATION = 5
    ACTIVATION_PRODUCT = 6
    ADD = 7
    SUBTRACT = 8
    MULTIPLY = 9
    DIVIDE = 10
    COPY = 11
    ROTARY = 12
    APPEND = 13
    ATTEND = 14
    GATHER = 15


class Kind(IntEnum):
    """What a source is: memory of the pass, the same bytes for every row, a row for each position, or the result."""

    NONE = 0
    BUFFER = 1
    CONSTANT = 2
    TABLE = 3
    LOGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows lie.

    Attributes:
        width: elements of a row.
        tensor: of constants and tables (``[positions width]``).
    """

    kind: Kind
    width: int
    dtype: torch.dtype
    tensor: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One kernel call.

    Attributes:
        inputs: what it reads; None where an optional input is not given.
        output: what it writes; None for an append.
        numbers, scalars: further arguments, as the opcode wants them.
    """

    opcode: Opcode
    inputs: tuple[View | None, ...]
    output: View | None
    numbers: tuple[int, ...] = ()
    scalars: tuple[float, ...] = ()

    @property
    def reads(self) -> set[int]:
        """Sources it reads."""
        return {view.source for view in self.inputs if view is not None}


@dataclass(slots=True)
class Listing:
    """A program under construction: instructions are only added, sources are only added."""

    sources: list[Source] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)

    def add_source(self, source: Source) -> int:
        """Number a source."""
        self.sources.append(source)
        return len(self.sources) - 1

    def map_views(self, apply: Callable[[View], View], instruction: Instruction) -> Instruction:
        """An instruction over other views."""
        return Instruction(
            opcode=instruction.opcode,
            inputs=tuple(None if view is None else apply(view) for view in instruction.inputs),
            output=None if instruction.output is None else apply(instruction.output),
            numbers=instruction.numbers,
            scalars=instruction.scalars,
        )
