"""From recorded operations to instructions: what each operation means, or which one has no instruction.

Pure: a graph gives a listing or ``Unlowerable``. Views cost nothing. What depends on positions alone becomes a table with a row for each
position, computed once by running the model's own operations over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from forkpoint.llm.resident.fusion import match_partial_rotary, match_rotary
from forkpoint.llm.resident.instructions import DTYPES, Instruction, Kind, Listing, Opcode, Source
from forkpoint.llm.resident.layouts import ROW, View, row_major, sizes_of
from forkpoint.llm.resident.tracing import POSITIONS, TOKENS, Graph, Node, Rows, Unlowerable, Value, leaves, substitute

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu", "sigmoid", "tanh", "relu_squared")
"""Kinds of activation by their numbers in native code."""

_BINARY: Final = {
    "add": Opcode.ADD,
    "sub": Opcode.SUBTRACT,
    "mul": Opcode.MULTIPLY,
    "div": Opcode.DIVIDE,
}
_VIEWS: Final = frozenset({"view", "reshape", "_unsafe_view", "alias", "detach", "select", "unsqueeze", "squeeze"})
_SAME: Final = frozenset({"alias", "detach", "clone", "contiguous", "lift_fresh", "_to_copy"})


def lower(graph: Graph, pages: Sequence[Tensor], *, max_context: int) -> Listing:
    """Instructions for a graph, in its order, what nothing needs left out.

    Args:
        graph: the trace.
        pages: the page tensors that were passed while tracing, by which state groups are told apart.
        max_context: positions that tables cover.

    Raises:
        Unlowerable: naming the operation that has no instruction.
    """
    lowering = _Lowering(graph, pages, max_context)
    for node in graph.nodes:
        lowering.visit(node)
    lowering.finish()
    return lowering.listing


def _positional(graph: Graph) -> set[int]:
    """Values that depend on positions alone."""
    found = {POSITIONS.index}
    for node in graph.nodes:
        inputs = {leaf.index for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Value)}
        if inputs <= found:
            found.update(value.index for value in node.outputs)
    return found


@final
class _Lowering:
    def __init__(self, graph: Graph, pages: Sequence[Tensor], max_context: int) -> None:
        self.graph = graph
        self.listing = Listing()
        self._pages = pages
        self._max_context = max_context
        self._views: dict[int, View] = {}
        self._makers: dict[int, Node] = {}
        self._written: dict[int, Instruction] = {}
        self._constants: dict[int, int] = {}
        self._positional = _positional(graph)
        self._tokens = {TOKENS.index}
        self._over_positions: list[Tensor | None] = []

    def visit(self, node: Node) -> None:
        """Lower one operation."""
        for value in node.outputs:
            self._makers[value.index] = node
        if all(value.index in self._positional for value in node.outputs):
            return
        operation = node.name.split(".")[1]
        if self._is_tokens(node.args[0]) and operation in _VIEWS:
            self._tokens.add(node.outputs[0].index)
            return
        lower_it: Callable[[Node, str], None] | None = getattr(self, f"_{node.name.split('.')[0]}_{operation}", None)
        if operation in _BINARY:
            lower_it = self._binary
        elif operation in _SAME:
            lower_it = self._same
        if lower_it is None:
            raise Unlowerable("operation", f"there is no kernel for {node.name}", operation=node.name)
        try:
            lower_it(node, operation)
        except Unlowerable as error:
            if error.refusal.operation:
                raise
            raise Unlowerable(error.refusal.code, error.refusal.why, operation=node.name) from error

    def finish(self) -> None:
        """Write the logits, and leave out what nothing needs."""
        view = self.view(self.graph.output)
        logits = Source(kind=Kind.LOGITS, width=view.width, dtype=torch.float32)
        target = row_major(self.listing.add_source(logits), view.shape)
        self.listing.instructions.append(Instruction(opcode=Opcode.COPY, inputs=(view,), output=target))
        needed = {target.source}
        kept: list[Instruction] = []
        for instruction in reversed(self.listing.instructions):
            target_source = None if instruction.output is None else instruction.output.source
            if target_source is None or target_source in needed:
                needed |= instruction.reads
                kept.append(instruction)
        self.listing.instructions = kept[::-1]

    # what an argument is

    def view(self, value: Value) -> View:
        """Where a value lies. Raises Unlowerable ``values`` for token ids themselves."""
        if value.index not in self._views:
            if value.index not in self._positional:
                raise Unlowerable("values", "token ids are used as numbers")
            self._views[value.index] = self._table(value)
        return self._views[value.index]

    def maker(self, value: object) -> Node | None:
        """The operation that made a value."""
        return self._makers.get(value.index) if isinstance(value, Value) else None

    def is_table(self, value: object) -> bool:
        """Whether a value depends on positions alone."""
        return isinstance(value, Value) and value.index in self._positional

    def dtype(self, value: Value) -> torch.dtype:
        """Of a value."""
        return self.graph.dtypes[value.index]

    def shape(self, value: Value) -> tuple[int, ...]:
        """Of a value, ``ROW`` for the rows."""
        return sizes_of(self.graph.shapes[value.index])

    def constant(self, tensor: Tensor | None) -> View | None:
        """A view of a constant."""
        if tensor is None:
            return None
        if tensor.dtype not in DTYPES:
            raise Unlowerable("dtype", f"a constant has the dtype {tensor.dtype}")
        if id(tensor) not in self._constants:
            held = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            source = Source(kind=Kind.CONSTANT, width=tensor.numel(), dtype=tensor.dtype, tensor=held)
            self._constants[id(tensor)] = self.listing.add_source(source)
        return row_major(self._constants[id(tensor)], tuple(tensor.shape))

    def _table(self, value: Value) -> View:
        shape, dtype = self.shape(value), self.dtype(value)
        if dtype not in DTYPES or ROW not in shape:
            raise Unlowerable("dtype", f"positions are used as {dtype}")
        table = self._replayed()[value.index]
        assert table is not None
        rows = table.movedim(shape.index(ROW), 0).reshape(self._max_context, -1).contiguous()
        source = Source(kind=Kind.TABLE, width=rows.shape[1], dtype=dtype, tensor=rows)
        return row_major(self.listing.add_source(source), shape)

    def _replayed(self) -> list[Tensor | None]:
        """Every value that depends on positions alone, over all positions."""
        if not self._over_positions:
            values: list[Tensor | None] = [None] * len(self.graph.shapes)
            values[POSITIONS.index] = torch.arange(self._max_context)[None]
            with torch.no_grad():
                for node in self.graph.nodes:
                    if all(value.index in self._positional for value in node.outputs):
                        self._replay(node, values)
            self._over_positions = values
        return self._over_positions

    def _replay(self, node: Node, values: list[Tensor | None]) -> None:
        args, kwargs = (substitute(part, self._max_context, values) for part in (node.args, node.kwargs))
        made = [leaf for leaf in leaves(node.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for value, tensor in zip(node.outputs, made, strict=True):
            values[value.index] = tensor

    # what an operation writes

    def _bind(self, node: Node, view: View) -> None:
        self._views[node.outputs[0].index] = view

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> View:
        """A buffer of its own for a value."""
        if dtype not in DTYPES:
            raise Unlowerable("dtype", f"values have the dtype {dtype}")
        if ROW not in shape:
            raise Unlowerable("layout", "a value has no rows")
        view = row_major(0, shape)
        source = Source(kind=Kind.BUFFER, width=view.width, dtype=dtype)
        return row_major(self.listing.add_source(source), shape)

    def emit(
        self,
        opcode: Opcode,
        inputs: Sequence[View | None],
        output: View | None,
        numbers: Sequence[int] = (),
        scalars: Sequence[float] = (),
    ) -> None:
        """Add an instruction."""
        made = Instruction(
            opcode=opcode, inputs=tuple(inputs), output=output, numbers=tuple(numbers), scalars=tuple(scalars)
        )
        self.listing.instructions.append(made)
        if output is not None:
            self._written[output.source] = made

    def packed(self, view: View, dtype: torch.dtype) -> View:
        """The same value with a row's elements side by side; copied where they are not."""
        if view.is_contiguous and self.listing.sources[view.source].kind == Kind.BUFFER:
            return view
        out = self.new(view.shape, dtype)
        self.emit(Opcode.COPY, (view,), out)
        return out

    # views

    def _same(self, node: Node, _operation: str) -> None:
        value: Value = node.args[0]
        view, dtype = self.view(value), self.dtype(node.outputs[0])
        if dtype != self.dtype(value):
            out = self.new(view.shape, dtype)
            self.emit(Opcode.COPY, (view,), out)
            view = out
        self._bind(node, view)

    def _reshape(self, node: Node, _operation: str) -> None:
        value: Value = node.args[0]
        shape = self.shape(node.outputs[0])
        view = self.view(value)
        found = view.reshape(shape)
        if found is None:
            found = self.packed(view, self.dtype(value)).reshape(shape)
            assert found is not None
        self._bind(node, found)

    _aten_view = _aten__unsafe_view = _aten_reshape = _reshape

    def _aten_transpose(self, node: Node, _operation: str) -> None:
        view = self.view(node.args[0])
        order = list(range(len(view.shape)))
        left, right = node.args[1] % len(order), node.args[2] % len(order)
        order[left], order[right] = right, left
        self._bind(node, view.permute(order))

    def _aten_permute(self, node: Node, _operation: str) -> None:
        view = self.view(node.args[0])
        self._bind(node, view.permute([dim % len(view.shape) for dim in node.args[1]]))

    def _aten_unsqueeze(self, node: Node, _operation: str) -> None:
        self._bind(node, self.view(node.args[0]).insert(node.args[1]))

    def _aten_squeeze(self, node: Node, _operation: str) -> None:
        view, shape = self.view(node.args[0]), self.shape(node.outputs[0])
        found = view.reshape(shape)
        assert found is not None
        self._bind(node, found)

    def _aten_expand(self, node: Node, _operation: str) -> None:
        shape = [ROW if isinstance(size, Rows) else size for size in node.args[1]]
        self._bind(node, self.view(node.args[0]).expand(shape))

    def _aten_select(self, node: Node, _operation: str) -> None:
        self._bind(node, self.view(node.args[0]).select(node.args[1], node.args[2]))

    def _aten_slice(self, node: Node, _operation: str) -> None:
        view = self.view(node.args[0])
        given: list[Any] = list(node.args[1:])
        dim, start, stop, step = given + [0, None, None, 1][len(given) :]
        size = view.shape[dim % len(view.shape)]
        if size == ROW:
            if (start or 0) != 0 or not (stop is None or isinstance(stop, Rows) or stop >= 1 << 62) or step != 1:
                raise Unlowerable("layout", "a part of the rows is taken")
            self._bind(node, view)
            return
        start, stop, step = slice(start, stop, step).indices(size)
        self._bind(node, view.narrow(dim, start, max(start, stop), step))

    def _split(self, node: Node, sizes: Sequence[int], dim: int) -> None:
        view, start = self.view(node.args[0]), 0
        for value, size in zip(node.outputs, sizes, strict=True):
            self._views[value.index] = view.narrow(dim, start, start + size)
            start += size

    def _aten_split(self, node: Node, _operation: str) -> None:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        self._split(node, [self.shape(value)[dim] for value in node.outputs], dim)

    _aten_split_with_sizes = _aten_chunk = _aten_split

    def _aten_unbind(self, node: Node, _operation: str) -> None:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        for index, value in enumerate(node.outputs):
            self._views[value.index] = self.view(node.args[0]).select(dim, index)

    # arithmetic

    def _operand(self, item: object, shape: Sequence[int]) -> View | float:
        """A number, or a view broadcast to a shape."""
        if isinstance(item, bool | int | float):
            return float(item)
        if isinstance(item, Tensor) and item.numel() == 1 and item.dim() == 0:
            return float(item)
        view = self.view(item) if isinstance(item, Value) else None
        if isinstance(item, Tensor):
            view = self.constant(item)
        if view is None:
            raise Unlowerable("operation", f"an operand is {item!r}")
        return view.expand(shape)

    def _binary(self, node: Node, operation: str) -> None:
        if node.name.split(".")[2] not in ("Tensor", "Scalar") or node.kwargs or len(node.args) != 2:
            raise Unlowerable("operation", f"there is no kernel for this form of {node.name}")
        if self._fuse(node, operation):
            return
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        left, right = (self._operand(item, out.shape) for item in node.args)
        if isinstance(left, float) and operation in ("add", "mul"):
            left, right = right, left
        if isinstance(left, float):
            raise Unlowerable("operation", f"there is no kernel for a number in front of {node.name}")
        if isinstance(right, float):
            self.emit(_BINARY[operation], (left, None), out, scalars=(right,))
        else:
            self.emit(_BINARY[operation], (left, right), out)
        self._bind(node, out)

    def _fuse(self, node: Node, operation: str) -> bool:
        if operation == "add" and (rotary := match_rotary(self, node)) is not None:
            self._rotary(node, *rotary)
            return True
        return operation == "mul" and self._fuse_activation(node)

    def _fuse_activation(self, node: Node) -> bool:
        """``activation(gate) * up`` in one instruction."""
        for gate, up in (node.args, node.args[::-1]):
            if not isinstance(gate, Value) or not isinstance(up, Value) or self.is_table(gate) or self.is_table(up):
                continue
            view, other = self.view(gate), self.view(up)
            made = self._written.get(view.source)
            if made is None or made.opcode != Opcode.ACTIVATION or made.output is None or view.shape != other.shape:
                continue
            if not (view.is_contiguous and other.is_contiguous and view.width == made.output.width):
                continue
            out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
            self.emit(Opcode.ACTIVATION_PRODUCT, (made.inputs[0], other), out, made.numbers)
            self._bind(node, out)
            return True
        return False

    def _rotary(self, node: Node, view: View, cos: View, sin: View) -> None:
        """``view`` is ``[.. dim]``, the first part of it, as wide as the tables, to be turned."""
        dtype = self.dtype(node.outputs[0])
        if len({dtype, *(self.listing.sources[item.source].dtype for item in (view, cos, sin))}) > 1:
            raise Unlowerable("dtype", "keys and angles have different dtypes")
        out = self.new(view.shape, dtype)
        self.emit(Opcode.ROTARY, (self.packed(view, dtype), cos, sin), out, (cos.width,))
        self._bind(node, out)

    def written_by(self, view: View) -> Instruction | None:
        """The instruction that last wrote a view's source."""
        return self._written.get(view.source)

    def _aten_neg(self, node: Node, _operation: str) -> None:
        self._activation_like(node, Opcode.MULTIPLY, scalars=(-1.0,))

    def _activation_like(self, node: Node, opcode: Opcode, *, scalars: Sequence[float]) -> None:
        view = self.view(node.args[0])
        out = self.new(view.shape, self.dtype(node.outputs[0]))
        self.emit(opcode, (view, None), out, scalars=scalars)
        self._bind(node, out)

    def _aten_cat(self, node: Node, _operation: str) -> None:
        parts = [self.view(part) for part in node.args[0]]
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(parts[0].shape)
        if parts[0].shape[dim] == ROW:
            raise Unlowerable("layout", "rows are joined")
        if (rotary := match_partial_rotary(self, parts, dim)) is not None:
            self._rotary(node, *rotary)
            return
        out, start = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0])), 0
        for part in parts:
            self.emit(Opcode.COPY, (part,), out.narrow(dim, start, start + part.shape[dim]))
            start += part.shape[dim]
        self._bind(node, out)

    # layers

    def _aten_embedding(self, node: Node, _operation: str) -> None:
        weight, ids = node.args[:2]
        if not self._is_tokens(ids) or not isinstance(weight, Tensor):
            raise Unlowerable("values", "rows are looked up by something other than token ids")
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        self.emit(Opcode.LOOKUP, (self.constant(weight),), out, (weight.shape[1], weight.shape[0]))
        self._bind(node, out)

    def _forkpoint_packed_embedding(self, node: Node, _operation: str) -> None:
        ids, packed, outputs, dim = node.args
        if not self._is_tokens(ids):
            raise Unlowerable("values", "rows are looked up by something other than token ids")
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        self.emit(Opcode.EMBED, (self.constant(packed),), out, (dim, outputs))
        self._bind(node, out)

    def _is_tokens(self, value: object) -> bool:
        """Whether a value is the token ids, in whatever shape."""
        return isinstance(value, Value) and value.index in self._tokens

    def _forkpoint_packed_linear(self, node: Node, _operation: str) -> None:
        x, packed, bias, outputs = node.args
        view = self.packed(self.view(x), self.dtype(x))
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        self.emit(Opcode.DENSE, (view, self.constant(packed), self.constant(bias)), out, (self._last(view), outputs))
        self._bind(node, out)

    def _last(self, view: View) -> int:
        size = view.shape[-1]
        if size == ROW or view.width != size:
            raise Unlowerable("layout", "a dense layer runs over more than the rows")
        return size

    def _forkpoint_rms_norm(self, node: Node, _operation: str) -> None:
        x, weight, epsilon, offset, rounds_once = (*node.args, False)[:5]
        self._norm(node, Opcode.RMS_NORM, x, (self.constant(weight),), (epsilon, offset), rounds_once=rounds_once)

    def _forkpoint_layer_norm(self, node: Node, _operation: str) -> None:
        x, weight, bias, epsilon = node.args
        self._norm(node, Opcode.LAYER_NORM, x, (self.constant(weight), self.constant(bias)), (epsilon,))

    def _norm(
        self,
        node: Node,
        opcode: Opcode,
        x: Value,
        weights: Sequence[View | None],
        scalars: Sequence[float],
        *,
        rounds_once: bool = False,
    ) -> None:
        view = self.packed(self.view(x), self.dtype(x))
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        self.emit(opcode, (view, *weights), out, (int(rounds_once),), scalars)
        self._bind(node, out)

    def _forkpoint_activation(self, node: Node, _operation: str) -> None:
        x, kind = node.args
        self._activate(node, x, kind)

    def _activate(self, node: Node, x: Value, kind: str) -> None:
        if kind not in ACTIVATIONS:
            raise Unlowerable("operation", f"there is no kernel for the activation {kind}")
        view = self.packed(self.view(x), self.dtype(x))
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        self.emit(Opcode.ACTIVATION, (view,), out, (ACTIVATIONS.index(kind),))
        self._bind(node, out)

    def _aten_tanh(self, node: Node, operation: str) -> None:
        self._activate(node, node.args[0], operation)

    _aten_relu = _aten_silu = _aten_sigmoid = _aten_tanh

    def _forkpoint_append_and_attend(self, node: Node, _operation: str) -> None:
        query, key, value, pages, _, _, layer, scaling, window, softcap, sinks = node.args
        group = next(index for index, tensor in enumerate(self._pages) if tensor is pages)
        views = [self.packed(self._rows_first(item), self.dtype(item)) for item in (query, key, value)]
        out = self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))
        extra = None if sinks is None else self.constant(sinks.float())
        self.emit(Opcode.APPEND, views[1:], None, (layer, group))
        self.emit(Opcode.ATTEND, (views[0], extra), out, (layer, group, window, views[0].shape[1]), (scaling, softcap))
        self._bind(node, out)

    def _rows_first(self, value: Value) -> View:
        view = self.view(value)
        if view.shape[0] != ROW or len(view.shape) != 3:
            raise Unlowerable("layout", f"attention is given a shape of {view.shape}")
        return view
