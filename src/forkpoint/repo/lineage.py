"""What a new manifest takes over from its parents: their chunks, and whether it may be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Error
from forkpoint.ids import ChunkId, ManifestId
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest
from forkpoint.repo.rows import CONTINUES, chunk_ids
from forkpoint.state.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownParents:
    """The parents of ``manifest`` that were readable, and their chunks: read before the lock, used under it."""

    manifest: Manifest
    chunks: Mapping[ManifestId, frozenset[ChunkId]]

    @staticmethod
    def read(backing: Backing, manifest: Manifest) -> KnownParents:
        """Read the parents. One that is absent or damaged is as good as unknown: then its chunks are introduced anew."""
        chunks: dict[ManifestId, frozenset[ChunkId]] = {}
        for parent in manifest.parents:
            try:
                chunks[parent.manifest_id] = chunk_ids(read_manifest(backing.store, parent.manifest_id))
            except Error:
                continue
        return KnownParents(manifest=manifest, chunks=chunks)

    def live_chunks(self, tx: Transaction) -> frozenset[ChunkId]:
        """Chunks of the parents that the catalog holds at this moment."""
        live = tx.has_manifests(self.chunks)
        return frozenset[ChunkId]().union(*(self.chunks[each] for each in live))

    def are_trusted(self, tx: Transaction) -> bool:
        """Whether every parent that is continued, as far as the catalog knows it, is trusted and of the same fingerprint."""
        want = self.manifest.fingerprint.state_id, self.manifest.fingerprint.execution_id
        continued = (each.manifest_id for each in self.manifest.parents if each.role == CONTINUES)
        rows = (tx.find_manifest(each) for each in continued)
        return all(row is None or (row.is_trusted and (row.state_id, row.execution_id) == want) for row in rows)

    def includes(self, tx: Transaction, ancestor: ManifestId) -> bool:
        """Whether ``ancestor`` is one of the parents or behind one of them, as far as the catalog knows."""
        ids = [parent.manifest_id for parent in self.manifest.parents]
        return ancestor in ids or any(tx.is_ancestor(ancestor, each) for each in ids)
