"""The manifest: the canonical record of one durable boundary; its id is the digest of its bytes (FORMAT.md, "Manifests").

A manifest names the chunks that hold the state, the manifests it came from, the fingerprint it fits, and where the computation
stands. It knows nothing of what the state means: a language model and a simulation use the same record. It holds no clock, so equal
boundaries with equal parents are one object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from forkpoint.errors import Corrupt, Error, InvalidInput
from forkpoint.ids import Bytes, ChunkId, ManifestId, digest_of, parse_object_id
from forkpoint.state.canonical import Record, Value, canonical_bytes, parse_canonical
from forkpoint.state.domain import Range, check_domain
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.record import as_count, as_fields, as_list, as_map, as_text, format_version, is_count

FORMAT: Final = "forkpoint.manifest"
VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 20
KINDS: Final = ("llm", "field")
GROUP_KINDS: Final = ("tokens", "window", "boundary", "field")
ROLES: Final = ("continues", "perturbs", "assimilates", "adopts")

_GROUP_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")

Migration = Callable[[Record], Record]
MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""From a version to the next: each takes a decoded record of its version and returns one of the following version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """A chunk of a group: its id, size and the half-open range of each axis that it covers, axes in order of name."""

    chunk_id: ChunkId
    num_bytes: int
    domain: tuple[Range, ...]

    def __post_init__(self) -> None:
        parse_object_id(self.chunk_id)
        check_domain(self.domain)
        if not is_count(self.num_bytes):
            raise _refusal("chunks", f"chunk {self.chunk_id} cannot have {self.num_bytes!r} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The chunks of one state group. ``kind`` is ``tokens`` (token-indexed), ``window``, ``boundary`` or ``field``."""

    name: str
    kind: str
    chunks: tuple[ChunkRef, ...]

    def __post_init__(self) -> None:
        if not _GROUP_NAME.fullmatch(self.name):
            raise _refusal("groups", f"group {self.name!r:.160} needs a name of 1 to 64 of a-z, 0-9, '_', '.' and '-'")
        if self.kind not in GROUP_KINDS:
            raise _refusal("groups", f"group {self.name} has kind {self.kind!r:.64}, which is not one of {GROUP_KINDS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """A causal parent. ``role`` is continues, perturbs, assimilates or adopts."""

    role: str
    manifest_id: ManifestId

    def __post_init__(self) -> None:
        parse_object_id(self.manifest_id)
        if self.role not in ROLES:
            raise _refusal("parents", f"parent role {self.role!r:.64} is not one of {ROLES}")


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
            raise _refusal("kind", f"manifest kind {self.kind!r:.64} is not one of {KINDS}")
        names = [group.name for group in self.groups]
        if names != sorted(set(names)):
            raise _refusal("groups", f"groups {names} must differ and stand in order")
        if len(set(self.parents)) != len(self.parents):
            raise _refusal("parents", "a parent stands twice in one role")
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
    """Canonical bytes; their digest is the manifest's id.

    Raises:
        InvalidInput: ``invalid_input.record`` for a value without canonical form, ``invalid_input.manifest_size`` above 64 MiB.
    """
    data = canonical_bytes(
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
    _check_size(len(data))
    return data


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
    _check_size(memoryview(data).nbytes)
    try:
        return _from_record(migrated(as_map(parse_canonical(data, "manifest"))))
    except InvalidInput as error:
        raise _corrupt(error.message) from error


def migrated(record: Record, *, migrations: Mapping[int, Migration] = MIGRATIONS, newest: int = VERSION) -> Record:
    """A decoded manifest of any version up to ``newest``, brought to ``newest`` one version at a time.

    Raises:
        Corrupt: ``corrupt.manifest`` when a migration finds the record unsound.
        InvalidInput, Incompatible: as :func:`format_version`.
    """
    version = format_version(record, name="manifest", newest=newest)
    for step in range(version, newest):
        try:
            record = migrations[step](record)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(f"version {step} cannot be migrated ({error!r:.256})") from error
    return record


def _check_size(have: int) -> None:
    if have > MAX_MANIFEST_BYTES:
        raise InvalidInput(f"a manifest of {have} bytes is over {MAX_MANIFEST_BYTES}", code="manifest_size", have=have)


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


def _from_record(record: Record) -> Manifest:
    as_fields(record, "boundary", "fingerprint", "format", "groups", "kind", "parents", "payload", "version")
    fingerprint = as_fields(record["fingerprint"], "execution", "state")
    return Manifest(
        kind=as_text(record["kind"]),
        fingerprint=Fingerprint(state=as_map(fingerprint["state"]), execution=as_map(fingerprint["execution"])),
        boundary=as_map(record["boundary"]),
        groups=tuple(_group(as_fields(item, "chunks", "kind", "name")) for item in as_list(record["groups"])),
        parents=tuple(_parent(as_fields(item, "id", "role")) for item in as_list(record["parents"])),
        payload=as_map(record["payload"]),
    )


def _parent(record: Record) -> Parent:
    return Parent(role=as_text(record["role"]), manifest_id=parse_object_id(as_text(record["id"])))


def _group(record: Record) -> Group:
    return Group(
        name=as_text(record["name"]),
        kind=as_text(record["kind"]),
        chunks=tuple(_chunk(as_fields(item, "bytes", "domain", "id")) for item in as_list(record["chunks"])),
    )


def _chunk(record: Record) -> ChunkRef:
    return ChunkRef(
        chunk_id=ChunkId(as_text(record["id"])),
        num_bytes=as_count(record["bytes"]),
        domain=tuple(_range(as_list(item)) for item in as_list(record["domain"])),
    )


def _range(item: Sequence[Value]) -> Range:
    if len(item) != 3:
        raise _refusal("domain", f"a range of {len(item)} values is not axis, start, stop")
    return as_text(item[0]), as_count(item[1]), as_count(item[2])


def _refusal(field_name: str, why: str) -> InvalidInput:
    return InvalidInput(why, code="manifest", field=field_name)


def _corrupt(why: str) -> Error:
    return Corrupt(f"not a manifest: {why}", code="manifest")
