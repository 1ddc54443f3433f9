"""Purge for lawful deletion: forgets one manifest for ever, its history included, and leaves a mark that it did.

What goes is every row of the manifest (with its message), of the chunks that it alone introduces, and of what leases and demand say
of it. What stays names it by id alone: earlier values of refs, ended children, tombstones and decisions; but moves, which are
chained records that the store holds too, also keep their messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from forkpoint.catalog.history import live
from forkpoint.catalog.manifests import manifest_not_found
from forkpoint.catalog.records import ObjectRef
from forkpoint.catalog.schema import (
    chunk,
    demand,
    lease,
    manifest,
    manifest_chunk,
    manifest_parent,
    prefix,
    purge,
    ref,
)
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Conflict
from forkpoint.ids import ChunkId, ManifestId, ObjectKind, short


def apply_purge(connection: Connection, tx: Transaction, manifest_id: ManifestId, reason: str) -> set[ObjectRef]:
    """Delete every fact of a manifest and of the chunks that only it introduces, and doom their bytes.

    Returns:
        The doomed objects; their bytes are gone once the deletion loop has run.

    Raises:
        NotFound: ``not_found.manifest`` when the catalog never held it.
        Conflict: ``conflict.manifest_in_use`` when a ref or a live child still names it: remove those first, for a child
            contains its parent's state.
    """
    facts = connection.execute(select(manifest.c.fact).where(manifest.c.manifest_id == manifest_id)).scalars().all()
    if not facts:
        raise manifest_not_found(manifest_id)
    _check_unused(connection, manifest_id)
    chunk_ids = _only_introduced_by(connection, facts)
    _delete_facts(connection, manifest_id, facts, chunk_ids)
    connection.execute(insert(purge).values(manifest_id=manifest_id, tx=tx.number, reason=reason))
    objects = {ObjectRef(kind=ObjectKind.CHUNK, object_id=chunk_id) for chunk_id in chunk_ids}
    objects.add(ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id))
    tx.doom(objects)
    return objects


def _check_unused(connection: Connection, manifest_id: ManifestId) -> None:
    names = connection.execute(select(ref.c.name).where(ref.c.target == manifest_id, live(ref, None))).scalars().all()
    children = connection.execute(
        select(manifest.c.manifest_id)
        .join(manifest_parent, manifest_parent.c.fact == manifest.c.fact)
        .where(manifest_parent.c.parent_id == manifest_id, live(manifest, None))
    ).scalars()
    users = [*names, *(short(child) for child in children)]
    if users:
        message = f"{short(manifest_id)} is still used by {', '.join(users)}; delete or purge those first"
        raise Conflict(message, code="manifest_in_use", manifest_id=manifest_id, user=users[0])


def _only_introduced_by(connection: Connection, facts: Sequence[int]) -> list[ChunkId]:
    others = manifest_chunk.alias("others")
    shared = (
        select(others.c.chunk_id)
        .join(manifest, manifest.c.fact == others.c.fact)
        .where(others.c.chunk_id == manifest_chunk.c.chunk_id, others.c.fact.not_in(facts), live(manifest, None))
    )
    query = select(manifest_chunk.c.chunk_id).where(manifest_chunk.c.fact.in_(facts), ~shared.exists()).distinct()
    return list(connection.execute(query).scalars())


def _delete_facts(
    connection: Connection, manifest_id: ManifestId, facts: Sequence[int], chunk_ids: Sequence[ChunkId]
) -> None:
    connection.execute(delete(prefix).where(prefix.c.chunk_id.in_(chunk_ids)))
    connection.execute(delete(chunk).where(chunk.c.chunk_id.in_(chunk_ids)))
    connection.execute(delete(manifest_chunk).where(manifest_chunk.c.fact.in_(facts)))
    connection.execute(delete(manifest_parent).where(manifest_parent.c.fact.in_(facts)))
    connection.execute(delete(manifest).where(manifest.c.fact.in_(facts)))
    connection.execute(delete(lease).where(lease.c.manifest_id == manifest_id))
    connection.execute(delete(demand).where(demand.c.subject == manifest_id))
