"""The part of a publication before the catalog's lock: from a draft to objects in the store (steps 1 to 3 of publication.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from forkpoint.catalog.records import ObjectRef
from forkpoint.errors import Corrupt
from forkpoint.ids import Bytes, ChunkId, ManifestId, ObjectKind
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import tokenizer_of
from forkpoint.repo.rows import chunk_ids
from forkpoint.state.draft import Asset, Draft, DraftChunk, assemble
from forkpoint.state.manifest import ChunkRef, Manifest, encode_manifest
from forkpoint.store.base import NewObject, PutReceipt

Parts = Callable[[], Sequence[Bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A manifest whose bytes, and those of all it names, are in the store, though nothing says so yet.

    Attributes:
        sources: yields the bytes of each of these objects again.
        put_chunks: the chunks that were put; the others were relied on because the catalog held them.
        written: sizes of the chunks that the store did not have.
        tokens, is_trusted: as in the draft.
        started_s: when the first byte was put, by this machine's clock.
    """

    manifest_id: ManifestId
    manifest: Manifest
    sources: Mapping[ObjectRef, Parts]
    put_chunks: frozenset[ChunkId]
    written: Mapping[ChunkId, int]
    tokens: Sequence[int]
    is_trusted: bool
    started_s: float

    def all_chunks(self) -> frozenset[ChunkId]:
        """Every chunk that the manifest refers to."""
        return chunk_ids(self.manifest)


def stage(backing: Backing, draft: Draft) -> Staged:
    """Make a draft's chunks, assets and manifest durable.

    The draft's check runs beside the writing: it digests what a model holds, which needs no disk.

    Raises:
        Corrupt: ``corrupt.draft`` when the bytes of a chunk are no longer those that were hashed. Else what the store and
            the draft's check raise.
    """
    started_s = time.time()
    with ThreadPoolExecutor(1, thread_name_prefix="forkpoint-check") as checker:
        checked = checker.submit(draft.check)
        refs, receipts = _put_chunks(backing, draft)
        checked.result()
    manifest = assemble(draft, refs)
    raw = encode_manifest(manifest)
    manifest_id = backing.store.put(NewObject(kind=ObjectKind.MANIFEST, parts=[raw])).object_id
    sources = dict(_sources(backing, draft, manifest, refs))
    sources[ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id)] = lambda: [raw]
    return Staged(
        manifest_id=manifest_id,
        manifest=manifest,
        sources=sources,
        put_chunks=frozenset(receipt.object_id for receipt in receipts),
        written={receipt.object_id: receipt.num_bytes for receipt in receipts if receipt.was_written},
        tokens=draft.tokens,
        is_trusted=draft.is_trusted,
        started_s=started_s,
    )


def _put_chunks(backing: Backing, draft: Draft) -> tuple[list[ChunkRef], list[PutReceipt]]:
    """Put the chunks that the repository lacks, and say which chunk each of the draft's became, in order.

    Assets are few, and always put: that costs little where they are sound, and replaces one that was damaged.
    """
    chunks = [chunk for group in draft.groups for chunk in group.chunks]
    absent = _absent(backing, chunks)
    receipts = backing.store.put_many(_batch([chunks[index] for index in absent], draft.assets))
    refs = {index: _checked_ref(chunks[index], receipt) for index, receipt in zip(absent, receipts, strict=False)}
    for asset, receipt in zip(draft.assets, receipts[len(absent) :], strict=True):
        _check_id(str(asset.kind), asset.object_id, receipt)
    return [refs[index] if index in refs else _known_ref(chunk) for index, chunk in enumerate(chunks)], receipts[
        : len(absent)
    ]


def _absent(backing: Backing, chunks: Sequence[DraftChunk]) -> list[int]:
    """Places of the chunks to be put: one for each id that the catalog does not hold, and all that have no id yet."""
    known = {chunk.ref.chunk_id for chunk in chunks if chunk.ref is not None}
    seen = backing.catalog.has_chunks(known)
    absent: list[int] = []
    for index, chunk in enumerate(chunks):
        if chunk.ref is None:
            absent.append(index)
        elif chunk.ref.chunk_id not in seen:
            seen.add(chunk.ref.chunk_id)
            absent.append(index)
    return absent


def _batch(chunks: Sequence[DraftChunk], assets: Sequence[Asset]) -> Iterator[NewObject]:
    for chunk in chunks:
        yield NewObject(kind=ObjectKind.CHUNK, parts=chunk.parts())
    for asset in assets:
        yield NewObject(kind=asset.kind, parts=asset.parts())


def _sources(
    backing: Backing, draft: Draft, manifest: Manifest, refs: Sequence[ChunkRef]
) -> Iterator[tuple[ObjectRef, Parts]]:
    tokenizer_id = tokenizer_of(manifest)
    is_stored_only = all(asset.object_id != tokenizer_id for asset in draft.assets)
    if tokenizer_id is not None and is_stored_only and backing.store.has(ObjectKind.TOKENIZER, tokenizer_id):
        raw = backing.store.get(ObjectKind.TOKENIZER, tokenizer_id)
        yield ObjectRef(kind=ObjectKind.TOKENIZER, object_id=tokenizer_id), lambda: [raw]
    for asset in draft.assets:
        yield ObjectRef(kind=asset.kind, object_id=asset.object_id), asset.parts
    chunks = (chunk for group in draft.groups for chunk in group.chunks)
    for chunk, ref in zip(chunks, refs, strict=True):
        yield ObjectRef(kind=ObjectKind.CHUNK, object_id=ref.chunk_id), chunk.parts


def _known_ref(chunk: DraftChunk) -> ChunkRef:
    assert chunk.ref is not None
    return chunk.ref


def _checked_ref(chunk: DraftChunk, receipt: PutReceipt) -> ChunkRef:
    if chunk.ref is not None:
        _check_id("chunk", chunk.ref.chunk_id, receipt)
    return ChunkRef(chunk_id=receipt.object_id, num_bytes=receipt.num_bytes, domain=chunk.domain)


def _check_id(what: str, object_id: str, receipt: PutReceipt) -> None:
    if receipt.object_id != object_id:
        raise Corrupt(
            f"the bytes of {what} {object_id} changed after they were hashed: now {receipt.object_id}; nothing was published, "
            "capture the state again",
            code="draft", have=receipt.object_id, want=object_id,
        )  # fmt: skip
