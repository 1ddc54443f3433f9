"""Verifying one manifest on demand: every digest recomputed now, and the parts checked against each other."""

from __future__ import annotations

import time
from dataclasses import dataclass

from forkpoint.errors import Corrupt
from forkpoint.ids import ManifestId, ObjectKind, short
from forkpoint.repo.contents import (
    TOKEN_GROUPS,
    TOKEN_SLAB,
    read_chunk,
    read_chunk_tokens,
    read_manifest,
    read_tokens,
    token_range,
)
from forkpoint.state.manifest import ChunkRef, Manifest
from forkpoint.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReceipt:
    """What was verified. ``num_tokens`` counts the history, the pending token included; 0 for kinds without."""

    manifest_id: ManifestId
    num_chunks: int
    num_bytes: int
    num_tokens: int
    elapsed_ms: float


def verify_manifest(store: Store, manifest_id: ManifestId) -> VerificationReceipt:
    """Recompute the digests of a manifest and of all its chunks, and compare what they claim with one another.

    Raises:
        NotFound: ``not_found.object`` when a part is missing.
        Corrupt: naming the part that is not what its id, its manifest or its neighbours say.
    """
    started = time.perf_counter()
    store.verify(ObjectKind.MANIFEST, manifest_id)
    manifest = read_manifest(store, manifest_id)
    chunks = {chunk.chunk_id: chunk for chunk in manifest.chunks()}
    for chunk in chunks.values():
        store.verify(ObjectKind.CHUNK, chunk.chunk_id)
        _check_claim(store, chunk)
    return VerificationReceipt(
        manifest_id=manifest_id,
        num_chunks=len(chunks),
        num_bytes=sum(chunk.num_bytes for chunk in chunks.values()),
        num_tokens=_check_tokens(store, manifest),
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )


def _check_claim(store: Store, ref: ChunkRef) -> None:
    """What a manifest says of a chunk must be what the chunk says of itself."""
    have, domain = store.size(ObjectKind.CHUNK, ref.chunk_id), read_chunk(store, ref.chunk_id).domain
    if have != ref.num_bytes or domain != ref.domain:
        raise Corrupt(
            f"chunk {short(ref.chunk_id)} has {have} bytes over {domain}, its manifest says {ref.num_bytes} over {ref.domain}",
            code="manifest", chunk_id=ref.chunk_id,
        )  # fmt: skip


def _check_tokens(store: Store, manifest: Manifest) -> int:
    """Every token-indexed group that carries ids must carry the same history."""
    if manifest.kind != "llm":
        return 0
    history = read_tokens(store, manifest)
    for group in manifest.groups:
        if group.kind not in TOKEN_GROUPS:
            continue
        for ref in group.chunks:
            carries = TOKEN_SLAB in read_chunk(store, ref.chunk_id).specs
            start, stop = token_range(ref)
            if carries and list(read_chunk_tokens(store, ref)) != history[start:stop]:
                raise Corrupt(
                    f"chunk {short(ref.chunk_id)} of group {group.name} carries other token ids than its neighbours",
                    code="tokens", chunk_id=ref.chunk_id,
                )  # fmt: skip
    return len(history)
