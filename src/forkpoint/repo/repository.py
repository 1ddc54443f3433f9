"""The repository: what everybody uses to publish, name, read and keep manifests. A thin face over the modules of this package.

    with Repository.create("work") as repo:
        publication = repo.publish(draft, branch="main", message="first")
        repo.tokens(repo.resolve("main~1"))

Knows no model and no SQL. Its invariant: whatever a name, an id or the prefix index leads to is in the store, complete. What few
callers need is imported where it is used, because every command waits for this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, final

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.config import Config
from forkpoint.errors import Conflict, Corrupt, NotFound
from forkpoint.ids import Bytes, ManifestId, MoveId
from forkpoint.repo import layout as on_disk
from forkpoint.repo.backing import Backing
from forkpoint.repo.layout import Layout, Occupancy
from forkpoint.repo.moves import ensure_head
from forkpoint.repo.names import Expectation, branch_ref, tag_ref
from forkpoint.repo.progress import Progress, no_progress
from forkpoint.repo.publication import Publication, publish
from forkpoint.repo.reads import RepositoryReads
from forkpoint.repo.refs import Head, checkout, delete, put_branch, put_tag, rename_branch
from forkpoint.state.draft import Draft
from forkpoint.store.base import Store
from forkpoint.store.local import LocalStore

if TYPE_CHECKING:
    from forkpoint.repo.fsck import Finding
    from forkpoint.repo.gc import Collection, CollectionPlan
    from forkpoint.repo.rebuild import RebuildReport


@final
class Repository(RepositoryReads):
    """One repository. Safe to use from several threads and processes at once. Close it, or use it as a context.

    Args:
        store, catalog: belong to the repository from now on; ``close`` closes the catalog.
        namespace: what the prefix index keeps apart.
        who: the name that moves are recorded under.
        layout, occupancy: where it lies and what says that it is open, for one in a folder; ``close`` ends the occupancy.
    """

    def __init__(
        self,
        *,
        store: Store,
        catalog: Catalog,
        namespace: str = on_disk.DEFAULT_NAMESPACE,
        who: str = "nobody",
        layout: Layout | None = None,
        occupancy: Occupancy | None = None,
    ) -> None:
        self._backing = Backing(store=store, catalog=catalog, namespace=namespace, who=who)
        self._layout = layout
        self._occupancy = occupancy
        self._is_open = True
        ensure_head(self._backing)

    @classmethod
    def create(cls, path: Path | str, *, namespace: str = on_disk.DEFAULT_NAMESPACE, who: str | None = None) -> Self:
        """Make a repository in ``path/.forkpoint``, with HEAD at the branch ``main``, which has no manifest yet.

        Raises:
            Conflict: ``conflict.repository`` when there is one already, somebody else is making one there, or objects are
                there whose catalog is lost: a new one would let collection delete them all.
            InvalidInput: ``invalid_input.namespace``.
            Unavailable: ``unavailable.repository`` when the folder cannot be written.
        """
        layout = Layout.at(path)
        occupancy = on_disk.claim_vacant(layout, namespace)
        try:
            cls._over(layout, _first_catalog(layout), namespace, "create").close()
            on_disk.write_settings(layout, namespace)
            occupancy.share()
            return cls._opened(layout, occupancy, who)
        except BaseException:
            occupancy.end()
            raise

    @classmethod
    def open(cls, path: Path | str, *, who: str | None = None) -> Self:
        """Open the repository in ``path/.forkpoint``. ``who`` defaults to what the environment says.

        Raises:
            NotFound: ``not_found.repository``, or ``not_found.catalog`` when only its catalog is lost: rebuild it.
            Incompatible: ``incompatible.repository_version`` for one that a newer Forkpoint made.
            Corrupt: ``corrupt.repository`` or ``corrupt.catalog``.
            Unavailable: ``unavailable.repository_in_use`` while its catalog is being replaced.
        """
        layout = Layout.at(path)
        on_disk.read_settings(layout)
        occupancy = Occupancy.shared(layout.lock)
        try:
            return cls._opened(layout, occupancy, who)
        except BaseException:
            occupancy.end()
            raise

    @classmethod
    def _opened(cls, layout: Layout, occupancy: Occupancy, who: str | None) -> Self:
        """The repository there, which is occupied already; the occupancy stays the caller's when that fails."""
        settings = on_disk.read_settings(layout)
        name = Config.from_environment().who if who is None else who
        return cls._over(layout, Catalog.open(sqlite_url(layout.catalog)), settings.namespace, name, occupancy)

    @classmethod
    def _over(
        cls, layout: Layout, catalog: Catalog, namespace: str, who: str, occupancy: Occupancy | None = None
    ) -> Self:
        """A repository over these parts; the catalog is closed when that fails."""
        try:
            store = LocalStore(layout.objects)
            return cls(store=store, catalog=catalog, namespace=namespace, who=who, layout=layout, occupancy=occupancy)
        except BaseException:
            catalog.close()
            raise

    @classmethod
    def discover(cls, start: Path | str, *, who: str | None = None) -> Self:
        """Open the repository in ``start`` or the nearest folder above it. Raises NotFound ``not_found.repository``."""
        return cls.open(on_disk.discover(start).folder, who=who)

    def close(self) -> None:
        """Let go of the catalog and the lock; idempotent. Views of stored bytes stay readable."""
        if self._is_open:
            self._is_open = False
            self._backing.catalog.close()
            if self._occupancy is not None:
                self._occupancy.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What it stands on

    @property
    def folder(self) -> Path | None:
        """The ``.forkpoint`` folder; None for one that was put together from a store and a catalog."""
        return None if self._layout is None else self._layout.folder

    # Publishing

    def publish(
        self, draft: Draft, *, branch: str | None = None, expect: Expectation = "fast-forward", message: str = ""
    ) -> Publication:
        """Make a boundary durable, then visible. Idempotent: equal content twice is one manifest, and writes nothing.

        Args:
            draft: chunks whose id the repository knows are not read, unless collection took them meanwhile.
            branch: what to move to the new manifest, made if absent; None publishes without a ref, and then only a lease or
                a child published soon keeps it from collection.
            expect: what the branch must hold: an ancestor of the new manifest (or nothing), exactly this manifest, nothing
                (``absent``), or ``anything``. A branch that holds the new manifest already is always right.
            message: for the reflog; and for the log when the payload has no ``message``. Cut after 4096 characters.

        Raises:
            Conflict: ``conflict.ref`` when the branch holds something else; the manifest is published all the same.
            CapacityExceeded: ``capacity.disk``; nothing is advertised, and a retry continues where it ended.
            InvalidInput: ``invalid_input.ref_name``, ``invalid_input.expect``, ``invalid_input.message``, or what the draft's
                parts are refused for.
        """
        return publish(self._backing, draft, branch=branch, expect=expect, message=message)

    def commit_bundle(
        self, data: Bytes, *, branch: str | None = None, expect: Expectation = "fast-forward", message: str = ""
    ) -> Publication:
        """Take in a continuation that came from outside. It can be used by name, but is not trusted: neither its prefixes
        nor those of what continues it enter the prefix index.

        Args:
            data: a bundle of one manifest, as :meth:`export_bundle` makes. It must bring every chunk itself.
            branch, expect, message: as in :meth:`publish`.

        Raises:
            Corrupt: for anything torn, flipped or inconsistent; nothing is advertised.
            Conflict: ``conflict.ref``.
            Incompatible: for a bundle, manifest or chunk of a newer version.
        """
        from forkpoint.repo.exchange import commit_bundle

        return commit_bundle(self._backing, data, branch=branch, expect=expect, message=message)

    # Names

    def branch(
        self, name: str, target: str = "HEAD", *, expect: Expectation = "absent", message: str = ""
    ) -> MoveId | None:
        """Point a branch at what ``target`` means; None when it is there already.

        A complete id that collection has doomed but not deleted yet comes back to life with its ancestors.

        Raises:
            Conflict: ``conflict.ref`` when the branch holds something else than expected: by default, anything at all.
            NotFound: ``not_found.name`` or ``not_found.manifest``.
            InvalidInput: ``invalid_input.ref_name``.
        """
        return put_branch(self._backing, name, target, expect, message)

    def delete_branch(self, name: str, *, expect: Expectation = "anything", message: str = "") -> MoveId:
        """Delete a branch; its reflog stays, and keeps what it led to for 90 days.

        Raises:
            NotFound: ``not_found.ref``.
            Conflict: ``conflict.current_branch`` when HEAD is at it, ``conflict.ref`` when it holds something unexpected.
        """
        return delete(self._backing, branch_ref(name), expect, message)

    def rename_branch(self, old: str, new: str) -> None:
        """Rename a branch and take HEAD along. Raises NotFound ``not_found.ref`` or Conflict ``conflict.ref``."""
        rename_branch(self._backing, old, new)

    def tag(
        self, name: str, target: str = "HEAD", *, expect: Expectation = "absent", message: str = ""
    ) -> MoveId | None:
        """Name what ``target`` means for good: a tag moves only when ``anything`` is expected. Raises as :meth:`branch`."""
        return put_tag(self._backing, name, target, expect, message)

    def delete_tag(self, name: str, *, expect: Expectation = "anything", message: str = "") -> MoveId:
        """Delete a tag. Raises NotFound ``not_found.ref`` or Conflict ``conflict.ref``."""
        return delete(self._backing, tag_ref(name), expect, message)

    def checkout(self, name: str) -> Head:
        """Move HEAD: to the branch of that name, else, detached, to what ``name`` means. Restores no bytes.

        Raises:
            NotFound: ``not_found.name``, ``not_found.ref`` or ``not_found.manifest``.
        """
        return checkout(self._backing, name)

    # Keeping

    def plan_collection(self) -> CollectionPlan:
        """What :meth:`collect` would delete now; changes nothing."""
        from forkpoint.repo.gc import plan_collection

        return plan_collection(self._backing)

    def collect(self, plan: CollectionPlan | None = None) -> Collection:
        """Delete what no ref, no move of the last 90 days and no lease leads to; with a plan, only what is in it.

        Safe beside publications, and interrupted anywhere: the next run goes on.
        """
        from forkpoint.repo.gc import collect

        return collect(self._backing, plan)

    def purge(self, name: str, *, reason: str) -> int:
        """Forget a manifest for good, for lawful deletion: its facts in all of history, its message there, and its bytes.

        What stays: a mark with its id and ``reason``; its id where others name it (moves, earlier values of refs, children that
        collection removed, decisions, the list of what was deleted, for a day); and the moves of refs to it, in the catalog and
        in the store, with their messages, for each is chained to the one before. The tokenizer stays, and so does every chunk
        that another manifest needs. To be removed by hand: ``catalog.db.bak`` and the files in ``quarantine/``, which
        may hold copies from earlier; and bundles and backups, which are out of reach.

        Returns:
            How many objects were deleted: its manifest, and the chunks that it alone introduced.

        Raises:
            Conflict: ``conflict.manifest_in_use`` while a ref or a live child names it.
            NotFound: ``not_found.name``.
        """
        from forkpoint.repo.gc import purge

        return purge(self._backing, self.resolve(name), reason)

    def check(self, progress: Progress = no_progress) -> list[Finding]:
        """Verify everything: each object's digest, each manifest, what the catalog says. Changes nothing.

        Args:
            progress: called with the number of objects done and of all, after each.
        """
        from forkpoint.repo.fsck import check

        return check(self._backing, progress)

    def repair(self, findings: Sequence[Finding]) -> list[str]:
        """Act on findings: set damaged objects aside, withdraw what lost its bytes, move refs back. Returns what was done."""
        from forkpoint.repo.repair import repair

        return repair(self._backing, findings, quarantine=None if self._layout is None else self._layout.quarantine)

    @staticmethod
    def rebuild_catalog(path: Path | str) -> RebuildReport:
        """Make a new catalog from the store alone, for a repository that nobody has open; the old one is kept beside it.

        Where ``config.json`` is lost, a new one is written, with the default namespace.

        Raises:
            NotFound: ``not_found.repository``.
            Unavailable: ``unavailable.repository_in_use`` while it is open anywhere.
        """
        from forkpoint.repo.rebuild import rebuild_at

        return rebuild_at(Layout.at(path))

    def lease(self, manifest_id: ManifestId, *, ttl_s: float = 600.0) -> AbstractContextManager[str]:
        """Keep a manifest, and all it descends from, from collection while the block runs, however long that is.

        Args:
            ttl_s: how long it is kept if this process dies. A thread renews the lease at every third of that; only where none
                succeeds that long (the machine asleep, the catalog locked) does it run out while the block runs.

        Yields the lease's id. Raises NotFound ``not_found.manifest`` when it is gone already, and InvalidInput
        ``invalid_input.ttl`` for a time that is not finite and positive.
        """
        from forkpoint.repo.leasing import leased

        return leased(self._backing, manifest_id, ttl_s)


def _first_catalog(layout: Layout) -> Catalog:
    """The catalog for a repository that is being made: that of an earlier attempt, if it got so far, else a new one.

    Raises:
        Conflict: ``conflict.repository`` when the store holds objects that a new catalog would not know.
    """
    url = sqlite_url(layout.catalog)
    try:
        return Catalog.open(url)
    except (NotFound, Corrupt) as error:
        if on_disk.holds_objects(layout):
            raise Conflict(
                f"{layout.folder} holds objects and no sound catalog; run forkpoint fsck --rebuild-catalog",
                code="repository", path=str(layout.folder),
            ) from error  # fmt: skip
    return Catalog.create(url)
