"""Sums, products and joins, and what is done faster together: rotary embeddings, activations times another value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from forkpoint.llm.resident.fusion import match_partial_rotary, match_rotary
from forkpoint.llm.resident.instructions import Opcode
from forkpoint.llm.resident.layouts import ROW, View
from forkpoint.llm.resident.tracing import Node, Unlowerable, Value
from forkpoint.llm.resident.workbench import Handler, Workbench, operation

_BINARY: Final = {"add": Opcode.ADD, "sub": Opcode.SUBTRACT, "mul": Opcode.MULTIPLY, "div": Opcode.DIVIDE}


def _operand(bench: Workbench, item: object, shape: Sequence[int]) -> View | float:
    """A number, or a view broadcast to a shape."""
    if isinstance(item, bool | int | float):
        return float(item)
    if isinstance(item, Tensor) and item.numel() == 1 and item.dim() == 0:
        return float(item)
    view = bench.view(item) if isinstance(item, Value) else None
    if isinstance(item, Tensor):
        view = bench.constant(item)
    if view is None:
        raise Unlowerable("operation", f"an operand is {item!r}")
    return view.expand(shape)


def _binary(bench: Workbench, node: Node) -> None:
    if node.name.split(".")[2] not in ("Tensor", "Scalar") or node.kwargs or len(node.args) != 2:
        raise Unlowerable("operation", f"there is no kernel for this form of {node.name}")
    out = bench.output(node)
    left, right = (_operand(bench, item, out.shape) for item in node.args)
    if isinstance(left, float) and operation(node) in ("add", "mul"):
        left, right = right, left
    if isinstance(left, float):
        raise Unlowerable("operation", f"there is no kernel for a number in front of {node.name}")
    if isinstance(right, float):
        bench.emit(_BINARY[operation(node)], (left, None), out, scalars=(right,))
    else:
        bench.emit(_BINARY[operation(node)], (left, right), out)
    bench.bind(node, out)


def _add(bench: Workbench, node: Node) -> None:
    rotary = match_rotary(bench, node)
    # Angles in another dtype than the heads are computed as written.
    if rotary is not None and all(bench.source(view).dtype == bench.dtype(node.outputs[0]) for view in rotary):
        _rotary(bench, node, *rotary)
    else:
        _binary(bench, node)


def _multiply(bench: Workbench, node: Node) -> None:
    if not _fuse_activation(bench, node):
        _binary(bench, node)


def _fuse_activation(bench: Workbench, node: Node) -> bool:
    """``activation(gate) * up`` in one instruction."""
    for gate, up in (node.args, node.args[::-1]):
        if not isinstance(gate, Value) or not isinstance(up, Value) or bench.is_table(gate) or bench.is_table(up):
            continue
        view, other = bench.view(gate), bench.view(up)
        made = bench.written_by(view)
        if made is None or made.opcode != Opcode.ACTIVATION or made.output is None or view.shape != other.shape:
            continue
        if not (view.is_contiguous and other.is_contiguous and view.width == made.output.width):
            continue
        out = bench.output(node)
        bench.emit(Opcode.ACTIVATION_PRODUCT, (made.inputs[0], other), out, made.numbers)
        bench.bind(node, out)
        return True
    return False


def _rotary(bench: Workbench, node: Node, view: View, cos: View, sin: View) -> None:
    """``view`` is ``[.. dim]``, the first part of it, as wide as the tables, to be turned."""
    dtype = bench.dtype(node.outputs[0])
    out = bench.new(view.shape, dtype)
    bench.emit(Opcode.ROTARY, (bench.packed(view, dtype), cos, sin), out, (cos.width,))
    bench.bind(node, out)


def _negate(bench: Workbench, node: Node) -> None:
    out = bench.output(node)
    bench.emit(Opcode.MULTIPLY, (bench.view(node.args[0]), None), out, scalars=(-1.0,))
    bench.bind(node, out)


def _cat(bench: Workbench, node: Node) -> None:
    parts = [bench.view(part) for part in node.args[0]]
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(parts[0].shape)
    if parts[0].shape[dim] == ROW:
        raise Unlowerable("layout", "rows are joined")
    if (rotary := match_partial_rotary(bench, parts, dim)) is not None:
        _rotary(bench, node, *rotary)
        return
    out, start = bench.output(node), 0
    for part in parts:
        bench.emit(Opcode.COPY, (part,), out.narrow(dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    bench.bind(node, out)


HANDLERS: Final[dict[str, Handler]] = {
    "add": _add,
    "sub": _binary,
    "mul": _multiply,
    "div": _binary,
    "neg": _negate,
    "cat": _cat,
}
