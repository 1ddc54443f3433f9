"""What must hold inside a catalog, checked from outside by fsck. Changes nothing."""

from __future__ import annotations

from sqlalchemy import Connection, Select, and_, func, select

from forkpoint.catalog.dialect import check_pages
from forkpoint.catalog.history import live
from forkpoint.catalog.schema import chunk, counter, manifest, manifest_chunk, move, ref, transaction
from forkpoint.ids import ObjectId, short


def find_damage(connection: Connection) -> list[str]:
    """Findings, each ``<code>: <what, with which value>``; empty when all is well."""
    findings = [f"catalog_page: {detail}" for detail in check_pages(connection)]
    findings += [f"ref_repeated: {name} has {n} live values" for name, n in connection.execute(_repeated_refs())]
    findings += [
        f"ref_target_absent: {name} points at {short(target)}, which is no live manifest"
        for name, target in connection.execute(_dangling_refs())
    ]
    findings += [
        f"ref_move_absent: {name} was set by move {short(move_id)}, which is not in the reflog"
        for name, move_id in connection.execute(_refs_without_move())
    ]
    findings += [
        f"chunk_absent: {short(manifest_id)} introduces {short(chunk_id)}, which is no live chunk"
        for manifest_id, chunk_id in connection.execute(_missing_chunks())
    ]
    findings += [f"counter_behind: {detail}" for detail in _counter_findings(connection)]
    return findings


def _repeated_refs() -> Select[str, int]:
    count = func.count()
    return select(ref.c.name, count).where(live(ref, None)).group_by(ref.c.name).having(count > 1)


def _dangling_refs() -> Select[str, ObjectId]:
    held = select(manifest.c.fact).where(manifest.c.manifest_id == ref.c.target, live(manifest, None)).exists()
    return select(ref.c.name, ref.c.target).where(live(ref, None), ref.c.target.is_not(None), ~held)


def _refs_without_move() -> Select[str, ObjectId]:
    known = select(move.c.ordinal).where(move.c.move_id == ref.c.move_id).exists()
    return select(ref.c.name, ref.c.move_id).where(live(ref, None), ~known)


def _missing_chunks() -> Select[ObjectId, ObjectId]:
    introduced = and_(chunk.c.chunk_id == manifest_chunk.c.chunk_id, live(chunk, None))
    return (
        select(manifest.c.manifest_id, manifest_chunk.c.chunk_id)
        .join(manifest_chunk, manifest_chunk.c.fact == manifest.c.fact)
        .outerjoin(chunk, introduced)
        .where(live(manifest, None), chunk.c.fact.is_(None))
    )


def _counter_findings(connection: Connection) -> list[str]:
    number = connection.execute(select(counter.c.tx)).scalar_one_or_none()
    newest = connection.execute(select(func.max(transaction.c.tx))).scalar_one() or 0
    if number is None or number < newest:
        return [f"the counter stands at {number}, the newest transaction is {newest}"]
    return []
