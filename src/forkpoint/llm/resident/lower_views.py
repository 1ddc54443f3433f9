"""Operations that only say where elements lie: they cost nothing, but for copies where rows cannot be seen the way that is asked."""

from __future__ import annotations

from typing import Any, Final

from forkpoint.llm.resident.instructions import Opcode
from forkpoint.llm.resident.layouts import ROW
from forkpoint.llm.resident.tracing import Node, Rows, Unlowerable, Value
from forkpoint.llm.resident.workbench import Handler, Workbench

OF_TOKENS: Final = frozenset({"view", "reshape", "_unsafe_view", "alias", "detach", "select", "unsqueeze", "squeeze"})
"""Operations that leave token ids what they are."""


def _same(bench: Workbench, node: Node) -> None:
    value: Value = node.args[0]
    view, dtype = bench.view(value), bench.dtype(node.outputs[0])
    if dtype != bench.dtype(value):
        out = bench.new(view.shape, dtype)
        bench.emit(Opcode.COPY, (view,), out)
        view = out
    bench.bind(node, view)


def _reshape(bench: Workbench, node: Node) -> None:
    value: Value = node.args[0]
    shape = bench.shape(node.outputs[0])
    view = bench.view(value)
    found = view.reshape(shape)
    if found is None:
        found = bench.packed(view, bench.dtype(value)).reshape(shape)
        assert found is not None
    bench.bind(node, found)


def _transpose(bench: Workbench, node: Node) -> None:
    view = bench.view(node.args[0])
    order = list(range(len(view.shape)))
    left, right = node.args[1] % len(order), node.args[2] % len(order)
    order[left], order[right] = right, left
    bench.bind(node, view.permute(order))


def _permute(bench: Workbench, node: Node) -> None:
    view = bench.view(node.args[0])
    bench.bind(node, view.permute([dim % len(view.shape) for dim in node.args[1]]))


def _unsqueeze(bench: Workbench, node: Node) -> None:
    bench.bind(node, bench.view(node.args[0]).insert(node.args[1]))


def _squeeze(bench: Workbench, node: Node) -> None:
    view, shape = bench.view(node.args[0]), bench.shape(node.outputs[0])
    found = view.reshape(shape)
    assert found is not None
    bench.bind(node, found)


def _expand(bench: Workbench, node: Node) -> None:
    bench.bind(node, bench.view(node.args[0]).expand(bench.shape(node.outputs[0])))


def _select(bench: Workbench, node: Node) -> None:
    bench.bind(node, bench.view(node.args[0]).select(node.args[1], node.args[2]))


def _slice(bench: Workbench, node: Node) -> None:
    view = bench.view(node.args[0])
    given: list[Any] = list(node.args[1:])
    dim, start, stop, step = given + [0, None, None, 1][len(given) :]
    size = view.shape[dim % len(view.shape)]
    if size == ROW:
        if (start or 0) != 0 or not (stop is None or isinstance(stop, Rows) or stop >= 1 << 62) or step != 1:
            raise Unlowerable("layout", "a part of the rows is taken")
        bench.bind(node, view)
        return
    start, stop, step = slice(start, stop, step).indices(size)
    bench.bind(node, view.narrow(dim, start, max(start, stop), step))


def _split(bench: Workbench, node: Node) -> None:
    dim = _dim(node, 2)
    view, start = bench.view(node.args[0]), 0
    for index, value in enumerate(node.outputs):
        size = bench.shape(value)[dim]
        bench.bind(node, view.narrow(dim, start, start + size), index)
        start += size


def _unbind(bench: Workbench, node: Node) -> None:
    for index in range(len(node.outputs)):
        bench.bind(node, bench.view(node.args[0]).select(_dim(node, 1), index), index)


def _dim(node: Node, place: int) -> int:
    return int(node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0))


HANDLERS: Final[dict[str, Handler]] = {
    **dict.fromkeys(("alias", "detach", "clone", "contiguous", "lift_fresh", "_to_copy"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshape),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "select": _select,
    "slice": _slice,
    "unbind": _unbind,
}
