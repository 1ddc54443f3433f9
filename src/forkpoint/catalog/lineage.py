"""Reads along parent edges. A walk goes through live manifests only: an absent parent ends it (a shallow history)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import CTE, Connection, Integer, Select, literal, null, select

from forkpoint.catalog.dialect import in_batches
from forkpoint.catalog.history import Reads, live
from forkpoint.catalog.records import LogRow, ParentEdge
from forkpoint.catalog.schema import Count, manifest, manifest_parent, transaction
from forkpoint.ids import ManifestId

_PARENT: Final = manifest.alias("parent")


class LineageReads(Reads):
    """Ancestors, descent and reachability."""

    __slots__ = ()

    def ancestors(self, manifest_id: ManifestId, limit: int | None = None, as_of: int | None = None) -> list[LogRow]:
        """``manifest_id`` and what it descends from, newest first, at most ``limit``; empty if it is absent.

        No manifest comes before one of its children; among those free to come, the one added last does.
        """
        return self.ancestors_of_all([manifest_id], limit, as_of)

    def ancestors_of_all(
        self, manifest_ids: Iterable[ManifestId], limit: int | None = None, as_of: int | None = None
    ) -> list[LogRow]:
        """What any of these is or descends from, each once, in the order of :meth:`ancestors`."""
        with self._reading() as connection:
            edges: set[tuple[int | None, int]] = set()
            for batch in in_batches(manifest_ids):
                found = connection.execute(select(_walk_edges(batch, as_of)))
                edges.update((child, fact) for child, fact in found)
            return _log_rows(connection, _newest_first(edges)[:limit])

    def first_parent(self, manifest_id: ManifestId, n: int, as_of: int | None = None) -> ManifestId | None:
        """The ``n``-th first parent (0 is the manifest itself); None when the catalog's history ends before."""
        with self._reading() as connection:
            walk = _walk_first_parents(manifest_id, n, as_of)
            query = select(manifest.c.manifest_id).join(walk, walk.c.fact == manifest.c.fact).where(walk.c.depth == n)
            return connection.execute(query).scalar_one_or_none()

    def is_ancestor(self, ancestor: ManifestId, descendant: ManifestId, as_of: int | None = None) -> bool:
        """Whether ``ancestor`` is ``descendant`` or one it descends from, as far as the catalog knows."""
        walk = _walk([descendant], as_of)
        wanted = select(manifest.c.fact).where(manifest.c.manifest_id == ancestor, live(manifest, as_of))
        query = select(walk.c.fact).where(walk.c.fact == wanted.scalar_subquery()).limit(1)
        with self._reading() as connection:
            return connection.execute(query).first() is not None

    def reachable(self, roots: Iterable[ManifestId], as_of: int | None = None) -> set[ManifestId]:
        """The live ones of ``roots`` and everything live that they descend from."""
        reached: set[ManifestId] = set()
        with self._reading() as connection:
            for batch in in_batches(roots):
                walk = _walk(batch, as_of)
                query = select(manifest.c.manifest_id).join(walk, walk.c.fact == manifest.c.fact)
                reached.update(connection.execute(query).scalars())
        return reached


def _walk(manifest_ids: Sequence[ManifestId], as_of: int | None) -> CTE:
    """Column ``fact``: these manifests and their ancestors, each once."""
    start = select(manifest.c.fact).where(manifest.c.manifest_id.in_(manifest_ids), live(manifest, as_of))
    walk = start.cte("walk", recursive=True)
    return walk.union(
        select(_PARENT.c.fact)
        .select_from(walk)
        .join(manifest_parent, manifest_parent.c.fact == walk.c.fact)
        .join(_PARENT, _PARENT.c.manifest_id == manifest_parent.c.parent_id)
        .where(live(_PARENT, as_of))
    )


def _walk_edges(manifest_ids: Sequence[ManifestId], as_of: int | None) -> CTE:
    """Columns ``child`` (NULL for the start) and ``fact``: every parent edge of the walk, once."""
    start = select(null().cast(Count).label("child"), manifest.c.fact)
    start = start.where(manifest.c.manifest_id.in_(manifest_ids), live(manifest, as_of))
    walk = start.cte("walk", recursive=True)
    return walk.union(
        select(walk.c.fact, _PARENT.c.fact)
        .select_from(walk)
        .join(manifest_parent, manifest_parent.c.fact == walk.c.fact)
        .join(_PARENT, _PARENT.c.manifest_id == manifest_parent.c.parent_id)
        .where(live(_PARENT, as_of))
    )


def _walk_first_parents(manifest_id: ManifestId, n: int, as_of: int | None) -> CTE:
    """Columns ``depth`` up to ``n`` and ``fact`` along first parents."""
    start = select(literal(0, Integer).label("depth"), manifest.c.fact)
    start = start.where(manifest.c.manifest_id == manifest_id, live(manifest, as_of))
    walk = start.cte("walk", recursive=True)
    return walk.union_all(
        select(walk.c.depth + 1, _PARENT.c.fact)
        .select_from(walk)
        .join(manifest_parent, manifest_parent.c.fact == walk.c.fact)
        .join(_PARENT, _PARENT.c.manifest_id == manifest_parent.c.parent_id)
        .where(walk.c.depth < n, manifest_parent.c.ordinal == 0, live(_PARENT, as_of))
    )


def _newest_first(edges: Iterable[Sequence[Any]]) -> list[int]:
    """Topological order of the facts in ``(child, parent)`` edges: children first, then the greater fact first."""
    parents: defaultdict[int, list[int]] = defaultdict(list)
    num_children: defaultdict[int, int] = defaultdict(int)
    for child, fact in edges:
        num_children[fact] += child is not None
        if child is not None:
            parents[child].append(fact)
    free = [-fact for fact, count in num_children.items() if count == 0]
    heapify(free)
    ordered: list[int] = []
    while free:
        fact = -heappop(free)
        ordered.append(fact)
        for parent in parents[fact]:
            num_children[parent] -= 1
            if num_children[parent] == 0:
                heappush(free, -parent)
    return ordered


def _log_rows(connection: Connection, facts: Sequence[int]) -> list[LogRow]:
    rows: dict[int, LogRow] = {}
    for batch in in_batches(facts):
        found = connection.execute(_log_query().where(manifest.c.fact.in_(batch))).all()
        rows.update((fact, _log_row(list(edges))) for fact, edges in groupby(found, key=itemgetter(0)))
    return [rows[fact] for fact in facts]


def _log_query() -> Select[*tuple[Any, ...]]:
    """A row for each parent edge of a manifest, in order; one with NULLs for a manifest without parents."""
    own = [manifest.c[name] for name in ("fact", "manifest_id", "kind", "position", "num_bytes", "message", "added_tx")]
    return (
        select(*own, transaction.c.at_us, manifest_parent.c.role, manifest_parent.c.parent_id)
        .join_from(manifest, transaction, transaction.c.tx == manifest.c.added_tx)
        .outerjoin(manifest_parent, manifest_parent.c.fact == manifest.c.fact)
        .order_by(manifest.c.fact, manifest_parent.c.ordinal)
    )


def _log_row(edges: Sequence[Sequence[Any]]) -> LogRow:
    _, manifest_id, kind, position, num_bytes, message, added_tx, added_us, _, _ = edges[0]
    return LogRow(
        manifest_id=manifest_id,
        parents=tuple(ParentEdge(role=edge[-2], manifest_id=edge[-1]) for edge in edges if edge[-1] is not None),
        kind=kind,
        position=position,
        num_bytes=num_bytes,
        message=message,
        added_tx=added_tx,
        added_us=added_us,
    )
