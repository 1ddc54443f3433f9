"""Reads of manifests and of the chunks that they introduce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Select, select

from forkpoint.catalog.dialect import in_batches
from forkpoint.catalog.history import AnyRow, HistoryReads, live
from forkpoint.catalog.records import ChunkRow, ManifestRow, ParentEdge
from forkpoint.catalog.schema import chunk, manifest, manifest_chunk, manifest_parent
from forkpoint.errors import InvalidInput, NotFound
from forkpoint.ids import ChunkId, ManifestId, short

_PAGE = 1_000  # facts per query of a stream


class ManifestReads(HistoryReads):
    """Reads of manifest and chunk facts.

    The iterators hold no connection between two items and pin the transaction that was the last when they were started:
    what is written meanwhile does not show.
    """

    __slots__ = ()

    def find_manifest(self, manifest_id: ManifestId, as_of: int | None = None) -> ManifestRow | None:
        query = select(manifest).where(manifest.c.manifest_id == manifest_id, live(manifest, as_of))
        with self._reading() as connection:
            found = _assemble(connection, connection.execute(query).all(), as_of)
        return found[0] if found else None

    def get_manifest(self, manifest_id: ManifestId, as_of: int | None = None) -> ManifestRow:
        """Raises NotFound ``not_found.manifest``."""
        found = self.find_manifest(manifest_id, as_of)
        if found is None:
            raise manifest_not_found(manifest_id)
        return found

    def has_manifests(self, manifest_ids: Iterable[ManifestId], as_of: int | None = None) -> set[ManifestId]:
        """Those of the ids that the catalog holds."""
        held: set[ManifestId] = set()
        with self._reading() as connection:
            for batch in in_batches(manifest_ids):
                query = select(manifest.c.manifest_id).where(manifest.c.manifest_id.in_(batch), live(manifest, as_of))
                held.update(connection.execute(query).scalars())
        return held

    def find_manifests_by_prefix(self, hex_prefix: str, as_of: int | None = None, limit: int = 20) -> list[ManifestId]:
        """Ids whose hex digits start with ``hex_prefix`` (without ``b3:``), in order, at most ``limit``.

        Raises:
            InvalidInput: ``invalid_input.id`` if it is not 1 to 64 lower-case hex digits.
        """
        if not 0 < len(hex_prefix) <= 64 or set(hex_prefix) - set("0123456789abcdef"):
            raise InvalidInput(f"{hex_prefix!r} is not the start of an id; write hex digits", code="id", id=hex_prefix)
        first, last = (ManifestId("b3:" + hex_prefix.ljust(64, fill)) for fill in "0f")
        query = (
            select(manifest.c.manifest_id)
            .where(manifest.c.manifest_id.between(first, last), live(manifest, as_of))
            .order_by(manifest.c.manifest_id)
            .limit(limit)
        )
        with self._reading() as connection:
            return list(connection.execute(query).scalars())

    def manifests(self, as_of: int | None = None) -> Iterator[ManifestRow]:
        """Every live manifest, oldest first."""
        at = self.current_tx() if as_of is None else as_of
        for facts in self._pages(select(manifest).where(live(manifest, at))):
            with self._reading() as connection:
                page = _assemble(connection, facts, at)
            yield from page

    def live_manifests(self, as_of: int | None = None) -> Iterator[ManifestId]:
        """Ids of every live manifest, oldest first."""
        at = self.current_tx() if as_of is None else as_of
        for facts in self._pages(select(manifest.c.fact, manifest.c.manifest_id).where(live(manifest, at))):
            yield from (row.manifest_id for row in facts)

    def live_chunks(self, as_of: int | None = None) -> Iterator[ChunkRow]:
        """Every live chunk, oldest first."""
        at = self.current_tx() if as_of is None else as_of
        for facts in self._pages(select(chunk.c.fact, chunk.c.chunk_id, chunk.c.num_bytes).where(live(chunk, at))):
            yield from (ChunkRow(chunk_id=row.chunk_id, num_bytes=row.num_bytes) for row in facts)

    def has_chunks(self, chunk_ids: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of the ids that are live chunks."""
        held: set[ChunkId] = set()
        with self._reading() as connection:
            for batch in in_batches(chunk_ids):
                query = select(chunk.c.chunk_id).where(chunk.c.chunk_id.in_(batch), live(chunk, None))
                held.update(connection.execute(query).scalars())
        return held

    def chunks_of(self, manifest_ids: Iterable[ManifestId], as_of: int | None = None) -> Iterator[ChunkId]:
        """Chunks that these manifests introduce; one that several introduce may come more than once."""
        at = self.current_tx() if as_of is None else as_of
        for batch in in_batches(manifest_ids, _PAGE):
            query = (
                select(manifest_chunk.c.chunk_id)
                .join(manifest, manifest.c.fact == manifest_chunk.c.fact)
                .where(manifest.c.manifest_id.in_(batch), live(manifest, at))
            )
            with self._reading() as connection:
                page = connection.execute(query).scalars().all()
            yield from page

    def manifests_introducing(self, chunk_ids: Iterable[ChunkId], as_of: int | None = None) -> set[ManifestId]:
        """Live manifests that introduce any of these chunks."""
        held: set[ManifestId] = set()
        with self._reading() as connection:
            for batch in in_batches(chunk_ids):
                query = (
                    select(manifest.c.manifest_id)
                    .join(manifest_chunk, manifest.c.fact == manifest_chunk.c.fact)
                    .where(manifest_chunk.c.chunk_id.in_(batch), live(manifest, as_of))
                )
                held.update(connection.execute(query).scalars())
        return held

    def _pages(self, query: Select[*tuple[Any, ...]]) -> Iterator[Sequence[AnyRow]]:
        """Rows of ``query``, which selects ``fact``, in its order, a page at a time."""
        fact = query.selected_columns["fact"]
        last = 0
        while True:
            with self._reading() as connection:
                page = connection.execute(query.where(fact > last).order_by(fact).limit(_PAGE)).all()
            if not page:
                return
            yield page
            last = page[-1].fact


