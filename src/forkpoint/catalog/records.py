"""Values that cross the catalog's edge: what callers write into it and read back. No SQL here.

Times are UTC seconds since 1970 with microseconds as integers (``*_us``), taken from the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.ids import ChunkId, ManifestId, MoveId, ObjectId, ObjectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentEdge:
    """``role`` is continues (LLM and fields), perturbs, assimilates or adopts."""

    role: str
    manifest_id: ManifestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """A chunk that a manifest introduces: one it refers to and none of its known parents does."""

    chunk_id: ChunkId
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRow:
    """One durable boundary as the catalog knows it.

    ``position`` and ``pending`` are None for kinds without them. ``num_bytes`` counts every chunk of the manifest, shared
    or not. ``is_trusted`` says that its state was computed here, or verified: only then may its prefixes be indexed.
    """

    manifest_id: ManifestId
    kind: str
    state_id: ObjectId
    execution_id: ObjectId
    position: int | None
    pending: int | None
    num_bytes: int
    message: str
    is_trusted: bool
    tokenizer_id: ObjectId | None
    parents: tuple[ParentEdge, ...]
    introduced: tuple[ChunkRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """The prefix chain up to and including chunk ``index`` of ``group`` is stored as ``chunk_id``."""

    key: ObjectId
    execution_id: ObjectId
    group: str
    index: int
    chunk_id: ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class RefRow:
    """A ref as of some transaction. Exactly one of ``target`` and ``symbolic`` is set (``symbolic`` only for HEAD)."""

    name: str
    target: ManifestId | None
    symbolic: str | None
    move_id: MoveId
    added_tx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRow:
    """One ref move: the reflog. ``old`` and ``new`` are manifest ids, or ``ref:<name>`` for a symbolic HEAD, or None."""

    move_id: MoveId
    previous: MoveId | None
    ref: str
    old: str | None
    new: str | None
    tx: int
    at_us: int
    who: str
    message: str
    is_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRow:
    """One transaction of the history."""

    tx: int
    at_us: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """Names an object of a store."""

    kind: ObjectKind
    object_id: ObjectId
