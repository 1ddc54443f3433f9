"""Files on their way into a local store, and the sweeping of those whose writer died.

Knows the folder ``root/tmp`` and no objects. Invariant: while a writer lives, every temporary file ``<stem>.<number>`` has a
lock file ``<stem>.lock`` on which the writer holds ``flock``. The kernel drops that lock when the writer dies, however it
dies, so "the lock can be had" means "the writer is dead" on one machine, without clocks or process ids.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final, final

_CREATE: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_LOCK: Final = ".lock"
_NAME: Final = re.compile(r"(\d+-[0-9a-f]{16})\.(?:lock|\d+)")


@final
class Staging:
    """Temporary files of one put, from which they are moved to where they belong. Whoever makes one closes it.

    The lock file is made with the first temporary file. Not safe from several threads; a put has one of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stem = ""
        self._lock_fd = -1
        self._num_created = 0
        self._paths: set[str] = set()

    def create(self) -> tuple[str, int]:
        """A new empty file of mode 0600, open for writing; the caller closes the descriptor."""
        if self._lock_fd < 0:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            while not self._try_lock():
                pass
        path = f"{self._folder}/{self._stem}.{self._num_created}"
        fd = os.open(path, _CREATE, 0o600)
        self._num_created += 1
        self._paths.add(path)
        return path, fd

    def move(self, path: str, target: Path) -> None:
        """Rename a file from ``create`` to ``target``, replacing what is there. Raises FileNotFoundError without its folder."""
        os.replace(path, target)  # noqa: PTH105 - makes no Path, once an object
        self._paths.discard(path)

    def close(self) -> None:
        """Remove the files that were not moved away, then the lock."""
        if self._lock_fd < 0:
            return
        with suppress(OSError):  # what cannot be removed now is swept when the store is opened next
            for path in self._paths:
                Path(path).unlink(missing_ok=True)
            (self._folder / (self._stem + _LOCK)).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _try_lock(self) -> bool:
        """Take a lock under a new stem. False if a sweeper saw the lock file before it was locked: choose another stem."""
        self._stem = f"{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(self._folder / (self._stem + _LOCK), _CREATE, 0o600)
        try:
            if _take(fd) and os.fstat(fd).st_nlink:
                self._lock_fd = fd
                return True
        finally:
            if self._lock_fd != fd:
                os.close(fd)
        return False


def sweep(folder: Path) -> int:
    """Remove the temporary files of dead writers; safe beside live writers and other sweepers. Other names are left alone.

    Returns:
        How many files were removed, lock files included.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return 0
    by_stem: dict[str, list[str]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            by_stem.setdefault(match[1], []).append(name)
    return sum(_sweep_stem(folder, stem, stem_names) for stem, stem_names in by_stem.items())


def _sweep_stem(folder: Path, stem: str, names: list[str]) -> int:
    lock = stem + _LOCK
    try:
        fd = os.open(folder / lock, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # the lock outlives the files, so their writer has ended
        return _remove(folder, names)
    try:
        if not _take(fd):
            return 0
        return _remove(folder, [name for name in names if name != lock]) + _remove(folder, [lock])
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path, names: list[str]) -> int:
    num_removed = 0
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
            num_removed += 1
    return num_removed
