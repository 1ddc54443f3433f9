"""The manifest: the canonical record of one durable boundary; its id is the digest of its bytes (FORMAT.md, "Manifests").

A manifest names the chunks that hold the state, the manifests it came from, the fingerprint it fits, and where the computation
stands. It knows nothing of what the state means: a language model and a simulation use the same record. It holds no clock, so equal
boundaries with equal parents are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from forkpoint.errors import Corrupt, Error, Incompatible, InvalidInput
from forkpoint.ids import Bytes, ChunkId, ManifestId, digest_of, parse_object_id
from forkpoint.state.canonical import Record, Value, canonical_bytes, parse_canonical
from forkpoint.state.fingerprint import Fingerprint

FORMAT: Final = "forkpoint.manifest"
VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 20
KINDS: Final = ("llm", "field")
ROLES: Final = ("continues", "perturbs", "assimilates", "adopts")

Migration = Callable[[Mapping[str, Value]], Mapping[str, Value]]
MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""From a version to the next: each takes a decoded record of its version and returns one of the following version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """A chunk of a group: its id, size and the half-open range of each axis that it covers, axes in order of name."""

    chunk_id: ChunkId
    num_bytes: int
    domain: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The chunks of one state group. ``kind`` is ``tokens`` (token-indexed), ``window``, ``boundary`` or ``field``."""

    name: str
    kind: str
    chunks: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """A causal parent. ``role`` is continues, perturbs, assimilates or adopts."""

    role: str
    manifest_id: ManifestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One durable boundary.

    Attributes:
        kind: ``llm`` or ``field``.
        fingerprint: what the state fits, and whose bits it promises.
        boundary: where the computation stands; for ``llm``: position, pending (None for a session that holds no pending
            token), prompt_length, sampling.
        groups: the state, by group name.
        parents: causal parents, in order.
        payload: small facts of the application, at most 1 MiB: message, chat turns, labels.
    """

    kind: str
    fingerprint: Fingerprint
    boundary: Record
    groups: tuple[Group, ...]
    parents: tuple[Parent, ...] = ()
    payload: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"manifest kind {self.kind!r} is not one of {KINDS}", code="manifest", field="kind")
        names = [group.name for group in self.groups]
        if names != sorted(set(names)):
            raise InvalidInput(f"groups {names} must differ and stand in order", code="manifest", field="groups")
        for parent in self.parents:
            if parent.role not in ROLES:
                raise InvalidInput(
                    f"parent role {parent.role!r} is not one of {ROLES}", code="manifest", field="parents"
                )
        have = len(canonical_bytes(self.payload))
        if have > MAX_PAYLOAD_BYTES:
            raise InvalidInput(
                f"a payload of {have} bytes is over {MAX_PAYLOAD_BYTES}; store less in it", code="payload", have=have
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks, shared or not."""
        return sum(chunk.num_bytes for chunk in self.chunks())

    def chunks(self) -> Iterator[ChunkRef]:
        """Every chunk of every group."""
        for group in self.groups:
            yield from group.chunks


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes; their digest is the manifest's id."""
    return canonical_bytes(
        {
            "boundary": manifest.boundary,
            "fingerprint": {"execution": manifest.fingerprint.execution, "state": manifest.fingerprint.state},
            "format": FORMAT,
            "groups": [_group_record(group) for group in manifest.groups],
            "kind": manifest.kind,
            "parents": [{"id": parent.manifest_id, "role": parent.role} for parent in manifest.parents],
            "payload": manifest.payload,
            "version": VERSION,
        }
    )


def manifest_id(manifest: Manifest) -> ManifestId:
    """The id a manifest has once stored."""
    return digest_of([encode_manifest(manifest)])


def decode_manifest(data: Bytes) -> Manifest:
    """Read a manifest of this or an older version.

    Raises:
        Corrupt: ``corrupt.manifest`` or ``corrupt.record`` for bytes that are no manifest.
        Incompatible: ``incompatible.manifest_version`` for a version newer than this program reads.
        InvalidInput: ``invalid_input.manifest_size`` above 64 MiB.
    """
    if memoryview(data).nbytes > MAX_MANIFEST_BYTES:
        raise InvalidInput(
            f"a manifest of {memoryview(data).nbytes} bytes is over {MAX_MANIFEST_BYTES}", code="manifest_size"
        )
    record = parse_canonical(data, "manifest")
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise _corrupt("it does not say that it is one")
    try:
        return _from_record(_migrated(record, MIGRATIONS))
    except (InvalidInput, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(str(error)) from error


def _migrated(record: Mapping[str, Value], migrations: Mapping[int, Migration]) -> Mapping[str, Value]:
    version = record.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _corrupt(f"version {version!r}")
    if version > VERSION:
        raise Incompatible(
            f"manifest version {version} is newer than {VERSION}, the newest this program reads; update forkpoint",
            code="manifest_version", field="version", have=version, want=VERSION,
        )  # fmt: skip
    while version < VERSION:
        record = migrations[version](record)
        version += 1
    return record


def _group_record(group: Group) -> Record:
    chunks: list[Value] = [
        {
            "bytes": chunk.num_bytes,
            "domain": [[axis, start, stop] for axis, start, stop in chunk.domain],
            "id": chunk.chunk_id,
        }
        for chunk in group.chunks
    ]
    return {"chunks": chunks, "kind": group.kind, "name": group.name}


_FIELDS: Final = {"boundary", "fingerprint", "format", "groups", "kind", "parents", "payload", "version"}


def _from_record(record: Mapping[str, Value]) -> Manifest:
    if set(record) != _FIELDS:
        raise _corrupt(f"its fields are {sorted(record)}")
    fingerprint = _map(record["fingerprint"])
    return Manifest(
        kind=_text(record["kind"]),
        fingerprint=Fingerprint(state=_map(fingerprint["state"]), execution=_map(fingerprint["execution"])),
        boundary=_map(record["boundary"]),
        groups=tuple(_group(_map(item)) for item in _list(record["groups"])),
        parents=tuple(
            Parent(role=_text(_map(item)["role"]), manifest_id=parse_object_id(_text(_map(item)["id"])))
            for item in _list(record["parents"])
        ),
        payload=_map(record["payload"]),
    )


def _group(record: Record) -> Group:
    return Group(
        name=_text(record["name"]),
        kind=_text(record["kind"]),
        chunks=tuple(_chunk(_map(item)) for item in _list(record["chunks"])),
    )


def _chunk(record: Record) -> ChunkRef:
    return ChunkRef(
        chunk_id=parse_object_id(_text(record["id"])),
        num_bytes=_natural(record["bytes"]),
        domain=tuple(_range(_list(item)) for item in _list(record["domain"])),
    )


def _range(item: Sequence[Value]) -> tuple[str, int, int]:
    axis, start, stop = item
    return _text(axis), _natural(start), _natural(stop)


def _map(value: Value) -> Record:
    if not isinstance(value, Mapping):
        raise _corrupt(f"{value!r} is not a map")
    return value


def _list(value: Value) -> Sequence[Value]:
    if not isinstance(value, list):
        raise _corrupt(f"{value!r} is not a list")
    return value


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise _corrupt(f"{value!r} is not a string")
    return value


def _natural(value: Value) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _corrupt(f"{value!r} is not a count")
    return value


def _corrupt(why: str) -> Error:
    return Corrupt(f"not a manifest: {why}", code="manifest")
