"""A placed listing as the arrays that native code reads: one row of integers and one of numbers for each instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from forkpoint.llm.resident.instructions import DTYPES, Instruction, Kind, Opcode
from forkpoint.llm.resident.layouts import View, merged
from forkpoint.llm.resident.placement import Placed
from forkpoint.llm.resident.tracing import Unlowerable

_ELEMENTWISE = {Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.COPY}
_NOTHING = (int(Kind.NONE), 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Instructions in the form of ``native/program.cpp``.

    Attributes:
        integers: ``int64 [instructions 32]``: opcode, waits, outer, inner, four numbers, then three inputs and the output of six
            fields each (kind, address, row, outer and inner stride, dtype).
        numbers: ``float64 [instructions 2]``.
    """

    integers: NDArray[np.int64]
    numbers: NDArray[np.float64]


def encode(placed: Placed) -> Code:
    """Raises Unlowerable ``layout`` for operands that take more than two strides."""
    integers, numbers = [], []
    for instruction, waits in zip(placed.instructions, placed.waits, strict=True):
        outer, inner, operands = _operands(placed, instruction)
        extra = (*instruction.numbers, 0, 0, 0, 0)[:4]
        integers.append(
            [int(instruction.opcode), int(waits), outer, inner, *extra, *(field for one in operands for field in one)]
        )
        numbers.append((*instruction.scalars, 0.0, 0.0)[:2])
    return Code(integers=np.array(integers, dtype=np.int64), numbers=np.array(numbers, dtype=np.float64))


def _operands(placed: Placed, instruction: Instruction) -> tuple[int, int, list[tuple[int, ...]]]:
    """Outer and inner size, and the fields of three inputs and the output."""
    views = [*(*instruction.inputs, None, None, None)[:3], instruction.output]
    if instruction.opcode in _ELEMENTWISE:
        outer, inner, strides = _two_levels(views)
    else:
        outer, inner = _plain_sizes(instruction)
        strides = [(inner, 1)] * 4
    fields = [
        _NOTHING if view is None else _fields(placed, view, pair) for view, pair in zip(views, strides, strict=True)
    ]
    return outer, inner, fields


def _two_levels(views: Sequence[View | None]) -> tuple[int, int, list[tuple[int, int]]]:
    """Sizes, and the outer and inner strides of each view."""
    present = [view for view in views if view is not None]
    dims = merged([view.inner for view in present]) or [(1, (1,) * len(present))]
    if len(dims) > 2:
        raise Unlowerable("layout", f"operands lie in {len(dims)} strides")
    if len(dims) == 1:
        dims = [(1, (0,) * len(present)), *dims]
    (outer, outer_strides), (inner, inner_strides) = dims
    pairs = iter(zip(outer_strides, inner_strides, strict=True))
    return outer, inner, [(0, 0) if view is None else next(pairs) for view in views]


def _plain_sizes(instruction: Instruction) -> tuple[int, int]:
    """Outer and inner size of an instruction whose rows lie side by side."""
    if instruction.opcode == Opcode.APPEND:
        return 1, 0
    view = instruction.output
    assert view is not None
    if instruction.opcode in (Opcode.RMS_NORM, Opcode.LAYER_NORM, Opcode.ROTARY):
        sizes = [size for size, _ in view.inner]
        return prod(sizes[:-1]), sizes[-1]
    return 1, view.width


def _fields(placed: Placed, view: View, strides: tuple[int, int]) -> tuple[int, ...]:
    source = placed.sources[view.source]
    address = placed.addresses[view.source]
    if source.tensor is not None:
        address = source.tensor.data_ptr()
    if source.kind == Kind.LOGITS:
        address = view.offset
    else:
        address += view.offset * source.dtype.itemsize
    row = 0 if source.kind == Kind.CONSTANT else source.width
    return (int(source.kind), address, row, *strides, DTYPES[source.dtype])
