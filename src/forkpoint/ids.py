"""Content ids: BLAKE3-256 of the exact bytes of an object, written ``b3:<64 lower-case hex digits>``.

An id names bytes; it is not a permission. Equal bytes have equal ids on every machine and in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NewType, TypeAlias

from blake3 import blake3

from forkpoint.errors import InvalidInput

ObjectId = NewType("ObjectId", str)
"""``b3:<hex>`` of any stored object."""

ChunkId: TypeAlias = ObjectId
ManifestId: TypeAlias = ObjectId
MoveId: TypeAlias = ObjectId

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Readable contiguous memory; never written through."""

_WRITTEN: Final = re.compile(r"b3:[0-9a-f]{64}")


class ObjectKind(StrEnum):
    """What an object is. A kind is a folder of a store, so that one kind can be listed without reading the others."""

    CHUNK = "chunk"
    MANIFEST = "manifest"
    MOVE = "move"
    TOKENIZER = "tokenizer"


def digest_of(parts: Iterable[Bytes]) -> ObjectId:
    """Id of the concatenation of ``parts``, without concatenating them."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return ObjectId("b3:" + hasher.hexdigest())


def parse_object_id(text: str) -> ObjectId:
    """Check that ``text`` is a complete id.

    Raises:
        InvalidInput: ``invalid_input.id`` if it is not ``b3:`` and 64 lower-case hex digits.
    """
    if not _WRITTEN.fullmatch(text):
        raise InvalidInput(f"{text!r} is not an object id; write b3: and 64 lower-case hex digits", code="id", id=text)
    return ObjectId(text)


def digest_bytes(object_id: ObjectId) -> bytes:
    """The 32 raw bytes of an id."""
    return bytes.fromhex(object_id[3:])


def id_from_bytes(digest: bytes) -> ObjectId:
    """The id whose raw digest is ``digest`` (32 bytes)."""
    assert len(digest) == 32
    return ObjectId("b3:" + digest.hex())


def short(object_id: ObjectId) -> str:
    """The first 12 hex digits: what people are shown."""
    return object_id[3:15]
