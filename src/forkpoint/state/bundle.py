"""The bundle: objects in one byte string, for snapshots and for carrying continuations between stores (FORMAT.md, "Bundles").

Layout: 8 bytes magic, 8 bytes little-endian length of the index, the index as canonical JSON padded with spaces to a multiple of 64,
then the objects, each starting at a multiple of 64. The index names what the bundle is about (``heads``) and lists every object
with kind, id and size. Pure bytes: a bundle claims nothing; whoever opens it verifies ids and decides what to trust.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import Corrupt, Error, InvalidInput
from forkpoint.ids import Bytes, ManifestId, ObjectId, ObjectKind, digest_of, parse_object_id
from forkpoint.state.canonical import Record, canonical_bytes, parse_canonical
from forkpoint.state.record import as_count, as_fields, as_list, as_map, as_text, format_version

MAGIC: Final = b"FPBUNDLE"
FORMAT: Final = "forkpoint.bundle"
VERSION: Final = 1
ALIGNMENT: Final = 64
MAX_INDEX_BYTES: Final = 64 << 20
MAX_BUNDLE_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleEntry:
    """One object of a bundle. ``parts`` are its bytes, end to end."""

    kind: ObjectKind
    object_id: ObjectId
    parts: Sequence[Bytes]

    @property
    def num_bytes(self) -> int:
        """Size of the object."""
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A parsed bundle whose objects have been verified against their ids."""

    heads: tuple[ManifestId, ...]
    objects: Mapping[tuple[ObjectKind, ObjectId], memoryview]

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """Bytes of an object. Raises Corrupt ``corrupt.bundle`` when the bundle lacks it."""
        try:
            return self.objects[kind, object_id]
        except KeyError:
            raise _corrupt(f"it lacks {kind} {object_id}") from None


def encode_bundle(heads: Sequence[ManifestId], entries: Sequence[BundleEntry]) -> Iterator[Bytes]:
    """The bytes of a bundle as parts to be written end to end. Entries are written in the order given.

    Raises:
        InvalidInput: ``invalid_input.bundle`` for a head or object that stands twice, or an index above 64 MiB.
    """
    index = _index_bytes(heads, entries)
    yield MAGIC + struct.pack("<Q", len(index)) + index
    for entry in entries:
        yield from entry.parts
        yield bytes(-entry.num_bytes % ALIGNMENT)


def bundle_size(heads: Sequence[ManifestId], entries: Sequence[BundleEntry]) -> int:
    """Size in bytes of what :func:`encode_bundle` yields."""
    padded = (entry.num_bytes + (-entry.num_bytes % ALIGNMENT) for entry in entries)
    return 16 + len(_index_bytes(heads, entries)) + sum(padded)


def parse_bundle(data: Bytes) -> Bundle:
    """Read a bundle and verify every object in it.

    Raises:
        Corrupt: ``corrupt.bundle`` for a torn, flipped or foreign byte string.
        Incompatible: ``incompatible.bundle_version`` for a newer version.
        InvalidInput: ``invalid_input.bundle_size`` above 1 TiB.
    """
    view = memoryview(data).toreadonly().cast("B")
    if view.nbytes > MAX_BUNDLE_BYTES:
        raise InvalidInput(f"a bundle of {view.nbytes} bytes is over {MAX_BUNDLE_BYTES}", code="bundle_size")
    if view.nbytes < 16 or bytes(view[:8]) != MAGIC:
        raise _corrupt("it does not begin with FPBUNDLE")
    (length,) = struct.unpack("<Q", view[8:16])
    if length > MAX_INDEX_BYTES or length % ALIGNMENT != 48 or 16 + length > view.nbytes:
        raise _corrupt(f"its index claims {length} bytes")
    return _read_objects(view, 16 + length, _read_index(bytes(view[16 : 16 + length])))


def _index_bytes(heads: Sequence[ManifestId], entries: Sequence[BundleEntry]) -> bytes:
    listed: list[Record] = [
        {"bytes": entry.num_bytes, "id": entry.object_id, "kind": str(entry.kind)} for entry in entries
    ]
    objects = [(entry.kind, entry.object_id) for entry in entries]
    if len(set(heads)) != len(heads) or len(set(objects)) != len(objects):
        raise InvalidInput("a head or an object of the bundle stands twice; name each once", code="bundle")
    index = _padded(canonical_bytes({"format": FORMAT, "heads": list(heads), "objects": listed, "version": VERSION}))
    if len(index) > MAX_INDEX_BYTES:
        raise InvalidInput(f"a bundle index of {len(index)} bytes is over {MAX_INDEX_BYTES}", code="bundle")
    return index


def _padded(raw: bytes) -> bytes:
    return raw + b" " * (-(16 + len(raw)) % ALIGNMENT)


def _read_index(data: bytes) -> Record:
    raw = data.rstrip(b" ")
    try:
        index = as_map(parse_canonical(raw, "bundle index"))
        format_version(index, name="bundle", newest=VERSION)
        as_fields(index, "format", "heads", "objects", "version")
    except InvalidInput as error:
        raise _corrupt(error.message) from error
    if _padded(raw) != data:
        raise _corrupt("its index is padded with more spaces than needed")
    return index


def _read_objects(view: memoryview, offset: int, index: Record) -> Bundle:
    objects: dict[tuple[ObjectKind, ObjectId], memoryview] = {}
    try:
        heads = tuple(parse_object_id(as_text(head)) for head in as_list(index["heads"]))
        for item in as_list(index["objects"]):
            kind, object_id, size = _read_entry(as_fields(item, "bytes", "id", "kind"))
            end = offset + size + (-size % ALIGNMENT)
            if end > view.nbytes or any(view[offset + size : end]):
                raise _corrupt(f"{kind} {object_id} lies outside it or is padded with other bytes than zeros")
            if (kind, object_id) in objects:
                raise _corrupt(f"{kind} {object_id} stands in it twice")
            objects[kind, object_id] = _verified(view[offset : offset + size], kind, object_id)
            offset = end
    except InvalidInput as error:
        raise _corrupt(f"its index cannot be read ({error.message})") from error
    if offset != view.nbytes:
        raise _corrupt(f"it has {view.nbytes} bytes where its index accounts for {offset}")
    if len(set(heads)) != len(heads):
        raise _corrupt("a head stands in it twice")
    return Bundle(heads=heads, objects=objects)


def _read_entry(record: Record) -> tuple[ObjectKind, ObjectId, int]:
    kind = as_text(record["kind"])
    if kind not in list(ObjectKind):
        raise _corrupt(f"it holds an object of kind {kind!r:.64}")
    return ObjectKind(kind), parse_object_id(as_text(record["id"])), as_count(record["bytes"])


def _verified(data: memoryview, kind: ObjectKind, object_id: ObjectId) -> memoryview:
    if digest_of([data]) != object_id:
        raise _corrupt(f"{kind} {object_id} does not have this digest")
    return data


def _corrupt(why: str) -> Error:
    return Corrupt(f"not a sound bundle: {why}", code="bundle")
