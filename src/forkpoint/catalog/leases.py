"""Leases: a holder keeps a manifest from collection for a while. Outside the history; timed by the database's clock."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, delete, insert, select, update

from forkpoint.catalog.dialect import now_us
from forkpoint.catalog.history import live
from forkpoint.catalog.manifests import manifest_not_found
from forkpoint.catalog.schema import lease, manifest
from forkpoint.errors import NotFound
from forkpoint.ids import ManifestId


def acquire(connection: Connection, manifest_id: ManifestId, holder: str, ttl_s: float) -> str:
    """Take a lease on a live manifest; forgets the expired ones. Raises NotFound ``not_found.manifest``."""
    connection.execute(delete(lease).where(lease.c.expires_at_us <= now_us(connection)))
    held = select(manifest.c.fact).where(manifest.c.manifest_id == manifest_id, live(manifest, None))
    if connection.execute(held).first() is None:
        raise manifest_not_found(manifest_id)
    lease_id = secrets.token_hex(16)
    values = {"lease_id": lease_id, "manifest_id": manifest_id, "holder": holder}
    connection.execute(insert(lease).values(expires_at_us=now_us(connection) + _us(ttl_s), **values))
    return lease_id


def renew(connection: Connection, lease_id: str, ttl_s: float) -> None:
    """Prolong a lease to ``ttl_s`` from now.

    Raises:
        NotFound: ``not_found.lease`` when it has expired or was released: what it kept may be gone.
    """
    where = (lease.c.lease_id == lease_id, lease.c.expires_at_us > now_us(connection))
    renewed = update(lease).where(*where).values(expires_at_us=now_us(connection) + _us(ttl_s))
    if connection.execute(renewed).rowcount == 0:
        raise NotFound(f"lease {lease_id} has ended; check the manifest out again", code="lease", lease_id=lease_id)


def release(connection: Connection, lease_id: str) -> None:
    """End a lease; one that has ended already is passed over."""
    connection.execute(delete(lease).where(lease.c.lease_id == lease_id))


def _us(ttl_s: float) -> int:
    return round(ttl_s * 1_000_000)
