"""What lowering works on: where each value lies so far, constants, tables of positions, and the instructions written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from forkpoint.llm.resident.instructions import DTYPES, Instruction, Kind, Listing, Opcode, Source
from forkpoint.llm.resident.layouts import ROW, View, row_major, sizes_of
from forkpoint.llm.resident.tracing import POSITIONS, TOKENS, Graph, Node, Unlowerable, Value, leaves, substitute


@final
class Workbench:
    """One graph being lowered.

    Attributes:
        graph: the trace.
        listing: sources and instructions so far.
        pages: the page tensors that were passed while tracing, by which state groups are told apart.
    """

    def __init__(self, graph: Graph, pages: Sequence[Tensor], *, max_context: int) -> None:
        self.graph = graph
        self.listing = Listing()
        self.pages = pages
        self._max_context = max_context
        self._views: dict[int, View] = {}
        self._makers: dict[int, Node] = {}
        self._written: dict[int, Instruction] = {}
        self._constants: dict[int, tuple[Tensor, int]] = {}  # kept alive, so that an id stays its own
        self._positional = _positional(graph)
        self._tokens = {TOKENS.index}
        self._over_positions: list[Tensor | None] = []

    def note(self, node: Node) -> None:
        """Remember who made a node's values."""
        for value in node.outputs:
            self._makers[value.index] = node

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
            self._constants[id(tensor)] = tensor, self.listing.add_source(source)
        return row_major(self._constants[id(tensor)][1], tuple(tensor.shape))

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

    def bind(self, node: Node, view: View, index: int = 0) -> None:
        """Say where an output of a node lies."""
        self._views[node.outputs[index].index] = view

    def bind_tokens(self, node: Node) -> None:
        """Say that a node's output is the token ids in another shape."""
        self._tokens.add(node.outputs[0].index)

    def is_tokens(self, value: object) -> bool:
        """Whether a value is the token ids, in whatever shape."""
        return isinstance(value, Value) and value.index in self._tokens

    def written_by(self, view: View) -> Instruction | None:
        """The instruction that last wrote a view's source."""
        return self._written.get(view.source)

    def source(self, view: View) -> Source:
        """What a view is a view of."""
        return self.listing.sources[view.source]

    def output(self, node: Node) -> View:
        """A buffer of its own for a node's output."""
        return self.new(self.shape(node.outputs[0]), self.dtype(node.outputs[0]))

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


Handler = Callable[[Workbench, Node], None]
"""Lowers one operation."""


def operation(node: Node) -> str:
    """The name of a node's operation, without namespace and overload."""
    return node.name.split(".")[1]


def _positional(graph: Graph) -> set[int]:
    """Values that depend on positions alone."""
    found = {POSITIONS.index}
    for node in graph.nodes:
        inputs = {leaf.index for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Value)}
        if inputs <= found:
            found.update(value.index for value in node.outputs)
    return found
