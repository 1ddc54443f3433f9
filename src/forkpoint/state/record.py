"""Reading a parsed record back, field by field: every value has the one type it should have, and no field is unknown.

Shared by manifests, moves and bundles. A refusal is InvalidInput ``invalid_input.record``; whoever knows what the bytes were meant
to be turns it into its own Corrupt. The invariant: what is read and written again gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forkpoint.errors import Incompatible, InvalidInput
from forkpoint.state.canonical import Record, Value

MAX_COUNT: Final = 2**63 - 1
"""The largest size, position or time that a record may hold, so that every database and language can."""


def as_map(value: Value) -> Record:
    """``value`` if it is a map."""
    if not isinstance(value, dict):
        raise _refusal(f"a {type(value).__name__} stands where a map is needed")
    return value


def as_fields(value: Value, *names: str) -> Record:
    """``value`` if it is a map with exactly these keys."""
    record = as_map(value)
    if record.keys() != set(names):
        raise _refusal(f"it has the fields {sorted(record)[:16]} where it needs {sorted(names)}")
    return record


def as_list(value: Value) -> Sequence[Value]:
    """``value`` if it is a list."""
    if not isinstance(value, list):
        raise _refusal(f"a {type(value).__name__} stands where a list is needed")
    return value


def as_text(value: Value) -> str:
    """``value`` if it is a string."""
    if not isinstance(value, str):
        raise _refusal(f"a {type(value).__name__} stands where a string is needed")
    return value


def as_count(value: Value) -> int:
    """``value`` if it is an integer from 0 to 2**63 - 1. True and False are no integers."""
    if not is_count(value):
        raise _refusal(f"{value!r:.64} is not an integer from 0 to {MAX_COUNT}")
    assert isinstance(value, int)
    return value


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer from 0 to 2**63 - 1, and not a boolean."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def format_version(record: Record, *, name: str, newest: int) -> int:
    """Version of a record of the format ``forkpoint.<name>``. Read before any other field, so that a newer version is told as such.

    Raises:
        InvalidInput: ``invalid_input.record`` for another format or a version that is not an integer from 1 up.
        Incompatible: ``incompatible.<name>_version`` for a version above ``newest``.
    """
    if record.get("format") != f"forkpoint.{name}":
        raise _refusal("it does not say that it is one")
    version = as_count(record.get("version"))
    if version > newest:
        raise Incompatible(
            f"{name} version {version} is newer than {newest}, the newest this program reads; update forkpoint",
            code=f"{name}_version", field="version", have=version, want=newest,
        )  # fmt: skip
    if version < 1:
        raise _refusal(f"its version is {version}")
    return version


def _refusal(why: str) -> InvalidInput:
    return InvalidInput(why, code="record")
