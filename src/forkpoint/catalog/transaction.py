"""A write transaction: every change of the catalog that belongs to its history."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import final

from sqlalchemy import ColumnElement, Connection, Table, case, delete, insert, select, update

from forkpoint.catalog import schema
from forkpoint.catalog.collection import CollectionReads, by_kind
from forkpoint.catalog.dialect import in_batches, insert_missing, now_us
from forkpoint.catalog.history import live
from forkpoint.catalog.ledger import LedgerReads
from forkpoint.catalog.lineage import LineageReads
from forkpoint.catalog.manifests import ManifestReads, manifest_not_found
from forkpoint.catalog.prefixes import PrefixReads
from forkpoint.catalog.records import DemandKind, ManifestRow, MoveRow, ObjectRef, PrefixRow
from forkpoint.catalog.refs import RefReads
from forkpoint.catalog.schema import chunk, counter, doomed, manifest, manifest_chunk, manifest_parent, prefix, ref
from forkpoint.errors import NotFound
from forkpoint.ids import ChunkId, ManifestId, ObjectId, ObjectKind


@final
class Transaction(ManifestReads, LineageReads, RefReads, PrefixReads, CollectionReads, LedgerReads):
    """Holds the catalog's write lock, from ``Catalog.transaction`` entered until it is left.

    Its reads are the catalog's, under the lock: they see what this transaction wrote, and nobody else changes what they
    answered before it ends. So compare-and-set is ``find_ref``, compare, ``set_ref``.
    """

    __slots__ = ("_connection", "at_us", "number")

    def __init__(self, connection: Connection, reason: str) -> None:
        self._connection = connection
        last = select(counter.c.at_us).scalar_subquery()
        now = now_us(connection)
        # Time never runs backwards along the numbers, whatever the clock does.
        advance = update(counter).values(tx=counter.c.tx + 1, at_us=case((now > last, now), else_=last))
        row = connection.execute(advance.returning(counter.c.tx, counter.c.at_us)).one()
        self.number: int = row.tx
        self.at_us: int = row.at_us
        values = {"tx": self.number, "at_us": self.at_us, "reason": reason}
        connection.execute(insert(schema.transaction).values(values))

    def _reading(self) -> AbstractContextManager[Connection]:
        return nullcontext(self._connection)

    # Publication

    def add_manifest(self, row: ManifestRow) -> bool:
        """Add one manifest with the chunks it introduces; False if it was there already. See ``add_manifests``."""
        return self.add_manifests([row]) == 1

    def add_manifests(self, rows: Iterable[ManifestRow]) -> int:
        """Add those manifests that are not live, with their introduced chunks; returns how many.

        One that is live stays as it is, except that a trusted row makes it trusted. One that was removed gets a new fact.
        """
        return sum(self._add_batch({row.manifest_id: row for row in batch}) for batch in in_batches(rows, 1_000))

    def add_prefixes(self, rows: Iterable[PrefixRow]) -> None:
        """Index prefixes; one whose (key, execution, group) is live stays as it is."""
        for batch in in_batches(rows, 1_000):
            facts: list[dict[str, object]] = [
                {
                    "key": row.key,
                    "execution_id": row.execution_id,
                    "group_name": row.group,
                    "chunk_index": row.index,
                    "chunk_id": row.chunk_id,
                    "added_tx": self.number,
                }
                for row in batch
            ]
            insert_missing(self._connection, prefix, facts)

    def _add_batch(self, rows: dict[ManifestId, ManifestRow]) -> int:
        held = self.has_manifests(rows)
        self._trust([manifest_id for manifest_id in held if rows[manifest_id].is_trusted])
        new = [row for row in rows.values() if row.manifest_id not in held]
        if new:
            facts = self._insert_manifests(new)
            self._insert_edges(new, facts)
        return len(new)

    def _trust(self, manifest_ids: list[ManifestId]) -> None:
        where = (manifest.c.manifest_id.in_(manifest_ids), live(manifest, None), manifest.c.trusted_tx.is_(None))
        if manifest_ids:
            self._connection.execute(update(manifest).where(*where).values(trusted_tx=self.number))

    def _insert_manifests(self, rows: list[ManifestRow]) -> dict[ManifestId, int]:
        values = [
            {
                "manifest_id": row.manifest_id,
                "kind": row.kind,
                "state_id": row.state_id,
                "execution_id": row.execution_id,
                "position": row.position,
                "pending": row.pending,
                "num_bytes": row.num_bytes,
                "message": row.message,
                "tokenizer_id": row.tokenizer_id,
                "trusted_tx": self.number if row.is_trusted else None,
                "added_tx": self.number,
            }
            for row in rows
        ]
        statement = insert(manifest).returning(manifest.c.fact, sort_by_parameter_order=True)
        facts = self._connection.execute(statement, values).scalars()
        return {row.manifest_id: fact for row, fact in zip(rows, facts, strict=True)}

    def _insert_edges(self, rows: list[ManifestRow], facts: dict[ManifestId, int]) -> None:
        parents: list[dict[str, object]] = [
            {"fact": facts[row.manifest_id], "ordinal": i, "role": edge.role, "parent_id": edge.manifest_id}
            for row in rows
            for i, edge in enumerate(row.parents)
        ]
        edges: list[dict[str, object]] = [
            {
                "fact": facts[row.manifest_id],
                "chunk_id": introduced.chunk_id,
                "num_bytes": introduced.num_bytes,
            }
            for row in rows
            for introduced in row.introduced
        ]
        chunks: list[dict[str, object]] = [
            {"chunk_id": introduced.chunk_id, "num_bytes": introduced.num_bytes, "added_tx": self.number}
            for row in rows
            for introduced in row.introduced
        ]
        insert_missing(self._connection, manifest_parent, parents)
        insert_missing(self._connection, chunk, chunks)
        insert_missing(self._connection, manifest_chunk, edges)

    # Refs

    def set_ref(
        self, name: str, *, target: ManifestId | None = None, symbolic: str | None = None, move: MoveRow
    ) -> None:
        """Point a ref at a live manifest, or (HEAD) at another ref, and append the move.

        Raises:
            NotFound: ``not_found.manifest`` when ``target`` is not live: it was collected meanwhile.
        """
        assert (target is None) != (symbolic is None), "a ref has one value"
        if target is not None and not self.has_manifests([target]):
            raise manifest_not_found(target)
        self._close_ref(name)
        values = {"name": name, "target": target, "symbolic": symbolic, "move_id": move.move_id}
        self._connection.execute(insert(ref).values(added_tx=self.number, **values))
        self._append(name, move)

    def delete_ref(self, name: str, move: MoveRow) -> None:
        """Remove a ref and append the move. Raises NotFound ``not_found.ref``."""
        if not self._close_ref(name):
            raise NotFound(f"no ref {name}; see forkpoint branch", code="ref", ref=name)
        self._append(name, move)

    def add_move(self, move: MoveRow) -> None:
        """Append a move to the reflog without moving its ref: for a catalog that is rebuilt from stored moves.

        It keeps the number that its record has, not this transaction's: its id is the digest of that record.
        """
        self._append(move.ref, move)

    def _close_ref(self, name: str) -> bool:
        where = (ref.c.name == name, live(ref, None))
        return self._connection.execute(update(ref).where(*where).values(removed_tx=self.number)).rowcount > 0

    def _append(self, name: str, move: MoveRow) -> None:
        assert move.ref == name, "the move of one ref was given for another"
        values = {
            "move_id": move.move_id,
            "previous": move.previous,
            "ref": name,
            "old": move.old,
            "new": move.new,
            "tx": move.tx,
            "at_us": move.at_us,
            "who": move.who,
            "message": move.message,
            "is_trusted": move.is_trusted,
        }
        self._connection.execute(insert(schema.move).values(values))

    # Collection

    def doom(self, objects: Iterable[ObjectRef]) -> None:
        """Say that the bytes of these objects will be deleted; also of those that were deleted once and came back."""
        for kind, object_ids in by_kind(objects).items():
            for batch in in_batches(sorted(object_ids)):
                self._drop_tombstones(kind, batch)
                rows = [{"kind": kind.value, "object_id": i, "doomed_tx": self.number} for i in batch]
                self._connection.execute(insert(doomed), rows)

    def rescue(self, objects: Iterable[ObjectRef]) -> None:
        """Take objects off the list: a publication has put their bytes again."""
        for kind, object_ids in by_kind(objects).items():
            for batch in in_batches(sorted(object_ids)):
                self._drop_tombstones(kind, batch)

    def mark_deleted(self, objects: Iterable[ObjectRef]) -> None:
        """Record that the bytes of doomed objects are gone."""
        for kind, object_ids in by_kind(objects).items():
            for batch in in_batches(sorted(object_ids)):
                where = (doomed.c.kind == kind.value, doomed.c.object_id.in_(batch))
                self._connection.execute(update(doomed).where(*where).values(deleted_tx=self.number))

    def _drop_tombstones(self, kind: ObjectKind, object_ids: list[ObjectId]) -> None:
        where = (doomed.c.kind == kind.value, doomed.c.object_id.in_(object_ids))
        self._connection.execute(delete(doomed).where(*where))

    def remove_manifests(self, manifest_ids: Iterable[ManifestId]) -> None:
        """End the manifest facts, and the prefix facts of chunks that they introduce and that are doomed (doom first)."""
        for batch in in_batches(manifest_ids):
            of_batch = (manifest.c.manifest_id.in_(batch), live(manifest, None))
            introduced = (
                select(manifest_chunk.c.chunk_id)
                .join(manifest, manifest.c.fact == manifest_chunk.c.fact)
                .join(doomed, doomed.c.object_id == manifest_chunk.c.chunk_id)
                .where(doomed.c.kind == ObjectKind.CHUNK.value, *of_batch)
            )
            self._end(prefix, prefix.c.chunk_id.in_(introduced))
            self._end(manifest, *of_batch)

    def remove_chunks(self, chunk_ids: Iterable[ChunkId]) -> None:
        """End the chunk facts, and the prefix facts that lead to these chunks."""
        for batch in in_batches(chunk_ids):
            self._end(prefix, prefix.c.chunk_id.in_(batch))
            self._end(chunk, chunk.c.chunk_id.in_(batch))

    def _end(self, facts: Table, *where: ColumnElement[bool]) -> None:
        self._connection.execute(update(facts).where(*where, live(facts, None)).values(removed_tx=self.number))

    # Ledger

    def add_decision(self, *, subject: str, kind: str, chosen: str, reason: str, detail: str = "{}") -> int:
        """Record what was chosen and why; ``detail`` is JSON text. Returns its number."""
        values = {"subject": subject, "kind": kind, "chosen": chosen, "reason": reason, "detail": detail}
        statement = insert(schema.decision).values(tx=self.number, **values).returning(schema.decision.c.decision_id)
        return int(self._connection.execute(statement).scalar_one())

    def add_demand(self, *, kind: DemandKind, subject: ObjectId, worker: str) -> int:
        """Record that a worker wants a manifest or a prefix. Returns its number."""
        values = {"kind": kind.value, "subject": subject, "worker": worker, "wanted_since_us": self.at_us}
        statement = insert(schema.demand).values(values).returning(schema.demand.c.demand_id)
        return int(self._connection.execute(statement).scalar_one())

    def fulfil_demand(self, demand_id: int) -> None:
        """Record that a demand was met."""
        where = schema.demand.c.demand_id == demand_id
        self._connection.execute(update(schema.demand).where(where).values(fulfilled_at_us=self.at_us))
