"""Bundles in and out. What comes in was computed elsewhere: it is verified, stored and named, but never trusted.

A bundle holds one manifest, its chunks and its tokenizer, and no ancestors. An id is no permission: a chunk that a bundle does
not bring is not taken from the store, even if it is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from forkpoint.catalog.records import ObjectRef
from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.ids import Bytes, ManifestId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest, read_tokens, tokenizer_of
from forkpoint.repo.moves import cut_message
from forkpoint.repo.names import Expectation, branch_ref, check_expectation
from forkpoint.repo.publication import Publication, publication_of, publish_staged
from forkpoint.repo.resolution import resolve
from forkpoint.repo.staging import Parts, Staged
from forkpoint.state.bundle import Bundle, BundleEntry, encode_bundle, parse_bundle
from forkpoint.state.chunk import parse_chunk
from forkpoint.state.manifest import ChunkRef, Manifest, decode_manifest
from forkpoint.store.base import NewObject, Store


def export_bundle(backing: Backing, name: str) -> Iterator[Bytes]:
    """See :meth:`forkpoint.repo.repository.Repository.export_bundle`."""
    manifest_id = resolve(backing.catalog, name, None)
    return encode_bundle([manifest_id], list(_entries(backing.store, manifest_id)))


def commit_bundle(
    backing: Backing, data: Bytes, *, branch: str | None, expect: Expectation, message: str
) -> Publication:
    """See :meth:`forkpoint.repo.repository.Repository.commit_bundle`."""
    started = time.perf_counter()
    ref = None if branch is None else branch_ref(branch)
    check_expectation(expect)
    message = cut_message(message)
    staged = _stage(backing, parse_bundle(data))
    was_new, move_id = publish_staged(backing, staged, ref=ref, expect=expect, message=message)
    return publication_of(staged, was_new=was_new, move_id=move_id, elapsed_ms=(time.perf_counter() - started) * 1e3)


def _entries(store: Store, manifest_id: ManifestId) -> Iterator[BundleEntry]:
    """The parts of a bundle, manifest first. The views keep what they map alive, whatever collection does meanwhile."""
    manifest = read_manifest(store, manifest_id)
    yield _entry(store, ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id))
    tokenizer_id = tokenizer_of(manifest)
    if tokenizer_id is not None and store.has(ObjectKind.TOKENIZER, tokenizer_id):
        yield _entry(store, ObjectRef(kind=ObjectKind.TOKENIZER, object_id=tokenizer_id))
    for chunk_id in dict.fromkeys(chunk.chunk_id for chunk in manifest.chunks()):
        yield _entry(store, ObjectRef(kind=ObjectKind.CHUNK, object_id=chunk_id))


def _entry(store: Store, each: ObjectRef) -> BundleEntry:
    return BundleEntry(kind=each.kind, object_id=each.object_id, parts=[store.get(each.kind, each.object_id)])


def _stage(backing: Backing, bundle: Bundle) -> Staged:
    """Check a bundle's one manifest against the parts it brings, and put them: the manifest last."""
    if len(bundle.heads) != 1:
        raise InvalidInput(
            f"a bundle of {len(bundle.heads)} heads cannot be committed; export one continuation a bundle",
            code="bundle",
        )
    started_s = time.time()
    head = bundle.heads[0]
    raw = bundle.get(ObjectKind.MANIFEST, head)
    manifest = decode_manifest(raw)
    sources = dict(_checked_sources(bundle, manifest))
    receipts = backing.store.put_many(NewObject(kind=each.kind, parts=parts()) for each, parts in sources.items())
    backing.store.put(NewObject(kind=ObjectKind.MANIFEST, parts=[raw]))
    if manifest.kind == "llm":
        read_tokens(backing.store, manifest)
    chunks = [receipt for receipt in receipts if receipt.kind is ObjectKind.CHUNK]
    return Staged(
        manifest_id=head,
        manifest=manifest,
        sources={**sources, ObjectRef(kind=ObjectKind.MANIFEST, object_id=head): lambda: [raw]},
        put_chunks=frozenset(receipt.object_id for receipt in chunks),
        written={receipt.object_id: receipt.num_bytes for receipt in chunks if receipt.was_written},
        tokens=(),
        is_trusted=False,
        started_s=started_s,
    )


def _checked_sources(bundle: Bundle, manifest: Manifest) -> Iterator[tuple[ObjectRef, Parts]]:
    tokenizer_id = tokenizer_of(manifest)
    if tokenizer_id is not None and (ObjectKind.TOKENIZER, tokenizer_id) in bundle.objects:
        yield _source(bundle, ObjectRef(kind=ObjectKind.TOKENIZER, object_id=tokenizer_id))
    for ref in manifest.chunks():
        _check_chunk(bundle, ref)
        yield _source(bundle, ObjectRef(kind=ObjectKind.CHUNK, object_id=ref.chunk_id))


def _source(bundle: Bundle, each: ObjectRef) -> tuple[ObjectRef, Parts]:
    view = bundle.get(each.kind, each.object_id)
    return each, lambda: [view]


def _check_chunk(bundle: Bundle, ref: ChunkRef) -> None:
    data = bundle.get(ObjectKind.CHUNK, ref.chunk_id)
    if data.nbytes != ref.num_bytes or parse_chunk(data).domain != ref.domain:
        raise Corrupt(
            f"not a sound bundle: chunk {short(ref.chunk_id)} is not what its manifest says it is", code="bundle",
            chunk_id=ref.chunk_id,
        )  # fmt: skip
