"""The seam where ``OSError`` becomes one of our errors.

Knows errno, no objects and no layout. No ``OSError`` leaves the store package: every system call is made under
``os_errors``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from forkpoint.errors import CapacityExceeded, Unavailable

_LIMITS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, no quota, or the file size limit of the process (RLIMIT_FSIZE; Python ignores its signal SIGXFSZ)."""

_ADVICE: Final = {
    errno.EROFS: "remount it writable, or open the store in another folder",
    errno.EACCES: "check the owner and mode of the folder",
    errno.EPERM: "check the owner, mode and attributes of the folder",
    errno.EMFILE: "close files or raise the limit of open files, then retry",
    errno.ENFILE: "close files or raise the system limit of open files, then retry",
    errno.EIO: "check the disk, then retry",
}


@contextmanager
def os_errors(action: str, root: Path) -> Iterator[None]:
    """Translate an ``OSError`` raised inside.

    Args:
        action: what was tried, as it follows "could not", e.g. ``"write chunk b3:..."``.
        root: the folder of the store.

    Raises:
        CapacityExceeded: ``capacity.disk`` for no space, quota or file size limit.
        Unavailable: ``unavailable.store`` for all others; ``data["errno"]`` has the name, e.g. ``"EROFS"``.
    """
    try:
        yield
    except OSError as error:
        raise _translated(error, action, root) from error


def _translated(error: OSError, action: str, root: Path) -> CapacityExceeded | Unavailable:
    number = error.errno or 0
    name = errno.errorcode.get(number, str(error))
    if number in _LIMITS:
        return CapacityExceeded(
            f"could not {action}: the space, quota or file size limit of the store {root} is used up ({name}); "
            "free space there or raise the limit, then retry",
            code="disk",
            errno=name,
            root=str(root),
        )
    advice = _ADVICE.get(number, "check that the folder is there and usable, then retry")
    return Unavailable(
        f"could not {action} in the store {root}: {error.strerror or error} ({name}); {advice}",
        code="store",
        errno=name,
        root=str(root),
    )
