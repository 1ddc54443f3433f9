"""The error tree, ordered by what a handler would do.

    Error
      NotFound           the name or id does not exist: ask for another
      Conflict           somebody else moved first: look again, then retry or give up
      Incompatible       the value exists but does not fit here: the field and both values are named
      Corrupt            stored bytes are not what their id says: repair or fetch again
      InvalidInput       the call is wrong: change it
      CapacityExceeded   a stated limit would be passed: free something or raise the limit
      Unavailable        a disk, lock or service did not serve: try again later

Every error has a stable ``code`` (``<family>.<what>``), a message that says what failed, with which value, and what to do
next, and ``data`` with the same facts for programs. Exceptions of other libraries stop at the module that called them.
"""

from __future__ import annotations

from typing import ClassVar, Final

Fact = str | int | bool | None


class Error(Exception):
    """Root of every error that Forkpoint raises on purpose.

    Args:
        message: what failed, with which value, and what to do next.
        code: the part of the code after the family, e.g. ``"ref"`` for ``not_found.ref``.
        data: the same facts for programs; values are strings, integers, booleans or None.
    """

    family: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str, **data: Fact) -> None:
        super().__init__(message)
        self.message = message
        self.code = f"{self.family}.{code}"
        self.data = data


class NotFound(Error):
    """The name or id does not exist."""

    family = "not_found"


class Conflict(Error):
    """A compare-and-set lost, or the target exists already."""

    family = "conflict"


class Incompatible(Error):
    """A value does not fit this engine, format version or repository; ``data`` names the field and both values."""

    family = "incompatible"


class Corrupt(Error):
    """Stored bytes differ from what their id or format promises."""

    family = "corrupt"


class InvalidInput(Error):
    """The caller's input is outside what the call accepts."""

    family = "invalid_input"


class CapacityExceeded(Error):
    """A stated limit (context, bytes, disk) would be passed; nothing was changed."""

    family = "capacity"


class Unavailable(Error):
    """A resource did not serve the call (lock, permission, connection); it may later."""

    family = "unavailable"


EXIT_CODES: Final[dict[str, int]] = {
    InvalidInput.family: 2,
    NotFound.family: 3,
    Conflict.family: 4,
    Incompatible.family: 5,
    Corrupt.family: 6,
    CapacityExceeded.family: 7,
    Unavailable.family: 8,
    Error.family: 1,
}
"""Process exit code of each family. 0 is success, 130 an interrupt."""

HTTP_STATUS: Final[dict[str, int]] = {
    InvalidInput.family: 400,
    NotFound.family: 404,
    Conflict.family: 409,
    Incompatible.family: 422,
    Corrupt.family: 500,
    CapacityExceeded.family: 507,
    Unavailable.family: 503,
    Error.family: 500,
}
"""HTTP status of each family."""
