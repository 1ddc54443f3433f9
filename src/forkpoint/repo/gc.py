"""Collection: what nothing leads to any more is doomed in one transaction, then deleted, object by object under the lock.

Kept are all manifests that a ref, a move younger than 90 days (its old and its new value) or a running lease leads to, with all
they descend from; their chunks and tokenizers; and every move the catalog knows. Everything else goes, also what the catalog
never heard of: the leftovers of crashes and of refused publications.

Beside publication: the doomed ids are chosen under the catalog's lock, so no publication before is missed. One that comes later
finds them doomed under the same lock, puts them again and takes them off the list. A deletion looks at its row, deletes and
marks it under the lock. So at no time does the catalog lead to an object that is, or will be, deleted. The mark stays for a day,
for publications that saw the object before it went.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import in_batches
from forkpoint.catalog.records import ObjectRef
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import NotFound
from forkpoint.ids import ManifestId, ObjectId, ObjectKind
from forkpoint.repo.backing import Backing
from forkpoint.store.base import Store

REFLOG_KEPT_S: Final = 90 * 24 * 3600
TOMBSTONE_KEPT_S: Final = 24 * 3600
DELETIONS_PER_LOCK: Final = 64


_Stored = Mapping[ObjectKind, frozenset[ObjectId]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """What a collection would delete if it ran now: objects of the store by kind, and their bytes."""

    objects: tuple[ObjectRef, ...]
    num_bytes: int

    def count(self, kind: ObjectKind) -> int:
        """How many objects of a kind."""
        return sum(each.kind is kind for each in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a collection did. ``num_doomed`` were chosen; ``deleted`` were deleted, those doomed by earlier runs included."""

    num_doomed: int
    deleted: Mapping[ObjectKind, int]
    bytes_deleted: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Garbage:
    manifests: frozenset[ManifestId]
    objects: frozenset[ObjectRef]


def plan_collection(backing: Backing) -> CollectionPlan:
    """What :func:`collect` would delete now. Takes no lock and changes nothing, so it is an estimate beside publications."""
    found = _find_garbage(backing.catalog, _stored(backing.store), at_us=int(time.time() * 1e6))
    pending = frozenset(row.object for row in backing.catalog.doomed())
    objects = sorted(found.objects | pending, key=lambda each: (each.kind, each.object_id))
    return CollectionPlan(objects=tuple(objects), num_bytes=sum(_size(backing.store, each) for each in objects))


def collect(backing: Backing, plan: CollectionPlan | None) -> Collection:
    """Delete what nothing leads to; with a plan, only what is in it. Interrupted anywhere, the next run goes on."""
    started = time.perf_counter()
    num_doomed = doom_garbage(backing, plan)
    deleted, bytes_deleted = delete_doomed(backing)
    _drop_old_marks(backing)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    return Collection(num_doomed=num_doomed, deleted=deleted, bytes_deleted=bytes_deleted, elapsed_ms=elapsed_ms)


def doom_garbage(backing: Backing, plan: CollectionPlan | None) -> int:
    """Choose what is to be deleted and end its facts, in one transaction. Returns how many objects."""
    stored = _stored(backing.store)
    with backing.catalog.transaction(reason="gc: doom") as tx:
        chosen = _choose(tx, stored, plan)
        tx.doom(chosen.objects - tx.pending_among(chosen.objects))
        tx.remove_manifests(chosen.manifests)
        tx.remove_chunks([each.object_id for each in chosen.objects if each.kind is ObjectKind.CHUNK])
    return len(chosen.objects)


def delete_doomed(backing: Backing) -> tuple[Mapping[ObjectKind, int], int]:
    """Delete the bytes of all doomed objects. Returns how many of each kind, and their bytes."""
    deleted = dict.fromkeys(ObjectKind, 0)
    num_bytes = 0
    while backing.catalog.doomed(limit=1):
        with backing.catalog.transaction(reason="gc: delete") as tx:
            batch = [row.object for row in tx.doomed(limit=DELETIONS_PER_LOCK)]
            num_bytes += sum(_size(backing.store, each) for each in batch)
            for each in _delete(backing.store, tx, batch):
                deleted[each.kind] += 1
    return deleted, num_bytes


