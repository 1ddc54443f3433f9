"""File operations a durable store is made of: write parts, flush, digest, map.

Knows file descriptors, no ids of objects and no layout. ``OSError`` passes through: the caller names what it was doing.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, final

from blake3 import blake3

from forkpoint.ids import Bytes, ObjectId, ObjectKind

_MAX_PARTS_PER_WRITE: Final = max(os.sysconf("SC_IOV_MAX"), 16)
_READ_BYTES: Final = 256 * 1024
"""Fits the caches of a core: each piece is hashed while it is still there (benchmarks/store.py measures the whole)."""

_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_map_at: Final = ctypes.CDLL(None, use_errno=True).mmap
_map_at.restype = ctypes.c_void_p
_map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_present_at: Final = ctypes.CDLL(None, use_errno=True).mincore
_present_at.restype = ctypes.c_int
_present_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class FileIdentity(NamedTuple):
    """Changes whenever the bytes of a file are written or the file is replaced, by honest means."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int

    def is_telling(self) -> bool:
        """Whether a change from now on must show in the identity.

        Before Linux 6.13 times of files advance in ticks of up to 10 ms: a file that changed in this tick can change again and
        keep its times. Until some ticks have passed, what was found out about the file must not be remembered.
        """
        return time.time_ns() - self.changed_ns > 50_000_000


def identity_of(fd: int) -> FileIdentity:
    """Identity of an open file."""
    stat = os.fstat(fd)
    return FileIdentity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@final
class FileMemory:
    """Objects for which something was established about the file that had an identity; the oldest are forgotten.

    Safe from several threads.
    """

    def __init__(self, max_entries: int = 32_768) -> None:
        self._max_entries = max_entries
        self._identities: OrderedDict[tuple[ObjectKind, ObjectId], FileIdentity] = OrderedDict()
        self._lock = Lock()

    def holds(self, kind: ObjectKind, object_id: ObjectId, identity: FileIdentity) -> bool:
        """Whether the object was added with this very identity."""
        return self._identities.get((kind, object_id)) == identity

    def add(self, kind: ObjectKind, object_id: ObjectId, identity: FileIdentity) -> None:
        """Remember the object, forgetting the oldest one beyond ``max_entries``."""
        with self._lock:
            self._identities[kind, object_id] = identity
            self._identities.move_to_end((kind, object_id))
            if len(self._identities) > self._max_entries:
                self._identities.popitem(last=False)

    def discard(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """Forget the object, if it is remembered."""
        with self._lock:
            self._identities.pop((kind, object_id), None)

    def __len__(self) -> int:
        return len(self._identities)


def flat(part: Bytes) -> memoryview:
    """The bytes of ``part`` as one dimension of unsigned bytes, without a copy."""
    view = memoryview(part)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def write_parts(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all of ``parts`` (flat) one after another, however few bytes each system call takes."""
    waiting = deque(parts)
    while waiting:
        written = os.writev(fd, list(islice(waiting, _MAX_PARTS_PER_WRITE)))
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.popleft().nbytes
        if written:
            waiting[0] = waiting[0][written:]


def flush_data(fd: int) -> None:
    """Return when the bytes and size of a file are on the disk; times may not be."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def flush_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest_of_file(fd: int, num_bytes: int) -> ObjectId:
    """Id of what a file holds now, read to its end. ``num_bytes`` is a hint of its size.

    Reads instead of mapping: a bad disk block is then an ``OSError``, where a mapping would kill the process (SIGBUS).
    """
    buffer = memoryview(bytearray(min(max(num_bytes, 1), _READ_BYTES)))
    hasher = blake3()
    position = 0
    while count := os.preadv(fd, [buffer], position):
        hasher.update(buffer[:count])
        position += count
    return ObjectId("b3:" + hasher.hexdigest())


def is_in_memory(view: memoryview) -> bool:
    """Whether every page of a mapping that begins on a page is in the page cache, so that touching it reads no disk."""
    import numpy as np  # as in map_view

    num_pages = -(-view.nbytes // mmap.PAGESIZE)
    present = np.zeros(num_pages, dtype=np.uint8)
    address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    if _present_at(address, view.nbytes, present.ctypes.data):
        return False
    return bool((present & 1).all())


def read_view(fd: int, start: int, stop: int) -> memoryview:
    """Read-only copy of ``[start, stop)``; shorter if the file ends before ``stop``."""
    pieces = bytearray()
    while len(pieces) < stop - start and (piece := os.pread(fd, stop - start - len(pieces), start + len(pieces))):
        pieces += piece
    return memoryview(bytes(pieces))


def map_view(fd: int, start: int, stop: int) -> memoryview:
    """Read-only mapping of ``[start, stop)``, which must be in the file and not empty. The view keeps it alive.

    ``mmap.mmap`` of a file holds a duplicate of the descriptor as long as it lives (before Python 3.13 always), so a
    thousand live views would reach the usual limit of open files. Here it owns anonymous address space, over which the file
    is mapped.
    """
    import numpy as np  # a tenth of a second that commands which read no object do not pay

    first = start - start % mmap.ALLOCATIONGRANULARITY
    space = mmap.mmap(-1, stop - first, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = int(np.frombuffer(space, dtype=np.uint8).ctypes.data)
    if _map_at(address, stop - first, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, first) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(space)[start - first :]
