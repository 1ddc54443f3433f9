"""The control plane: what exists, descends from what, and is named how, now or as of an earlier transaction.

The catalog knows ids, sizes and names; it holds no floats and no bytes of state, and never asks the store. Its invariant:
every change that matters is a fact stamped with the number of one transaction, and transactions happen one after another.

    catalog = Catalog.create("sqlite:////path/catalog.db")
    with catalog.transaction(reason="commit main") as tx:
        tx.add_manifest(row)
        tx.set_ref("refs/heads/main", target=row.manifest_id, move=move)
    catalog.find_ref("refs/heads/main", as_of=catalog.current_tx() - 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self, final

from sqlalchemy import Connection, case, update

from forkpoint.catalog import integrity, leases, migration
from forkpoint.catalog.collection import CollectionReads
from forkpoint.catalog.dialect import (
    Engines,
    forget_deleted,
    open_engines,
    reserve_file,
    sqlite_path,
)
from forkpoint.catalog.ledger import LedgerReads
from forkpoint.catalog.lineage import LineageReads
from forkpoint.catalog.manifests import ManifestReads
from forkpoint.catalog.prefixes import PrefixReads
from forkpoint.catalog.purging import apply_purge
from forkpoint.catalog.records import ObjectRef
from forkpoint.catalog.refs import RefReads
from forkpoint.catalog.schema import HEAD_REVISION, counter
from forkpoint.catalog.transaction import Transaction
from forkpoint.catalog.translation import connected, corrupt_catalog
from forkpoint.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from forkpoint.ids import ManifestId

BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for the others before ``unavailable.catalog_busy``."""


@final
class Catalog(ManifestReads, LineageReads, RefReads, PrefixReads, CollectionReads, LedgerReads):
    """One catalog database. Safe to use from several threads and processes at once; not across ``os.fork``."""

    __slots__ = ("_engines", "_is_open")

    def __init__(self, engines: Engines) -> None:
        """Use ``create`` or ``open``."""
        self._engines = engines
        self._is_open = True

    @classmethod
    def create(cls, url: str, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Self:
        """Create an empty catalog at ``url`` (``sqlite:///path`` or ``postgresql://...``, an existing database).

        Raises:
            Conflict: ``conflict.catalog`` if there is one already.
            Unavailable: ``unavailable.catalog`` if the folder or server cannot be used.
        """
        path = sqlite_path(url)
        if path is not None:
            try:
                reserve_file(path)
            except OSError as error:
                raise Unavailable(f"cannot create {path} ({error.strerror})", code="catalog", path=str(path)) from error
        catalog = cls(open_engines(url, busy_timeout_s=busy_timeout_s))
        with catalog._closed_on_error(), catalog._writing() as connection:
            if migration.has_stamp_table(connection):
                raise Conflict("there is a catalog already; open it", code="catalog")
            migration.upgrade(connection)
        return catalog

    @classmethod
    def open(cls, url: str, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Self:
        """Open a catalog, migrating an older one.

        Raises:
            NotFound: ``not_found.catalog``.
            Incompatible: ``incompatible.catalog_version`` when a newer Forkpoint wrote it.
            Corrupt: ``corrupt.catalog`` when the file is no catalog (an empty file is none either).
        """
        path = sqlite_path(url)
        if path is not None and not path.exists():
            raise NotFound(
                f"no catalog at {path}; run forkpoint fsck --rebuild-catalog", code="catalog", path=str(path)
            )
        catalog = cls(open_engines(url, busy_timeout_s=busy_timeout_s))
        with catalog._closed_on_error():
            catalog._ensure_current(is_file=path is not None)
        return catalog

    def close(self) -> None:
        """Close every connection; idempotent. Any use afterwards raises InvalidInput ``invalid_input.closed``."""
        self._is_open = False
        self._engines.dispose()

    def continue_from(self, tx: int, at_us: int) -> None:
        """Let the next transaction have a greater number than ``tx`` and no earlier time than ``at_us``; never goes back.

        For a catalog that is rebuilt: stored moves carry the numbers and times of the one that was lost.
        """
        with self._writing() as connection:
            row = counter.c
            later = {
                "tx": case((row.tx < tx, tx), else_=row.tx),
                "at_us": case((row.at_us < at_us, at_us), else_=row.at_us),
            }
            connection.execute(update(counter).values(later))

    def transaction(self, *, reason: str) -> AbstractContextManager[Transaction]:
        """A write transaction: committed when the block ends, rolled back when it raises.

        Waits for other writers. Keep the block short and free of anything slow that needs no lock.

        Raises:
            Unavailable: ``unavailable.catalog_busy`` when another writer held the lock too long.
            CapacityExceeded: ``capacity.disk``; nothing was changed.
        """
        return self._transaction(reason)

    @contextmanager
    def _transaction(self, reason: str) -> Iterator[Transaction]:
        with self._writing() as connection:
            yield Transaction(connection, reason)

    def acquire_lease(self, manifest_id: ManifestId, holder: str, ttl_s: float) -> str:
        """Keep a manifest from collection for ``ttl_s`` seconds; returns the lease id. NotFound ``not_found.manifest``."""
        with self._writing() as connection:
            return leases.acquire(connection, manifest_id, holder, ttl_s)

    def renew_lease(self, lease_id: str, ttl_s: float) -> None:
        """Keep it ``ttl_s`` seconds from now. NotFound ``not_found.lease`` if the lease has ended."""
        with self._writing() as connection:
            leases.renew(connection, lease_id, ttl_s)

    def release_lease(self, lease_id: str) -> None:
        """End a lease; idempotent."""
        with self._writing() as connection:
            leases.release(connection, lease_id)

    def purge(self, manifest_id: ManifestId, *, reason: str) -> set[ObjectRef]:
        """Forget a manifest and its history irrevocably, and doom its bytes. A mark stays, and ids and moves that name it.

        See :mod:`forkpoint.catalog.purging` for what exactly. Returns the doomed objects.

        Raises:
            NotFound: ``not_found.manifest``.
            Conflict: ``conflict.manifest_in_use`` while a ref or a live child names it.
        """
        with self._writing() as connection:
            objects = apply_purge(connection, Transaction(connection, f"purge: {reason}"), manifest_id, reason)
        forget_deleted(self._engines)
        return objects

    def check(self) -> list[str]:
        """What is wrong inside the catalog, each as ``<code>: <what>``; empty when all is well."""
        try:
            with self._reading() as connection:
                return integrity.find_damage(connection)
        except Corrupt as error:
            return [f"catalog_page: {error.message}"]

    def _reading(self) -> AbstractContextManager[Connection]:
        self._check_open()
        return connected(self._engines.read)

    def _writing(self) -> AbstractContextManager[Connection]:
        self._check_open()
        return connected(self._engines.write)

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidInput("the catalog was closed; open the repository again", code="closed")

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _ensure_current(self, *, is_file: bool) -> None:
        with self._reading() as connection:
            if not migration.has_stamp_table(connection):
                if is_file:
                    raise corrupt_catalog("the file holds no catalog")
                raise NotFound("no catalog in this database; run forkpoint init", code="catalog")
            if migration.find_stamp(connection) == HEAD_REVISION:
                return
        with self._writing() as connection:
            migration.upgrade(connection)