def purge(backing: Backing, manifest_id: ManifestId, reason: str) -> int:
    """See :meth:`forkpoint.repo.repository.Repository.purge`. What others doomed is left to the next collection."""
    objects = backing.catalog.purge(manifest_id, reason=reason)
    num_deleted = 0
    for batch in in_batches(objects, DELETIONS_PER_LOCK):
        with backing.catalog.transaction(reason="purge: delete") as tx:
            num_deleted += len(_delete(backing.store, tx, list(tx.pending_among(batch))))
    return num_deleted


def _delete(store: Store, tx: Transaction, batch: list[ObjectRef]) -> list[ObjectRef]:
    """Delete the bytes of doomed objects and mark them. Returns those that were there."""
    deleted = [each for each in batch if store.delete(each.kind, each.object_id)]
    tx.mark_deleted(batch)
    return deleted


def _drop_old_marks(backing: Backing) -> None:
    marked = [row for row in backing.catalog.doomed(pending_only=False) if row.deleted_tx is not None]
    if not marked:
        return
    with backing.catalog.transaction(reason="gc: forget marks") as tx:
        last = tx.tx_at(tx.at_us - TOMBSTONE_KEPT_S * 1_000_000)
        tx.rescue([row.object for row in tx.doomed(pending_only=False) if (row.deleted_tx or last + 1) <= last])


def _choose(tx: Transaction, stored: _Stored, plan: CollectionPlan | None) -> _Garbage:
    """What is garbage and planned. A manifest that is not in the plan keeps all it leads to, whatever the plan says."""
    found = _find_garbage(tx, stored, at_us=tx.at_us)
    if plan is None:
        return found
    planned = frozenset(plan.objects)
    unplanned = frozenset(each for each in found.manifests if _manifest(each) not in planned)
    found = _find_garbage(tx, stored, at_us=tx.at_us, also_kept=unplanned)
    return _Garbage(manifests=found.manifests, objects=found.objects & planned)


def _find_garbage(
    reads: Catalog | Transaction, stored: _Stored, *, at_us: int, also_kept: frozenset[ManifestId] = frozenset()
) -> _Garbage:
    kept = reads.reachable(reads.roots(at_us - REFLOG_KEPT_S * 1_000_000) | also_kept)
    rows = list(reads.manifests())
    live_manifests = frozenset(row.manifest_id for row in rows)
    wanted: _Stored = {
        ObjectKind.MANIFEST: frozenset(kept),
        ObjectKind.CHUNK: frozenset(reads.chunks_of(kept)),
        ObjectKind.TOKENIZER: frozenset(
            row.tokenizer_id for row in rows if row.manifest_id in kept and row.tokenizer_id
        ),
        ObjectKind.MOVE: frozenset(row.move_id for row in reads.moves()),
    }
    known: _Stored = {
        **stored,
        ObjectKind.MANIFEST: stored[ObjectKind.MANIFEST] | live_manifests,
        ObjectKind.CHUNK: stored[ObjectKind.CHUNK] | {row.chunk_id for row in reads.live_chunks()},
    }
    objects = (ObjectRef(kind=kind, object_id=each) for kind in ObjectKind for each in known[kind] - wanted[kind])
    return _Garbage(manifests=live_manifests - kept, objects=frozenset(objects))


def _manifest(manifest_id: ManifestId) -> ObjectRef:
    return ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id)


def _stored(store: Store) -> _Stored:
    """Everything in the store. Listed before the lock is taken: what is put later is not in it, and so is safe."""
    return {kind: frozenset(store.scan(kind)) for kind in ObjectKind}


def _size(store: Store, each: ObjectRef) -> int:
    try:
        return store.size(each.kind, each.object_id)
    except NotFound:
        return 0
