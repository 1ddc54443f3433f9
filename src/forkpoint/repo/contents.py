"""Reading what a manifest names: its record, its chunks, its tokens and their text. Only the store is asked.

The store verifies bytes against ids; what is checked here is that the parts fit together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from forkpoint.errors import Corrupt, Error
from forkpoint.ids import ChunkId, ManifestId, ObjectId, ObjectKind, parse_object_id
from forkpoint.state.chunk import Chunk, parse_chunk
from forkpoint.state.manifest import ChunkRef, Group, Manifest, decode_manifest
from forkpoint.store.base import Store

TOKEN_AXIS = "token"
TOKEN_SLAB = "tokens"
MAX_TOKEN: Final = (1 << 32) - 1
"""Token ids are stored as U32."""

TOKEN_GROUPS = ("tokens", "window")
"""The kind of the groups whose chunks carry one range of the token axis each, and their token ids."""


def read_manifest(store: Store, manifest_id: ManifestId) -> Manifest:
    """The manifest of this id. Raises NotFound ``not_found.object``, Corrupt or Incompatible."""
    return decode_manifest(store.get(ObjectKind.MANIFEST, manifest_id))


def read_chunk(store: Store, chunk_id: ChunkId) -> Chunk:
    """The chunk of this id; its slabs are views into the store's bytes. Raises NotFound, Corrupt or Incompatible."""
    return parse_chunk(store.get(ObjectKind.CHUNK, chunk_id))


def position_of(manifest: Manifest) -> int | None:
    """Number of processed tokens, for kinds that have one."""
    return _natural(manifest, "position")


def pending_of(manifest: Manifest) -> int | None:
    """The token that the next step evaluates, if any. Raises Corrupt ``corrupt.tokens`` when it is no token id."""
    pending = _natural(manifest, "pending")
    if pending is not None and pending > MAX_TOKEN:
        raise _corrupt(f"its pending token is {pending}, and no token id is over {MAX_TOKEN}")
    return pending


def tokenizer_of(manifest: Manifest) -> ObjectId | None:
    """The tokenizer object that the fingerprint names, if any."""
    value = manifest.fingerprint.state.get("tokenizer")
    return parse_object_id(value) if isinstance(value, str) else None


def read_tokens(store: Store, manifest: Manifest) -> list[int]:
    """The token history: the ids of every processed position, and the pending token where there is one.

    Raises:
        Corrupt: ``corrupt.tokens`` when the chunks' ranges leave a gap, their ids do not fill their ranges, or the pending
            token is no token id.
    """
    tokens: list[int] = []
    position = position_of(manifest) or 0
    for chunk in _token_chunks(store, manifest) if position else ():
        start, stop = token_range(chunk)
        if start != len(tokens):
            raise _corrupt(f"chunk {chunk.chunk_id} begins at token {start} where {len(tokens)} is next")
        tokens.extend(read_chunk_tokens(store, chunk))
        if len(tokens) != stop:
            raise _corrupt(f"chunk {chunk.chunk_id} brings the history to {len(tokens)} tokens, not {stop}")
    if len(tokens) != position:
        raise _corrupt(f"its chunks hold {len(tokens)} tokens where the position is {position}")
    pending = pending_of(manifest)
    return tokens if pending is None else [*tokens, pending]


def read_chunk_tokens(store: Store, ref: ChunkRef) -> Sequence[int]:
    """The token ids that a token chunk carries. Raises Corrupt ``corrupt.tokens`` when they do not fill its range."""
    chunk = read_chunk(store, ref.chunk_id)
    spec, slab = chunk.specs.get(TOKEN_SLAB), chunk.slabs.get(TOKEN_SLAB)
    start, stop = token_range(ref)
    if (
        spec is None
        or slab is None
        or spec.dtype != "U32"
        or spec.shape != (stop - start,)
        or chunk.domain != ref.domain
    ):
        raise _corrupt(f"chunk {ref.chunk_id} does not carry the ids of tokens [{start}, {stop})")
    return struct.unpack(f"<{stop - start}I", slab)


def token_range(ref: ChunkRef) -> tuple[int, int]:
    """The tokens [start, stop) that a chunk of a token-indexed group covers. Raises Corrupt ``corrupt.tokens``."""
    for axis, start, stop in ref.domain:
        if axis == TOKEN_AXIS:
            return start, stop
    raise _corrupt(f"chunk {ref.chunk_id} of a token-indexed group names no token range")


def _token_chunks(store: Store, manifest: Manifest) -> tuple[ChunkRef, ...]:
    """The chunks of the first group whose chunks carry token ids."""
    for group in manifest.groups:
        if group.kind in TOKEN_GROUPS and _carries_tokens(store, group):
            return group.chunks
    raise _corrupt("no group of kind tokens carries token ids")


def _carries_tokens(store: Store, group: Group) -> bool:
    return bool(group.chunks) and TOKEN_SLAB in read_chunk(store, group.chunks[0].chunk_id).specs


def _natural(manifest: Manifest, field: str) -> int | None:
    value = manifest.boundary.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Corrupt(f"not a sound manifest: its {field} is {value!r}", code="manifest")
    return value


def _corrupt(why: str) -> Error:
    return Corrupt(f"the manifest's token history cannot be read: {why}", code="tokens")
