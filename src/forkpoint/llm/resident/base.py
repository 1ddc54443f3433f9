"""The seam behind which continuations live in memory: state groups, states, reservations, strategies.

A *state* is an immutable view of processed tokens ``[0, length)``. Appending is a transaction over all layers: reserve rows, run a
pass that writes them in every layer, then commit (a new, longer state) or abort (nothing became visible).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import CapacityExceeded
from forkpoint.ids import Bytes
from forkpoint.state.canonical import Record
from forkpoint.state.chunk import Chunk
from forkpoint.state.manifest import ChunkRef

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of the dtypes that state can have."""

Fetch = Callable[[ChunkRef], Chunk]
"""Reads one chunk, verified and parsed. Raises NotFound or Corrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A set of layers that hold one kind of state of one shape.

    Attributes:
        name: the group's name in manifests.
        layers: indexes of the model's attention layers, ascending.
        num_heads: key/value heads of a layer.
        key_dim, value_dim: elements of one key and of one value.
        dtype: of keys and values.
        window: positions that a layer looks back, itself included; None where it looks back to the start.
    """

    name: str
    layers: tuple[int, ...]
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def kind(self) -> str:
        """The kind of state in manifests: ``window`` where layers look back a limited way, else ``tokens``."""
        return "tokens" if self.window is None else "window"

    def to_record(self) -> Record:
        """The group as part of a state identity."""
        return {
            "dtype": DTYPE_NAMES[self.dtype],
            "key_dim": self.key_dim,
            "kind": self.kind,
            "layers": list(self.layers),
            "name": self.name,
            "num_heads": self.num_heads,
            "value_dim": self.value_dim,
            "window": self.window,
        }

    @property
    def token_bytes(self) -> int:
        """Bytes of state of one token."""
        return len(self.layers) * self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a model asks of one layer: its index, scale, and the variants it needs (None where it does not)."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class State(Protocol):
    """An immutable view of the state of tokens ``[0, length)``. Memory is freed when nothing refers to it any more."""

    @property
    def length(self) -> int:
        """Processed tokens."""
        ...

    @property
    def prefilled(self) -> int:
        """Leading tokens whose chunks were each computed by one whole prefill piece: a multiple of 256.

        Only these have the bits that any cold start of the same tokens has, and only these may enter a prefix index.
        """
        ...

    @property
    def is_resident(self) -> bool:
        """Whether all of it is in memory. Using a state that is not makes it so."""
        ...

    def prefix(self, length: int) -> State:
        """The state of the first ``length`` tokens, sharing memory."""
        ...

    def reserve(self, num_rows: int) -> Reservation:
        """Begin to append ``num_rows`` tokens.

        Raises:
            CapacityExceeded: ``capacity.context`` beyond the context, ``capacity.pages`` when memory is full.
        """
        ...

    def reserve_branches(self, lengths: Sequence[int]) -> tuple[Branches, Sequence[Reservation]]:
        """Several alternatives after this state, for one forward pass that keeps none of them.

        Returns:
            What owns the rows, to be aborted at the end, and a reservation for each alternative. All start at ``length``; none may
            be committed.
        """
        ...

    def slab_pieces(self, group: int, start: int, stop: int) -> tuple[Sequence[Bytes], Sequence[Bytes]]:
        """Bytes of keys and of values of tokens ``[start, stop)`` of a group, one piece a layer, row-major."""
        ...

    def chunk_ref(self, group: int, index: int) -> ChunkRef | None:
        """The stored chunk that holds full chunk ``index``, if it was ever hashed."""
        ...

    def remember_chunk(self, group: int, index: int, ref: ChunkRef, fetch: Fetch | None = None) -> None:
        """Note that full chunk ``index`` has this id; it stays true for as long as the state lives.

        With ``fetch``, a promise that the chunk is durable and can be read again: then it may be evicted when memory is full.
        """
        ...


class Reservation(Protocol):
    """Rows ``[start, stop)`` being appended to one state. Exactly one of ``commit`` and ``abort`` ends it.

    Attributes:
        tables: for each group the numbers of the pages of tokens ``[0, stop)``, ``int32``.
    """

    start: int
    stop: int
    tables: tuple[NDArray[np.int32], ...]

    def commit(self, *, is_invariant: bool = False) -> State:
        """Make the rows visible in a new state.

        Where bits do not depend on how rows were computed (``is_invariant``), every full chunk counts as prefilled.
        """
        ...

    def abort(self) -> None:
        """Forget the rows; the state they were reserved on is as before."""
        ...


class Branches(Protocol):
    """Rows of several alternatives for one pass."""

    def abort(self) -> None:
        """Give back all of them."""
        ...


class Restoration(Protocol):
    """Memory being filled from verified chunks; nothing is visible before ``finish``."""

    def write_chunk(self, group: int, start: int, chunk: Chunk, ref: ChunkRef) -> None:
        """Copy one parsed and checked chunk to tokens ``[start, start + tokens of the chunk)``. Safe from several threads."""
        ...

    def finish(self, *, prefilled: int) -> State:
        """The restored state; ``prefilled`` as of the state that was captured."""
        ...

    def abort(self) -> None:
        """Give the memory back; nothing has changed. Safe to call twice."""
        ...


class Strategy(Protocol):
    """How states lie in memory."""

    kind: str
    page_size: int
    max_context: int

    def empty(self) -> State:
        """The state of no tokens."""
        ...

    def restore(self, length: int, fetch: Fetch | None = None) -> Restoration:
        """Begin to fill a state of ``length`` tokens; with ``fetch``, chunks that can be read again at any time, and so evicted.

        Raises:
            CapacityExceeded: ``capacity.context`` beyond the context, ``capacity.pages`` when memory is full.
        """
        ...

    def num_resident_bytes(self) -> int:
        """Bytes of memory that live states hold."""
        ...

    def num_lineages(self) -> int:
        """Lines of descent that live states belong to; 0 when no continuation of the model is alive."""
        ...


def beyond_context(want: int, have: int) -> CapacityExceeded:
    """The error for a state that would be longer than the context."""
    return CapacityExceeded(
        f"{want} tokens do not fit the context of {have}; start from a shorter history",
        code="context",
        have=have,
        want=want,
    )
