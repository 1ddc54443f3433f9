"""Reads for collection: what is wanted, what is doomed, and how much there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import ColumnElement, Table, func, select

from forkpoint.catalog import schema
from forkpoint.catalog.dialect import in_batches, now_us
from forkpoint.catalog.history import Reads, live
from forkpoint.catalog.records import Counts, DoomedRow, ObjectRef
from forkpoint.catalog.schema import chunk, doomed, lease, manifest, move, prefix, ref
from forkpoint.ids import ManifestId, ObjectId, ObjectKind


class CollectionReads(Reads):
    """Roots, doomed objects and counts."""

    __slots__ = ()

    def roots(self, reflog_since_us: int) -> set[ManifestId]:
        """What must be kept: ref targets, old and new values of moves since then, and manifests under a running lease.

        Ids that only the reflog names may be absent from the catalog.
        """
        targets = select(ref.c.target).where(ref.c.target.is_not(None), live(ref, None))
        values = select(move.c.old, move.c.new).where(move.c.at_us >= reflog_since_us)
        with self._reading() as connection:
            leased = select(lease.c.manifest_id).where(lease.c.expires_at_us > now_us(connection))
            kept = set(connection.execute(targets).scalars()) | set(connection.execute(leased).scalars())
            moved = {value for row in connection.execute(values) for value in row}
        return kept | {ObjectId(value) for value in moved if value is not None and value.startswith("b3:")}

    def num_leases(self) -> int:
        """How many leases are running."""
        with self._reading() as connection:
            running = select(func.count()).select_from(lease).where(lease.c.expires_at_us > now_us(connection))
            return int(connection.execute(running).scalar_one())

    def doomed(self, *, pending_only: bool = True, limit: int | None = None) -> list[DoomedRow]:
        """Tombstones, oldest first: those whose bytes are still to be deleted, or all."""
        query = select(doomed).order_by(doomed.c.doomed_tx, doomed.c.kind, doomed.c.object_id).limit(limit)
        if pending_only:
            query = query.where(doomed.c.deleted_tx.is_(None))
        with self._reading() as connection:
            return [
                DoomedRow(
                    object=ObjectRef(kind=ObjectKind(row.kind), object_id=row.object_id),
                    doomed_tx=row.doomed_tx,
                    deleted_tx=row.deleted_tx,
                )
                for row in connection.execute(query)
            ]

    def doomed_among(self, objects: Iterable[ObjectRef]) -> set[ObjectRef]:
        """Those of ``objects`` that are doomed, whether their bytes are deleted yet or not: put these again."""
        return self._tombstones(objects)

    def pending_among(self, objects: Iterable[ObjectRef]) -> set[ObjectRef]:
        """Those of ``objects`` whose bytes are still to be deleted. Only an answer under the lock stays true."""
        return self._tombstones(objects, doomed.c.deleted_tx.is_(None))

    def counts(self, as_of: int | None = None) -> Counts:
        """How much there is; ``num_moves``, ``num_transactions`` and ``num_pending_deletions`` are always those of now."""
        with self._reading() as connection:

            def count(facts: Table, *where: ColumnElement[bool]) -> int:
                return int(connection.execute(select(func.count()).select_from(facts).where(*where)).scalar_one())

            chunk_bytes = select(func.coalesce(func.sum(chunk.c.num_bytes), 0)).where(live(chunk, as_of))
            return Counts(
                num_manifests=count(manifest, live(manifest, as_of)),
                num_chunks=count(chunk, live(chunk, as_of)),
                chunk_bytes=int(connection.execute(chunk_bytes).scalar_one()),
                num_prefixes=count(prefix, live(prefix, as_of)),
                num_refs=count(ref, live(ref, as_of)),
                num_moves=count(move),
                num_pending_deletions=count(doomed, doomed.c.deleted_tx.is_(None)),
                num_transactions=count(schema.transaction),
            )

    def _tombstones(self, objects: Iterable[ObjectRef], *where: ColumnElement[bool]) -> set[ObjectRef]:
        found: set[ObjectRef] = set()
        with self._reading() as connection:
            for kind, object_ids in by_kind(objects).items():
                for batch in in_batches(object_ids):
                    query = select(doomed.c.object_id).where(
                        doomed.c.kind == kind.value, doomed.c.object_id.in_(batch), *where
                    )
                    ids = connection.execute(query).scalars()
                    found.update(ObjectRef(kind=kind, object_id=object_id) for object_id in ids)
        return found


def by_kind(objects: Iterable[ObjectRef]) -> dict[ObjectKind, set[ObjectId]]:
    """The ids of ``objects``, sorted by kind."""
    ids: defaultdict[ObjectKind, set[ObjectId]] = defaultdict(set)
    for named in objects:
        ids[named.kind].add(named.object_id)
    return ids
