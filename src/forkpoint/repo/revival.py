"""Taking a manifest back from collection: its facts are written again from its stored bytes, under the lock that deletion needs.

Only what the catalog held when it was doomed comes back: neither what was purged, nor leftovers that never were published. Its
prefixes are not indexed again; the next publication that continues it does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forkpoint.catalog.records import ManifestRow, ObjectRef
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Corrupt, Incompatible, NotFound
from forkpoint.ids import ChunkId, ManifestId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest, tokenizer_of
from forkpoint.repo.rows import chunk_ids, manifest_row
from forkpoint.state.manifest import Manifest
from forkpoint.store.base import Store


def ensure_live(backing: Backing, tx: Transaction, manifest_id: ManifestId) -> None:
    """See to it that the catalog holds a manifest, with its ancestors as far as their bytes are still there.

    Raises:
        NotFound: ``not_found.manifest`` when it never was published, was purged, or its bytes are gone.
    """
    if tx.has_manifests([manifest_id]):
        return
    dooms = {row.object.object_id: row.doomed_tx for row in tx.doomed() if row.object.kind is ObjectKind.MANIFEST}
    revived = _revivable(backing.store, tx, manifest_id, dooms)
    if manifest_id not in revived:
        raise NotFound(
            f"no manifest {short(manifest_id)}, or collection has deleted it; see forkpoint log",
            code="manifest", manifest_id=manifest_id,
        )  # fmt: skip
    chunks = {each: chunk_ids(manifest) for each, (manifest, _) in revived.items()}
    for each, (manifest, row) in revived.items():
        tx.rescue(_objects(each, manifest))
        parents = (chunks.get(parent.manifest_id, frozenset()) for parent in manifest.parents)
        inherited = frozenset[ChunkId]().union(*parents)
        tx.add_manifest(
            manifest_row(each, manifest, inherited=inherited, is_trusted=row.is_trusted, message=row.message)
        )


def _revivable(
    store: Store, tx: Transaction, start: ManifestId, dooms: Mapping[ManifestId, int]
) -> dict[ManifestId, tuple[Manifest, ManifestRow]]:
    """``start`` and those of its ancestors that are doomed but complete, with the row that each had."""
    found: dict[ManifestId, tuple[Manifest, ManifestRow]] = {}
    waiting = [start]
    while waiting:
        manifest_id = waiting.pop()
        doomed_tx = dooms.get(manifest_id)
        if manifest_id in found or doomed_tx is None:
            continue
        row = tx.find_manifest(manifest_id, as_of=doomed_tx - 1)
        manifest = _read_complete(store, manifest_id)
        if row is not None and manifest is not None:
            found[manifest_id] = manifest, row
            waiting.extend(parent.manifest_id for parent in manifest.parents)
    return found


def _read_complete(store: Store, manifest_id: ManifestId) -> Manifest | None:
    try:
        manifest = read_manifest(store, manifest_id)
    except (NotFound, Corrupt, Incompatible):
        return None
    is_complete = all(store.has(ObjectKind.CHUNK, chunk_id) for chunk_id in chunk_ids(manifest))
    return manifest if is_complete else None


def _objects(manifest_id: ManifestId, manifest: Manifest) -> Iterator[ObjectRef]:
    yield ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id)
    for chunk_id in chunk_ids(manifest):
        yield ObjectRef(kind=ObjectKind.CHUNK, object_id=chunk_id)
    tokenizer_id = tokenizer_of(manifest)
    if tokenizer_id is not None:
        yield ObjectRef(kind=ObjectKind.TOKENIZER, object_id=tokenizer_id)
