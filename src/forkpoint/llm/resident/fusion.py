"""Groups of operations that one instruction does: rotary embedding, of the whole of a head or of its first part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from forkpoint.llm.resident.instructions import Instruction, Opcode
from forkpoint.llm.resident.layouts import ROW, View
from forkpoint.llm.resident.tracing import Node, Value


class Lookup(Protocol):
    """What a pattern may ask about the operations lowered so far."""

    def view(self, value: Value) -> View:
        """Where a value lies."""
        ...

    def maker(self, value: object) -> Node | None:
        """The operation that made a value."""
        ...

    def is_table(self, value: object) -> bool:
        """Whether a value depends on positions alone."""
        ...

    def written_by(self, view: View) -> Instruction | None:
        """The instruction that last wrote a view's source."""
        ...


def match_rotary(lookup: Lookup, node: Node) -> tuple[View, View, View] | None:
    """``x * cos + cat(-x[half:], x[:half]) * sin``: x, cos and sin, or None."""
    left, right = (_product(lookup, item) for item in node.args)
    if left is None or right is None:
        return None
    (plain, cos), (turned, sin) = left, right
    view = lookup.view(plain)
    if not _is_half_turn(lookup, view, turned) or not _one_table_row(view, cos) or not _one_table_row(view, sin):
        return None
    return view, cos, sin


def match_partial_rotary(lookup: Lookup, parts: Sequence[View], dim: int) -> tuple[View, View, View] | None:
    """``cat(rotary(x[:part]), x[part:])``: x, cos and sin, or None."""
    if len(parts) != 2 or dim != len(parts[0].shape) - 1:
        return None
    made = lookup.written_by(parts[0])
    if made is None or made.opcode != Opcode.ROTARY or parts[0].width != _width(made.output):
        return None
    whole = made.inputs[0]
    assert whole is not None
    # The turned part was copied out of the head before it was turned; the copy says from where.
    copied = lookup.written_by(whole)
    first = copied.inputs[0] if copied is not None and copied.opcode == Opcode.COPY else whole
    if first is None or first.source != parts[1].source or first.strides != parts[1].strides:
        return None
    if parts[1].offset != first.offset + first.shape[-1] * first.strides[-1]:
        return None
    joined = View(first.source, (*first.shape[:-1], first.shape[-1] + parts[1].shape[-1]), first.strides, first.offset)
    cos, sin = made.inputs[1:3]
    assert cos is not None
    assert sin is not None
    return joined, cos, sin


def _width(view: View | None) -> int:
    return 0 if view is None else view.width


def _product(lookup: Lookup, item: object) -> tuple[Any, View] | None:
    """A row value times a table."""
    made = lookup.maker(item)
    if made is None or made.name != "aten.mul.Tensor":
        return None
    for value, table in (made.args, made.args[::-1]):
        if lookup.is_table(table) and isinstance(value, Value) and not lookup.is_table(value):
            return value, lookup.view(table)
    return None


def _is_half_turn(lookup: Lookup, view: View, turned: object) -> bool:
    """Whether ``turned`` is the second half of ``view``, negated, then the first."""
    made = lookup.maker(turned)
    if made is None or made.name != "aten.cat.default" or made.args[1:] not in ((-1,), (len(view.shape) - 1,)):
        return False
    negated = lookup.maker(made.args[0][0])
    half, size = view.shape[-1] // 2, view.shape[-1]
    if negated is None or negated.name != "aten.neg.default" or len(made.args[0]) != 2 or size % 2:
        return False
    second, first = lookup.view(negated.args[0]), lookup.view(made.args[0][1])
    return second == view.narrow(-1, half, size) and first == view.narrow(-1, 0, half)


def _one_table_row(view: View, table: View) -> bool:
    """Whether all heads of a row are turned by the same row of the table, which is as wide as a head."""
    return table.is_contiguous and table.width == view.shape[-1] and table.shape[-1] != ROW