def manifest_not_found(manifest_id: ManifestId) -> NotFound:
    return NotFound(f"no manifest {short(manifest_id)}; see forkpoint log", code="manifest", manifest_id=manifest_id)


def parents_of(connection: Connection, facts: Iterable[int]) -> dict[int, tuple[ParentEdge, ...]]:
    """Parent edges by manifest fact, in order; a fact without parents has no entry."""
    edge = manifest_parent
    parents: defaultdict[int, list[ParentEdge]] = defaultdict(list)
    for batch in in_batches(facts):
        query = select(edge.c.fact, edge.c.role, edge.c.parent_id).where(edge.c.fact.in_(batch))
        for fact, role, parent_id in connection.execute(query.order_by(edge.c.fact, edge.c.ordinal)).all():
            parents[fact].append(ParentEdge(role=role, manifest_id=parent_id))
    return {fact: tuple(edges) for fact, edges in parents.items()}


def _introduced_by(connection: Connection, facts: Iterable[int]) -> dict[int, tuple[ChunkRow, ...]]:
    """Chunks introduced, by manifest fact, in order of id; a fact without chunks has no entry."""
    edge = manifest_chunk
    introduced: defaultdict[int, list[ChunkRow]] = defaultdict(list)
    for batch in in_batches(facts):
        query = select(edge.c.fact, edge.c.chunk_id, edge.c.num_bytes).where(edge.c.fact.in_(batch))
        for fact, chunk_id, num_bytes in connection.execute(query.order_by(edge.c.fact, edge.c.chunk_id)).all():
            introduced[fact].append(ChunkRow(chunk_id=chunk_id, num_bytes=num_bytes))
    return {fact: tuple(chunks) for fact, chunks in introduced.items()}


def _assemble(connection: Connection, facts: Sequence[AnyRow], as_of: int | None) -> list[ManifestRow]:
    numbers = [row.fact for row in facts]
    parents, introduced = parents_of(connection, numbers), _introduced_by(connection, numbers)
    return [
        ManifestRow(
            manifest_id=row.manifest_id,
            kind=row.kind,
            state_id=row.state_id,
            execution_id=row.execution_id,
            position=row.position,
            pending=row.pending,
            num_bytes=row.num_bytes,
            message=row.message,
            is_trusted=row.trusted_tx is not None and (as_of is None or row.trusted_tx <= as_of),
            tokenizer_id=row.tokenizer_id,
            parents=parents.get(row.fact, ()),
            introduced=introduced.get(row.fact, ()),
        )
        for row in facts
    ]
