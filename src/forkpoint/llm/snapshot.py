"""Snapshots: a draft as a bundle in memory, how its size is known without making it, and what a bundle gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forkpoint.errors import Corrupt
from forkpoint.ids import Bytes, ManifestId, ObjectKind, digest_of
from forkpoint.llm.resident.base import Fetch
from forkpoint.state.bundle import Bundle, BundleEntry, bundle_size, encode_bundle, parse_bundle
from forkpoint.state.chunk import Chunk, parse_chunk
from forkpoint.state.draft import Draft, assemble
from forkpoint.state.manifest import ChunkRef, Manifest, decode_manifest, encode_manifest, manifest_id


def draft_id(draft: Draft) -> ManifestId:
    """The id that a draft's manifest has once published. Hashes the chunks whose id is not known yet."""
    return manifest_id(assemble(draft, [ref for ref, _ in _hashed_chunks(draft)]))


def snapshot_parts(draft: Draft) -> Iterator[Bytes]:
    """The bytes of a bundle of one manifest, its chunks and its assets, as parts end to end."""
    return encode_bundle(*_contents(draft))


def snapshot_size(draft: Draft) -> int:
    """Size in bytes of what :func:`snapshot_parts` yields."""
    return bundle_size(*_contents(draft))


def open_snapshot(data: Bytes) -> tuple[Manifest, Bundle]:
    """The one manifest of a snapshot and its verified objects. Raises Corrupt."""
    bundle = parse_bundle(data)
    if len(bundle.heads) != 1:
        raise Corrupt(f"a snapshot is about one continuation; this bundle names {len(bundle.heads)}", code="bundle")
    return decode_manifest(bundle.get(ObjectKind.MANIFEST, bundle.heads[0])), bundle


def fetch_from(bundle: Bundle) -> Fetch:
    """Chunks from a bundle's verified objects."""

    def fetch(ref: ChunkRef) -> Chunk:
        return parse_chunk(bundle.get(ObjectKind.CHUNK, ref.chunk_id))

    return fetch


def _contents(draft: Draft) -> tuple[list[ManifestId], list[BundleEntry]]:
    hashed = list(_hashed_chunks(draft))
    raw = encode_manifest(assemble(draft, [ref for ref, _ in hashed]))
    head = digest_of([raw])
    chunks = {ref.chunk_id: parts for ref, parts in hashed}
    entries = [BundleEntry(kind=ObjectKind.MANIFEST, object_id=head, parts=[raw])]
    entries += [
        BundleEntry(kind=ObjectKind.CHUNK, object_id=chunk_id, parts=parts) for chunk_id, parts in chunks.items()
    ]
    entries += [BundleEntry(kind=asset.kind, object_id=asset.object_id, parts=asset.parts()) for asset in draft.assets]
    return [head], entries


def _hashed_chunks(draft: Draft) -> Iterator[tuple[ChunkRef, Sequence[Bytes]]]:
    for group in draft.groups:
        for chunk in group.chunks:
            parts = chunk.parts()
            if chunk.ref is not None:
                yield chunk.ref, parts
                continue
            size = sum(memoryview(part).nbytes for part in parts)
            yield ChunkRef(chunk_id=digest_of(parts), num_bytes=size, domain=chunk.domain), parts
