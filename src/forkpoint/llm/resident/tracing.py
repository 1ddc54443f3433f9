"""A model's forward pass as a flat list of operations, recorded by running it.

The model runs twice on a few rows, with different row counts, tokens and positions, while every operation that depends on tokens or
positions is written down. The two records must agree in everything but the number of rows; integers that follow the number of rows become
``Rows``. What depends on neither is a constant. A pass that looks at a value to decide what to do next is refused: it would be another
list for another input.

Does not know what operations mean; ``lowering`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ROW_COUNTS: Final = (5, 7)
_LOOKS_AT_VALUES: Final = frozenset(
    {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default", "aten.equal.default"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a model or a request cannot be served by a program.

    Attributes:
        code: a stable word: ``operation``, ``layout``, ``dtype``, ``device``, ``rows``, ``values``, ``pages``, ``kernels``, ``weights``.
        operation: the operation that stands in the way, or an empty string.
        why: a sentence for people.
    """

    code: str
    operation: str
    why: str


class Unlowerable(Exception):
    """Carries a refusal out of nested functions. Never leaves this package: ``build_program`` returns the refusal."""

    def __init__(self, code: str, why: str, *, operation: str = "") -> None:
        super().__init__(why)
        self.refusal = Refusal(code=code, operation=operation, why=why)


@dataclass(frozen=True, slots=True)
class Rows:
    """The integer ``times * number of rows``."""

    times: int


@dataclass(frozen=True, slots=True)
class Value:
    """Something that depends on tokens or positions: the ``index``-th of a graph."""

    index: int


Size = int | Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One recorded operation.

    Attributes:
        name: ``namespace.name.overload``.
        function: the operation itself, to be run again over other positions.
        args, kwargs: ``Value``, constant tensors, ``Rows`` and plain values, nested as they were given.
        outputs: the values it makes.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Operations in order. Value 0 is the token ids, value 1 the positions, both ``[1 rows]``.

    Attributes:
        shapes, dtypes: of every value.
        output: the logits, ``[1 rows vocabulary]``.
    """

    nodes: tuple[Node, ...]
    shapes: tuple[tuple[Size, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    output: Value


TOKENS: Final = Value(0)
POSITIONS: Final = Value(1)

Run = Callable[[Tensor, Tensor], Tensor]
"""Runs a model: token ids and positions ``[1 rows]`` to logits ``[1 rows vocabulary]``."""


def trace(run: Run, *, vocabulary: int, max_position: int) -> Graph:
    """Record ``run`` at two row counts and return what they have in common.

    Raises:
        Unlowerable: with code ``values`` when the pass looks at values, ``rows`` when it is another list for another number of rows.
    """
    first, second = (_record(run, rows, vocabulary, max_position) for rows in _ROW_COUNTS)
    return _common(first, second)


@dataclass(slots=True)
class _Record:
    rows: int
    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    indexes: dict[int, int] = field(default_factory=dict)
    output: Value | None = None

    def add(self, tensor: Tensor) -> Value:
        """Number a tensor; it is kept alive, so that its ``id`` stays its own."""
        self.indexes[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return Value(len(self.tensors) - 1)

    def find(self, item: object) -> object:
        """The value a tensor is, or the item itself."""
        if isinstance(item, Tensor) and id(item) in self.indexes:
            return Value(self.indexes[id(item)])
        return item


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, record: _Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = _map(self._record.find, (args, kwargs))
        if not any(isinstance(leaf, Value) for leaf in _leaves(found)):
            return out
        name = f"{func.namespace}.{func.overloadpacket.__name__}.{func._overloadname}"
        if name in _LOOKS_AT_VALUES:
            raise Unlowerable("values", "the model decides by looking at values while it runs", operation=name)
        outputs = [leaf for leaf in _leaves(out) if isinstance(leaf, Tensor)]
        values = tuple(self._record.add(tensor) for tensor in outputs)
        self._record.nodes.append(Node(name=name, function=func, args=found[0], kwargs=found[1], outputs=values))
        return out


def _record(run: Run, rows: int, vocabulary: int, max_position: int) -> _Record:
    record = _Record(rows)
    tokens = (torch.arange(rows) * 37 + rows) % vocabulary
    positions = torch.arange(rows) % max_position
    inputs = tokens[None], positions[None]
    for tensor in inputs:
        record.add(tensor)
    with torch.no_grad(), _Recorder(record):
        output = record.find(run(*inputs))
    if not isinstance(output, Value):
        raise Unlowerable("values", "the logits do not depend on the tokens")
    record.output = output
    return record


def _common(first: _Record, second: _Record) -> Graph:
    names = [[node.name for node in record.nodes] for record in (first, second)]
    if names[0] != names[1] or first.output != second.output or len(first.tensors) != len(second.tensors):
        raise Unlowerable("rows", "the model runs other operations for another number of rows")
    assert first.output is not None

    def merge(left: Any, right: Any, where: str) -> Any:
        return _merge(left, right, (first.rows, second.rows), where)

    nodes = tuple(
        Node(
            name=left.name,
            function=left.function,
            args=merge(left.args, right.args, left.name),
            kwargs=merge(left.kwargs, right.kwargs, left.name),
            outputs=left.outputs,
        )
        for left, right in zip(first.nodes, second.nodes, strict=True)
    )
    shapes = tuple(
        merge(tuple(left.shape), tuple(right.shape), "a shape")
        for left, right in zip(first.tensors, second.tensors, strict=True)
    )
    return Graph(nodes=nodes, shapes=shapes, dtypes=tuple(item.dtype for item in first.tensors), output=first.output)


def _merge(left: Any, right: Any, rows: tuple[int, int], where: str) -> Any:
    """What two records of one argument have in common."""
    if isinstance(left, tuple | list) and isinstance(right, tuple | list) and len(left) == len(right):
        return tuple(_merge(*pair, rows, where) for pair in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return {key: _merge(left[key], right[key], rows, where) for key in left}
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left is right or (left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)):
            return left
    elif left is right or (type(left) is type(right) and left == right):
        return left
    elif isinstance(left, int) and isinstance(right, int) and left * rows[1] == right * rows[0]:
        return Rows(left // rows[0])
    raise Unlowerable("rows", "an argument changes with the number of rows in an unknown way", operation=where)


def substitute(item: Any, rows: int, values: Sequence[Tensor | None]) -> Any:
    """An argument with ``Rows`` made integers and values made tensors."""

    def leaf(one: object) -> object:
        if isinstance(one, Rows):
            return one.times * rows
        return values[one.index] if isinstance(one, Value) else one

    return _map(leaf, item)


def leaves(item: Any) -> list[Any]:
    """Everything inside nested tuples, lists and dictionaries."""
    return _leaves(item)


def _map(apply: Callable[[Any], Any], item: Any) -> Any:
    if isinstance(item, tuple | list):
        return tuple(_map(apply, one) for one in item)
    if isinstance(item, dict):
        return {key: _map(apply, one) for key, one in item.items()}
    return apply(item)


def _leaves(item: Any) -> list[Any]:
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, tuple | list):
        return [leaf for one in item for leaf in _leaves(one)]
    return [item]
