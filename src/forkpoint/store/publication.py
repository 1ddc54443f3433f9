"""How a batch of objects becomes visible: written, flushed, named, and the names flushed, in that order.

Knows the layout and the staging folder; does not decide whether an object must be written. Invariant: a name appears in an
object folder only after the bytes it names are on the disk.

benchmarks/store.py writes 8 x 5.9 MB, then 200 x 20 KB, in each of these ways. One run on a machine with ext4 and two cores, beside
other work (medians):

    one plain file of as many bytes, one fsync            56 ms      7 ms
    as here: fdatasync of each file from one of 4
    threads while the next is hashed and written          57        100
    all written, then fdatasync one by one                94         96
    all written, then fdatasync from 4 threads            85         81
    all written, then one syncfs for the data             83         60

So the flush of each file starts early, which is what counts for chunks of usual size. syncfs waits for everything that other
programs have written to the file system, and reports errors only since Linux 5.8: not used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, final

from forkpoint.ids import ObjectId, ObjectKind
from forkpoint.store.files import flush_data, flush_folder, write_parts
from forkpoint.store.layout import Layout
from forkpoint.store.os_errors import os_errors
from forkpoint.store.staging import Staging

_FLUSHERS: Final = 4
_MAX_UNFLUSHED: Final = 32
"""Files open at once in one batch: bounds descriptors and, on a slow disk, how far writing runs ahead of flushing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    kind: ObjectKind
    object_id: ObjectId
    path: str
    fd: int


@final
class Publication:
    """One batch on its way. A context; what was not published when it ends is removed. For one thread.

    Args:
        layout: where objects go.
        settled: folders whose own names this process knows to be on the disk. Shared by all publications of a store, and
            grown here.
    """

    def __init__(self, layout: Layout, settled: set[Path]) -> None:
        self._layout = layout
        self._settled = settled
        self._staging = Staging(layout.staging)
        self._flushers = ThreadPoolExecutor(_FLUSHERS, thread_name_prefix="forkpoint-flush")
        self._latest: _Staged | None = None
        self._flushing: deque[Future[None]] = deque()
        self._staged: dict[tuple[ObjectKind, ObjectId], _Staged] = {}
        self._touched: set[Path] = set()

    def holds(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """Whether the object is in this batch already."""
        return (kind, object_id) in self._staged

    def write(self, kind: ObjectKind, object_id: ObjectId, parts: Sequence[memoryview]) -> None:
        """Write an object to a temporary file; its flush begins when the next one is written, or in ``publish``."""
        self._flush_latest_early()
        with os_errors(f"write {kind} {object_id}", self._layout.root):
            path, fd = self._staging.create()
            self._latest = _Staged(kind=kind, object_id=object_id, path=path, fd=fd)
            write_parts(fd, parts)
            self._staged[kind, object_id] = self._latest

    def settle(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """Have ``publish`` flush the name of an object that is there: whoever put it may not have done so yet."""
        self._touch(self._layout.path_of(kind, object_id).parent)

    def publish(self) -> None:
        """Make all that was written visible and durable."""
        if latest := self._latest:
            self._latest = None
            self._flush(latest)
        self._await_flushes(0)
        for staged in self._staged.values():
            self._name(staged)
        self._flush_names()

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._flushers.shutdown()
            if self._latest:
                os.close(self._latest.fd)
        finally:
            self._staging.close()

    def _flush_latest_early(self) -> None:
        """A put of one object thus needs no thread."""
        if self._latest:
            self._flushing.append(self._flushers.submit(self._flush, self._latest))
            self._latest = None
        self._await_flushes(_MAX_UNFLUSHED)

    def _await_flushes(self, num_left: int) -> None:
        while len(self._flushing) > num_left:
            self._flushing.popleft().result()

    def _flush(self, staged: _Staged) -> None:
        with os_errors(f"flush {staged.kind} {staged.object_id}", self._layout.root):
            try:
                flush_data(staged.fd)
            finally:
                os.close(staged.fd)

    def _name(self, staged: _Staged) -> None:
        target = self._layout.path_of(staged.kind, staged.object_id)
        with os_errors(f"name {staged.kind} {staged.object_id}", self._layout.root):
            try:
                self._staging.move(staged.path, target)
            except FileNotFoundError:
                self._create_folder(target.parent)
                self._staging.move(staged.path, target)
        self._touch(target.parent)

    def _create_folder(self, folder: Path) -> None:
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, exist_ok=True)
            self._settled.discard(path)

    def _touch(self, folder: Path) -> None:
        """Note that the names in ``folder`` must be flushed, and those of the folders above unless they are settled."""
        self._touched.add(folder)
        self._touched.update(path.parent for path in (folder, folder.parent) if path not in self._settled)

    def _flush_names(self) -> None:
        with os_errors("flush folders", self._layout.root):
            if len(self._touched) > _FLUSHERS:
                list(self._flushers.map(flush_folder, self._touched))
            else:
                for folder in self._touched:
                    flush_folder(folder)
        root = self._layout.root
        self._settled.update(path for path in self._touched if path != root)
