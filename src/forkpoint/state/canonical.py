"""Canonical JSON: one value, one byte string. The form of every record that is hashed (FORMAT.md, "Canonical JSON").

Values are null, booleans, integers of at most 64 bits, strings, lists and string-keyed maps. Maps are written with keys in
code-point order and nothing is written that is not needed. There are no floating-point numbers: where a record holds one, it is
written as ``{"f64": "<hexadecimal form>"}`` by :func:`from_float`, so that equal values have equal bytes everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn, TypeAlias

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.ids import Bytes

Value: TypeAlias = "bool | int | str | Sequence[Value] | Mapping[str, Value] | None"
Record: TypeAlias = Mapping[str, Value]

MAX_DEPTH: Final = 32
"""Lists and maps inside one another."""

_LISTS: Final = (list, tuple)
_CONTAINERS: Final = (dict, list, tuple, Mapping)  # the general one last: asking it is slow
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def canonical_bytes(value: Value) -> bytes:
    """The canonical bytes of ``value``.

    Raises:
        InvalidInput: ``invalid_input.record`` naming the path of a value that has no canonical form (a float, a key that is not
            a string, an integer of more than 64 bits, a lone surrogate, more than 32 levels).
    """
    fault = _fault(value, 0)
    if fault is not None:
        path, why = fault
        raise InvalidInput(f"${path}: {why}", code="record", path="$" + path)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return text.encode()


def parse_canonical(data: Bytes, what: str) -> Value:
    """Read canonical bytes back; bytes in any other form are refused, so that a record has one id only.

    Raises:
        Corrupt: ``corrupt.record`` naming ``what`` when the bytes are not canonical JSON.
    """
    raw = bytes(data)
    try:
        value: Value = json.loads(raw, parse_float=_refuse, parse_constant=_refuse)
        is_canonical = canonical_bytes(value) == raw
    except (ValueError, RecursionError, InvalidInput) as error:
        raise Corrupt(f"{what} is not canonical JSON: {error}", code="record", what=what) from error
    if not is_canonical:
        raise Corrupt(f"{what} is JSON but not in canonical form", code="record", what=what)
    return value


def from_float(number: float) -> Record:
    """The canonical form of a float64: C99 hexadecimal, all 13 digits, e.g. ``{"f64": "0x1.999999999999ap-4"}``; 0 is ``0x0.0p+0``."""
    if not math.isfinite(number):
        raise InvalidInput(f"{number} has no canonical form; use a finite number", code="record", value=str(number))
    return {"f64": float(number).hex()}


def to_float(value: Value) -> float:
    """Inverse of :func:`from_float`. Raises Corrupt ``corrupt.record`` for anything else."""
    if isinstance(value, Mapping) and set(value) == {"f64"} and isinstance(value["f64"], str):
        try:
            number = float.fromhex(value["f64"])
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and number.hex() == value["f64"]:
            return number
    raise Corrupt(f"{value!r:.64} is not a canonical float", code="record", what="float")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"floating-point number {text[:32]}")


def _fault(value: object, depth: int) -> tuple[str, str] | None:
    """Where below ``value`` something has no canonical form, and why; None when all of it has one."""
    if isinstance(value, str):
        return None if value.isascii() or _is_unicode(value) else ("", "the string holds a lone surrogate")
    if isinstance(value, int):
        if _INT_MIN <= value <= _INT_MAX:
            return None
        return "", f"an integer of {value.bit_length()} bits does not fit 64 bits"
    if value is None:
        return None
    if not isinstance(value, _CONTAINERS):
        return "", f"a {type(value).__name__} has no canonical form"
    if depth == MAX_DEPTH:
        return "", f"more than {MAX_DEPTH} levels deep"
    return _list_fault(value, depth) if isinstance(value, _LISTS) else _map_fault(value, depth)


def _list_fault(items: Sequence[object], depth: int) -> tuple[str, str] | None:
    for index, item in enumerate(items):
        fault = _fault(item, depth + 1)
        if fault is not None:
            return f"[{index}]{fault[0]}", fault[1]
    return None


def _map_fault(items: Mapping[object, object], depth: int) -> tuple[str, str] | None:
    for key, item in items.items():
        if not isinstance(key, str) or not (key.isascii() or _is_unicode(key)):
            return "", f"the key {key!r} is not a Unicode string"
        fault = _fault(item, depth + 1)
        if fault is not None:
            return f".{key}{fault[0]}", fault[1]
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
