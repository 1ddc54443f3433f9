"""Values that cross the catalog's edge: what callers write into it and read back. No SQL here.

Times are UTC seconds since 1970 with microseconds as integers (``*_us``), taken from the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from forkpoint.ids import ChunkId, ManifestId, MoveId, ObjectId, ObjectKind


class ParentEdge(NamedTuple):
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
    Parents are in order and may be absent from the catalog (a shallow history); ``introduced`` is in order of id when read.
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
    """One ref move: the reflog. ``old`` and ``new`` are manifest ids, or ``ref:<name>`` for a symbolic HEAD, or None.

    ``at_us`` is kept as written, so that a rebuilt catalog keeps the times; ``tx`` is not: the catalog stamps its own.
    """

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


class LogRow(NamedTuple):
    """What a log prints of one manifest. A parent that the catalog does not hold is still named.

    A tuple, as a log makes tens of thousands of them.
    """

    manifest_id: ManifestId
    parents: tuple[ParentEdge, ...]
    kind: str
    position: int | None
    num_bytes: int
    message: str
    added_tx: int
    added_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest stored prefix: its length in chunks, and every row found up to there, by index and group.

    Every group has a row at index ``num_chunks - 1``; below it, rows may be missing (a chunk that was lost and removed).
    """

    num_chunks: int
    rows: tuple[PrefixRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoomedRow:
    """An object that collection will delete (``deleted_tx`` None), or has deleted."""

    object: ObjectRef
    doomed_tx: int
    deleted_tx: int | None


class DemandKind(StrEnum):
    """What a worker waits for."""

    MANIFEST = "manifest"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRow:
    """``worker`` wants ``subject`` (a manifest id or a prefix key) to be restorable near it."""

    demand_id: int
    kind: DemandKind
    subject: ObjectId
    worker: str
    wanted_since_us: int
    fulfilled_at_us: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """What was chosen for ``subject`` and why; ``detail`` is JSON text with the candidates, whole units only."""

    decision_id: int
    tx: int
    subject: str
    kind: str
    chosen: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeRow:
    """The mark that a purge for lawful deletion left."""

    manifest_id: ManifestId
    tx: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many live facts and records there are."""

    num_manifests: int
    num_chunks: int
    chunk_bytes: int
    num_prefixes: int
    num_refs: int
    num_moves: int
    num_pending_deletions: int
    num_transactions: int
