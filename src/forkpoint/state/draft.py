"""A draft: a boundary on its way to becoming a manifest. What an engine hands to a repository to be made durable.

A chunk of a draft yields its bytes whenever asked, because a publication may have to put them again (a collection may have doomed
what was already there). A chunk whose id is already known is not read unless the repository lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forkpoint.ids import Bytes, ObjectId, ObjectKind
from forkpoint.state.canonical import Record
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import ChunkRef, Group, Manifest, Parent


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChunk:
    """One chunk to be stored.

    Attributes:
        domain: (axis, start, stop) ranges, axes in order of name.
        ref: id and size when these bytes were hashed before; they are immutable, so it stays true.
        parts: yields the chunk's canonical bytes, end to end; callable many times.
    """

    domain: tuple[tuple[str, int, int], ...]
    ref: ChunkRef | None
    parts: Callable[[], Sequence[Bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGroup:
    """The chunks of one state group, in order."""

    name: str
    kind: str
    chunks: tuple[DraftChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A whole object that a manifest's fingerprint names and that must be stored beside it (a tokenizer)."""

    kind: ObjectKind
    object_id: ObjectId
    parts: Callable[[], Sequence[Bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A boundary to be committed.

    Attributes:
        tokens: processed token ids for ``llm`` (the source of prefix keys); empty for other kinds.
        is_trusted: the state was computed or verified here, so that its prefixes may be indexed.
        check: called after the bytes were captured and before anything is advertised; raises when what was captured may be
            mixed (the model's weights changed meanwhile).
    """

    kind: str
    fingerprint: Fingerprint
    boundary: Record
    groups: tuple[DraftGroup, ...]
    parents: tuple[Parent, ...] = ()
    payload: Record = field(default_factory=dict)
    assets: tuple[Asset, ...] = ()
    tokens: Sequence[int] = ()
    is_trusted: bool = True
    check: Callable[[], None] = lambda: None


def assemble(draft: Draft, refs: Sequence[ChunkRef]) -> Manifest:
    """The manifest of a draft whose chunks, in order over all groups, are stored as ``refs``."""
    remaining = iter(refs)
    groups = [
        Group(name=group.name, kind=group.kind, chunks=tuple(next(remaining) for _ in group.chunks))
        for group in draft.groups
    ]
    return Manifest(
        kind=draft.kind,
        fingerprint=draft.fingerprint,
        boundary=draft.boundary,
        groups=tuple(sorted(groups, key=lambda group: group.name)),
        parents=draft.parents,
        payload=draft.payload,
    )
