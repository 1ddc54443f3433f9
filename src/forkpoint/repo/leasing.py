"""Holding a lease for as long as a block runs, however long that is. The catalog knows leases only by their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from threading import Event, Thread

from forkpoint.catalog.catalog import Catalog
from forkpoint.errors import CapacityExceeded, Error, InvalidInput, Unavailable
from forkpoint.ids import ManifestId
from forkpoint.repo.backing import Backing


@contextmanager
def leased(backing: Backing, manifest_id: ManifestId, ttl_s: float) -> Iterator[str]:
    """See :meth:`forkpoint.repo.repository.Repository.lease`."""
    if not (isfinite(ttl_s) and ttl_s > 0):
        raise InvalidInput(f"a lease cannot last {ttl_s} s; give a finite number of seconds above 0", code="ttl")
    catalog = backing.catalog
    lease_id = catalog.acquire_lease(manifest_id, backing.who, ttl_s)
    ended = Event()
    renewer = Thread(target=_renew, args=(catalog, lease_id, ttl_s, ended), name="forkpoint-lease", daemon=True)
    renewer.start()
    try:
        yield lease_id
    finally:
        ended.set()
        renewer.join()
        catalog.release_lease(lease_id)


def _renew(catalog: Catalog, lease_id: str, ttl_s: float, ended: Event) -> None:
    """Renew at every third of its life, so that two failures in a row cost nothing."""
    while not ended.wait(ttl_s / 3):
        try:
            catalog.renew_lease(lease_id, ttl_s)
        except (Unavailable, CapacityExceeded):
            continue
        except Error:  # it ran out while the machine slept, or the repository was closed: nothing is left to renew
            return
