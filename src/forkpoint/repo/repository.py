"""The repository: what everybody uses to publish, name, read and keep manifests. A thin face over the modules of this package.

    with Repository.create("work") as repo:
        publication = repo.publish(draft, branch="main", message="first")
        repo.tokens(repo.resolve("main~1"))

Knows no model and no SQL. Its invariant: whatever a name, an id or the prefix index leads to is in the store, complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, final

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.catalog.records import ManifestRow
from forkpoint.config import Config
from forkpoint.ids import ChunkId, ManifestId
from forkpoint.repo import layout as on_disk
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_chunk, read_manifest, read_tokens
from forkpoint.repo.layout import Layout, Occupancy
from forkpoint.repo.moves import ensure_head
from forkpoint.repo.names import Expectation
from forkpoint.repo.prefixes import PrefixMatch, find_prefix
from forkpoint.repo.publication import Publication, publish
from forkpoint.repo.resolution import resolve
from forkpoint.repo.text import Decoder, find_decoder
from forkpoint.state.chunk import Chunk
from forkpoint.state.draft import Draft
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import Manifest
from forkpoint.store.base import Store
from forkpoint.store.local import LocalStore


@final
class Repository:
    """One repository. Safe to use from several threads and processes at once. Close it, or use it as a context.

    Args:
        store, catalog: belong to the repository from now on; ``close`` closes the catalog.
        namespace: what the prefix index keeps apart.
        who: the name that moves are recorded under.
    """

    def __init__(self, *, store: Store, catalog: Catalog, namespace: str = "default", who: str = "nobody") -> None:
        self._backing = Backing(store=store, catalog=catalog, namespace=namespace, who=who)
        self._layout: Layout | None = None
        self._occupancy: Occupancy | None = None
        self._is_open = True
        ensure_head(self._backing)

    @classmethod
    def create(cls, path: Path | str, *, namespace: str = "default", who: str | None = None) -> Self:
        """Make a repository in ``path/.forkpoint``, with HEAD at the branch ``main``, which has no manifest yet.

        Raises:
            Conflict: ``conflict.repository`` when there is one already.
            InvalidInput: ``invalid_input.namespace``.
            Unavailable: ``unavailable.repository`` when the folder cannot be written.
        """
        layout = Layout.at(path)
        settings = on_disk.prepare(layout, namespace)
        url = sqlite_url(layout.catalog)
        is_leftover = layout.catalog.exists() and layout.catalog.stat().st_size > 0
        catalog = Catalog.open(url) if is_leftover else Catalog.create(url)
        made = cls(store=LocalStore(layout.objects), catalog=catalog, namespace=settings.namespace)
        made.close()
        on_disk.write_settings(layout, settings)
        return cls.open(path, who=who)

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
        settings = on_disk.read_settings(layout)
        occupancy = Occupancy(layout.lock)
        try:
            catalog = Catalog.open(sqlite_url(layout.catalog))
            opened = cls(
                store=LocalStore(layout.objects),
                catalog=catalog,
                namespace=settings.namespace,
                who=Config.from_environment().who if who is None else who,
            )
        except BaseException:
            occupancy.end()
            raise
        opened._layout, opened._occupancy = layout, occupancy
        return opened

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

    @property
    def store(self) -> Store:
        """The store, to read from. What is put into it past this class may be collected at any time."""
        return self._backing.store

    @property
    def catalog(self) -> Catalog:
        """The catalog, to read from."""
        return self._backing.catalog

    @property
    def namespace(self) -> str:
        """What its prefix index keeps apart from others."""
        return self._backing.namespace

    @property
    def who(self) -> str:
        """The name that moves are recorded under."""
        return self._backing.who

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
            message: for the reflog; and for the log when the payload has no ``message``.

        Raises:
            Conflict: ``conflict.ref`` when the branch holds something else; the manifest is published all the same.
            CapacityExceeded: ``capacity.disk``; nothing is advertised, and a retry continues where it ended.
            InvalidInput: ``invalid_input.ref_name``, or what the draft's parts are refused for.
        """
        return publish(self._backing, draft, branch=branch, expect=expect, message=message)

    # Reading

    def resolve(self, name: str, as_of: int | None = None) -> ManifestId:
        """What a name means: ``main``, a tag, HEAD or ``@``, ``name~N``, ``name^N``, ``name@{N}``, an id or its beginning.

        Args:
            name: a ref wins over the beginning of an id.
            as_of: a transaction number: what it meant then.

        Raises:
            NotFound: ``not_found.name``, with names that are close.
            InvalidInput: ``invalid_input.ambiguous`` for the beginning of several ids, ``invalid_input.revision``.
        """
        return resolve(self._backing.catalog, name, as_of)

    def row(self, manifest_id: ManifestId) -> ManifestRow:
        """What the catalog knows of a manifest. Raises NotFound ``not_found.manifest``."""
        return self._backing.catalog.get_manifest(manifest_id)

    def manifest(self, manifest_id: ManifestId) -> Manifest:
        """The manifest of an id, from its verified bytes. Raises NotFound ``not_found.object``, Corrupt or Incompatible."""
        return read_manifest(self._backing.store, manifest_id)

    def chunk(self, chunk_id: ChunkId) -> Chunk:
        """A chunk, verified; its slabs are views into the store. Raises NotFound ``not_found.object``, Corrupt or Incompatible."""
        return read_chunk(self._backing.store, chunk_id)

    def tokens(self, manifest_id: ManifestId) -> list[int]:
        """The token history, read back from the chunks: processed ids, then the pending one. Raises Corrupt ``corrupt.tokens``."""
        return read_tokens(self._backing.store, self.manifest(manifest_id))

    def tokenizer(self, manifest_id: ManifestId) -> Decoder | None:
        """What turns a manifest's tokens into text; None when no tokenizer is stored with it. Raises Corrupt."""
        return find_decoder(self._backing.store, self.manifest(manifest_id))

    def text(self, manifest_id: ManifestId) -> str | None:
        """The whole token history as text, special tokens included; None when no tokenizer is stored with it."""
        decode = self.tokenizer(manifest_id)
        return None if decode is None else decode(self.tokens(manifest_id))

    def find_prefix(self, fingerprint: Fingerprint, tokens: Sequence[int], groups: Sequence[str]) -> PrefixMatch | None:
        """The longest stored prefix of ``tokens`` for which every group has its chunks.

        Args:
            fingerprint: of the engine that asks; state and execution identity must both be those of the stored chunks.
            groups: names of the token-indexed groups that are all needed.

        Raises:
            Corrupt: ``corrupt.prefix`` when a chunk found does not carry the token ids asked for: it is never served.
        """
        return find_prefix(self._backing, fingerprint, tokens, groups)

    @contextmanager
    def lease(self, manifest_id: ManifestId, *, ttl_s: float = 600.0) -> Iterator[str]:
        """Keep a manifest, and all it descends from, from collection while the block runs, at most ``ttl_s`` seconds.

        Yields the lease's id, for ``catalog.renew_lease``. Raises NotFound ``not_found.manifest`` when it is gone already.
        """
        catalog = self._backing.catalog
        lease_id = catalog.acquire_lease(manifest_id, self._backing.who, ttl_s)
        try:
            yield lease_id
        finally:
            catalog.release_lease(lease_id)
