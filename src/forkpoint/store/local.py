"""A store in a folder of the local file system.

Knows files, no manifests or refs. Keeps the invariant of the protocol by: temporary file, flush, rename, flush of the folder
(publication.py). Reading maps files, and trusts a file once its digest was verified until its identity (inode, size, times)
changes. Files of objects must not be written to or truncated by others: a view maps them, and a file that shrinks under a
view kills the reader (SIGBUS); replacing and deleting files is fine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from forkpoint.errors import Corrupt, NotFound
from forkpoint.ids import ObjectId, ObjectKind, digest_of
from forkpoint.store.base import NewObject, PutReceipt
from forkpoint.store.files import (
    FileIdentity,
    FileMemory,
    digest_of_file,
    flat,
    flush_folder,
    identity_of,
    is_in_memory,
    map_view,
    read_view,
)
from forkpoint.store.layout import Layout
from forkpoint.store.os_errors import os_errors
from forkpoint.store.publication import Publication
from forkpoint.store.refusals import absent, check_range, damaged
from forkpoint.store.staging import sweep

_COPY_BYTES: Final = 64 * 1024
"""Up to this size an object is copied, which spares it a mapping and its page faults."""


@final
class LocalStore:
    """Objects as files of mode 0600 in folders of mode 0700 under ``root``.

    Opening creates ``root`` if need be and sweeps what dead writers left; a read-only folder can be opened and read. Needs
    ``flock`` and atomic rename: a local file system. Nothing is held open between calls, so there is nothing to close.

    Args:
        root: the folder, created with its parents if absent.

    Raises:
        Unavailable: ``unavailable.store`` when ``root`` cannot be created or is no folder.
    """

    def __init__(self, root: Path | str) -> None:
        self._root: Final = Path(root).absolute()
        self._layout: Final = Layout(self._root)
        self._verified: Final = FileMemory()
        self._durable: Final = FileMemory()
        self._settled: Final[set[Path]] = set()
        with os_errors("open the store", self._root):
            _create_root(self._root)
        with suppress(OSError):  # read-only, or of another user: a later open may sweep
            sweep(self._layout.staging)

    @property
    def root(self) -> Path:
        """The folder, absolute."""
        return self._root

    def put(self, new: NewObject) -> PutReceipt:
        """See ``Store.put``."""
        return self.put_many([new])[0]

    def put_many(self, batch: Iterable[NewObject]) -> list[PutReceipt]:
        """See ``Store.put_many``. No object of the batch becomes visible before the bytes of all are on the disk.

        benchmarks/store.py compares it with one plain file of as many bytes (publication.py has the figures).
        """
        receipts: list[PutReceipt] = []
        present: list[tuple[ObjectKind, ObjectId, FileIdentity]] = []
        with Publication(self._layout, self._settled) as publication:
            for new in batch:
                parts = [flat(part) for part in new.parts]
                object_id = digest_of(parts)
                was_written = self._stage(publication, new.kind, object_id, parts, present)
                num_bytes = sum(part.nbytes for part in parts)
                receipts.append(
                    PutReceipt(kind=new.kind, object_id=object_id, num_bytes=num_bytes, was_written=was_written)
                )
            publication.publish()
        for kind, object_id, identity in present:
            self._durable.add(kind, object_id, identity)
        return receipts

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """See ``Store.get``. Larger objects are mapped: no copy, and no descriptor is held by the view."""
        with self._opened(kind, object_id) as (fd, identity):
            view = _view(fd, 0, identity.num_bytes)
            if not self._verified.holds(kind, object_id, identity):
                # From memory the mapping itself is hashed, which spares a copy. From the disk the file is read instead: a bad block
                # is then an OSError, where touching a mapping would kill the process.
                mapped = view.nbytes > _COPY_BYTES and is_in_memory(view)
                found = digest_of([view]) if mapped else digest_of_file(fd, identity.num_bytes)
                self._note_digest(kind, object_id, identity, found)
            return view

    def read_range(self, kind: ObjectKind, object_id: ObjectId, start: int, stop: int) -> memoryview:
        """See ``Store.read_range``. The first touch reads the whole object to verify it, later ones only the range."""
        with self._verified_file(kind, object_id) as (fd, identity):
            check_range(kind, object_id, start, stop, identity.num_bytes)
            return _view(fd, start, stop)

    def has(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.has``."""
        return self._find_size(kind, object_id) is not None

    def size(self, kind: ObjectKind, object_id: ObjectId) -> int:
        """See ``Store.size``."""
        num_bytes = self._find_size(kind, object_id)
        if num_bytes is None:
            raise absent(kind, object_id, str(self._root))
        return num_bytes

    def verify(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """See ``Store.verify``."""
        with self._opened(kind, object_id) as (fd, identity):
            self._check_digest(kind, object_id, fd, identity)

    def delete(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.delete``. Flushes the folder even when the object was absent: whoever removed it may not have yet."""
        path = self._layout.path_of(kind, object_id)
        with os_errors(f"delete {kind} {object_id}", self._root):
            try:
                path.unlink()
                was_present = True
            except FileNotFoundError:
                was_present = False
            with suppress(FileNotFoundError):
                flush_folder(path.parent)
        return was_present

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """See ``Store.scan``."""
        with os_errors(f"list the {kind} objects", self._root):
            yield from self._layout.scan(kind)

    def _stage(
        self,
        publication: Publication,
        kind: ObjectKind,
        object_id: ObjectId,
        parts: Sequence[memoryview],
        present: list[tuple[ObjectKind, ObjectId, FileIdentity]],
    ) -> bool:
        """Write an object unless it is in the batch or the store already; True if it was written."""
        if publication.holds(kind, object_id):
            return False
        identity = self._find_sound(kind, object_id)
        if identity is None:
            publication.write(kind, object_id, parts)
            return True
        if not self._durable.holds(kind, object_id, identity):
            publication.settle(kind, object_id)
            present.append((kind, object_id, identity))
        return False

    def _find_sound(self, kind: ObjectKind, object_id: ObjectId) -> FileIdentity | None:
        """The identity of the file of an object if it is present and its bytes are right."""
        try:
            with self._verified_file(kind, object_id) as (_, identity):
                return identity
        except (NotFound, Corrupt):
            return None

    def _find_size(self, kind: ObjectKind, object_id: ObjectId) -> int | None:
        path = self._layout.path_of(kind, object_id)
        with os_errors(f"look up {kind} {object_id}", self._root):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def _verified_file(self, kind: ObjectKind, object_id: ObjectId) -> Iterator[tuple[int, FileIdentity]]:
        with self._opened(kind, object_id) as (fd, identity):
            if not self._verified.holds(kind, object_id, identity):
                self._check_digest(kind, object_id, fd, identity)
            yield fd, identity

    @contextmanager
    def _opened(self, kind: ObjectKind, object_id: ObjectId) -> Iterator[tuple[int, FileIdentity]]:
        path = self._layout.path_of(kind, object_id)
        with os_errors(f"read {kind} {object_id}", self._root):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise absent(kind, object_id, str(self._root)) from None
            try:
                yield fd, identity_of(fd)
            finally:
                os.close(fd)

    def _check_digest(self, kind: ObjectKind, object_id: ObjectId, fd: int, identity: FileIdentity) -> None:
        self._note_digest(kind, object_id, identity, digest_of_file(fd, identity.num_bytes))

    def _note_digest(self, kind: ObjectKind, object_id: ObjectId, identity: FileIdentity, found: ObjectId) -> None:
        if found != object_id:
            self._verified.discard(kind, object_id)
            raise damaged(kind, object_id, str(self._root), found=found, num_bytes=identity.num_bytes)
        if identity.is_telling():
            self._verified.add(kind, object_id, identity)


def _view(fd: int, start: int, stop: int) -> memoryview:
    if stop - start <= _COPY_BYTES:
        return read_view(fd, start, stop)
    return map_view(fd, start, stop)


def _create_root(root: Path) -> None:
    missing = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        flush_folder(path.parent)
