"""Operations that have a kernel of their own: embeddings, dense layers, norms, activations, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from forkpoint.llm.kernels.rows import ACTIVATIONS
from forkpoint.llm.resident.instructions import Opcode
from forkpoint.llm.resident.layouts import ROW, View
from forkpoint.llm.resident.tracing import Node, Unlowerable, Value
from forkpoint.llm.resident.workbench import Handler, Workbench, operation

_NUMBERS: Final = {kind: number for number, kind in enumerate(ACTIVATIONS)}


def _embedding(bench: Workbench, node: Node) -> None:
    weight, ids = node.args[:2]
    if not bench.is_tokens(ids) or not isinstance(weight, Tensor):
        raise Unlowerable("values", "rows are looked up by something other than token ids")
    out = bench.output(node)
    bench.emit(Opcode.LOOKUP, (bench.constant(weight),), out, (weight.shape[1], weight.shape[0]))
    bench.bind(node, out)


def _packed_embedding(bench: Workbench, node: Node) -> None:
    ids, packed, outputs, dim = node.args
    if not bench.is_tokens(ids):
        raise Unlowerable("values", "rows are looked up by something other than token ids")
    out = bench.output(node)
    bench.emit(Opcode.EMBED, (bench.constant(packed),), out, (dim, outputs))
    bench.bind(node, out)


def _packed_linear(bench: Workbench, node: Node) -> None:
    x, packed, bias, outputs = node.args
    view = _input(bench, x, (packed, bias))
    if view.width != view.shape[-1]:
        raise Unlowerable("layout", "a dense layer runs over more than the rows")
    out = bench.output(node)
    inputs = view, bench.constant(packed), bench.constant(bias)
    bench.emit(Opcode.DENSE, inputs, out, (view.width, outputs))
    bench.bind(node, out)


def _input(bench: Workbench, x: Value, weights: Sequence[Tensor | None] = ()) -> View:
    """A row's elements side by side. Raises Unlowerable ``dtype`` where they differ from the weights."""
    dtype = bench.dtype(x)
    if any(weight is not None and weight.dtype != dtype for weight in weights):
        raise Unlowerable("dtype", f"weights of another dtype than {dtype}")
    return bench.packed(bench.view(x), dtype)


def _rms_norm(bench: Workbench, node: Node) -> None:
    given: list[Any] = list(node.args)
    x, weight, epsilon, offset, rounds_once = given + [None, None, None, 0.0, False][len(given) :]
    out = bench.output(node)
    inputs = _input(bench, x, (weight,)), bench.constant(weight)
    bench.emit(Opcode.RMS_NORM, inputs, out, (int(rounds_once),), (epsilon, offset))
    bench.bind(node, out)


def _layer_norm(bench: Workbench, node: Node) -> None:
    x, weight, bias, epsilon = node.args
    out = bench.output(node)
    inputs = _input(bench, x, (weight, bias)), bench.constant(weight), bench.constant(bias)
    bench.emit(Opcode.LAYER_NORM, inputs, out, (), (epsilon,))
    bench.bind(node, out)


def _activation(bench: Workbench, node: Node) -> None:
    x, kind = node.args
    _activate(bench, node, x, kind)


def _activate(bench: Workbench, node: Node, x: Value, kind: str) -> None:
    if kind not in _NUMBERS:
        raise Unlowerable("operation", f"there is no kernel for the activation {kind}")
    view = _input(bench, x)
    out = bench.output(node)
    bench.emit(Opcode.ACTIVATION, (view,), out, (_NUMBERS[kind],))
    bench.bind(node, out)


def _plain_activation(bench: Workbench, node: Node) -> None:
    """An activation of torch's that was not replaced; ours differs from it in the last bits."""
    approximate = node.kwargs.get("approximate", "none")
    _activate(bench, node, node.args[0], "gelu_tanh" if approximate == "tanh" else operation(node))


def _append_and_attend(bench: Workbench, node: Node) -> None:
    query, key, value, pages, _, _, layer, scaling, window, softcap, sinks = node.args
    group = next(index for index, tensor in enumerate(bench.pages) if tensor is pages)
    views = [bench.packed(_rows_first(bench, item), bench.dtype(item)) for item in (query, key, value)]
    out = bench.output(node)
    extra = None if sinks is None else bench.constant(sinks.float())
    bench.emit(Opcode.APPEND, views[1:], None, (layer, group))
    bench.emit(Opcode.ATTEND, (views[0], extra), out, (layer, group, window, views[0].shape[1]), (scaling, softcap))
    bench.bind(node, out)


def _rows_first(bench: Workbench, value: Value) -> View:
    view = bench.view(value)
    if view.shape[0] != ROW or len(view.shape) != 3:
        raise Unlowerable("layout", f"attention is given a shape of {view.shape}")
    return view


HANDLERS: Final[dict[str, Handler]] = {
    "embedding": _embedding,
    "packed_embedding": _packed_embedding,
    "packed_linear": _packed_linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "activation": _activation,
    "append_and_attend": _append_and_attend,
    **dict.fromkeys(("silu", "gelu", "relu", "sigmoid", "tanh"), _plain_activation),
}
