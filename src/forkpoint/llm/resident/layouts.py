"""Where the elements of a value lie in the rows of a buffer, and what views do to that.

A value of a traced pass has one dimension that follows the number of rows. Every row of it lies in one row of a buffer; the other
dimensions are strides within the row. Views only change strides, so they cost nothing when a program runs. Knows no operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from forkpoint.llm.resident.tracing import Rows, Size, Unlowerable

ROW: Final = -1
"""Stands for the number of rows in the shape of a view."""


@dataclass(frozen=True, slots=True)
class View:
    """A value in the rows of a source.

    Attributes:
        source: number of the buffer, table or input it lies in.
        shape: sizes; at most one is ``ROW``. Without one, all rows read the same elements.
        strides: elements between neighbours within a row; 0 for the row dimension.
        offset: of the first element within a row.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def inner(self) -> tuple[tuple[int, int], ...]:
        """Size and stride of every dimension but the rows."""
        return tuple(pair for pair in zip(self.shape, self.strides, strict=True) if pair[0] != ROW)

    @property
    def width(self) -> int:
        """Elements in a row."""
        return prod(size for size, _ in self.inner)

    @property
    def is_contiguous(self) -> bool:
        """Whether a row's elements lie side by side in order."""
        return merged([self.inner]) in ([], [(self.width, (1,))])

    def narrow(self, dim: int, start: int, stop: int, step: int = 1) -> View:
        """Elements ``[start, stop)`` of a dimension; of the rows only all."""
        dim %= len(self.shape)
        size = self.shape[dim]
        if size == ROW:
            raise Unlowerable("layout", "a part of the rows is taken")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = -(-(stop - start) // step), strides[dim] * step
        return View(self.source, tuple(shape), tuple(strides), self.offset + start * self.strides[dim])

    def select(self, dim: int, index: int) -> View:
        """One element of a dimension, which goes."""
        dim %= len(self.shape)
        part = self.narrow(dim, index % self.shape[dim], index % self.shape[dim] + 1)
        return part.permute([place for place in range(len(self.shape)) if place != dim])

    def permute(self, order: Sequence[int]) -> View:
        """Dimensions in another order; those left out must be of size 1."""
        return replace(
            self, shape=tuple(self.shape[dim] for dim in order), strides=tuple(self.strides[dim] for dim in order)
        )

    def insert(self, dim: int) -> View:
        """A dimension of size 1."""
        dim %= len(self.shape) + 1
        return replace(
            self,
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            strides=(*self.strides[:dim], 0, *self.strides[dim:]),
        )

    def expand(self, shape: Sequence[int]) -> View:
        """Broadcast to a shape, ``ROW`` for the rows."""
        added = len(shape) - len(self.shape)
        old = zip((1,) * added + self.shape, (0,) * added + self.strides, strict=True)
        strides = tuple(stride if size == new else 0 for (size, stride), new in zip(old, shape, strict=True))
        return replace(self, shape=tuple(shape), strides=strides)

    def reshape(self, shape: Sequence[int]) -> View | None:
        """The same elements in another shape (``ROW`` for the rows), or None where that needs a copy.

        Raises:
            Unlowerable: ``layout`` where rows would be joined with another dimension.
        """
        if (ROW in self.shape) != (ROW in shape):
            raise Unlowerable("layout", "rows are joined with another dimension")
        if ROW in shape and _before(self.shape) != _before(shape):
            raise Unlowerable("layout", "rows trade places with another dimension")
        sizes = [size for size in shape if size != ROW]
        strides = _strides_of(merged([self.inner]), sizes)
        if strides is None:
            return None
        found = iter(strides)
        return replace(self, shape=tuple(shape), strides=tuple(0 if size == ROW else next(found) for size in shape))


def row_major(source: int, shape: Sequence[int]) -> View:
    """A view of a whole buffer, the dimensions other than the rows in order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(0 if size == ROW else step)
        step *= 1 if size == ROW else size
    return View(source, tuple(shape), tuple(reversed(strides)))


def sizes_of(shape: Sequence[Size], operation: str = "") -> tuple[int, ...]:
    """A traced shape with ``ROW`` for the rows. Raises Unlowerable ``layout`` for more than one, or for multiples of them."""
    rows = [size for size in shape if isinstance(size, Rows)]
    if len(rows) > 1 or any(size.times != 1 for size in rows):
        raise Unlowerable("layout", f"a value has the shape {shape}", operation=operation)
    return tuple(ROW if isinstance(size, Rows) else size for size in shape)


def merged(operands: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions of several views of one shape, joined where they follow one another in all of them, sizes of 1 left out."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for dims in zip(*operands, strict=True):
        size, strides = dims[0][0], tuple(stride for _, stride in dims)
        if size == 1:
            continue
        if found and all(outer == inner * size for outer, inner in zip(found[-1][1], strides, strict=True)):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found


def _before(shape: Sequence[int]) -> int:
    return prod(shape[: list(shape).index(ROW)])


def _strides_of(dims: list[tuple[int, tuple[int, ...]]], sizes: Sequence[int]) -> list[int] | None:
    """Strides of ``sizes`` over joined dimensions, last first; None where a size spans two of them."""
    left = list(dims)
    strides: list[int] = []
    room, step = 1, 0
    for size in reversed(sizes):
        if size == 1:
            strides.append(0)
            continue
        if room == 1:
            room, (step,) = left.pop()
        if room % size:
            return None
        strides.append(step)
        room, step = room // size, step * size
    return list(reversed(strides))
