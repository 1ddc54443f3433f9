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
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


def canonical_bytes(value: Value) -> bytes:
    """The canonical bytes of ``value``.

    Raises:
        InvalidInput: ``invalid_input.record`` naming the path of a value that has no canonical form (a float, a key that is not
            a string, an integer of more than 64 bits, a lone surrogate, more than 32 levels).
    """
    _check(value, "$", 0)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


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
    """The canonical form of a float64: C99 hexadecimal with 13 digits, e.g. ``{"f64": "0x1.999999999999ap-4"}``."""
    if not math.isfinite(number):
        raise InvalidInput(f"{number} has no canonical form; use a finite number", code="record", value=str(number))
    return {"f64": number.hex()}


def to_float(value: Value) -> float:
    """Inverse of :func:`from_float`. Raises Corrupt ``corrupt.record`` for anything else."""
    if isinstance(value, Mapping) and set(value) == {"f64"} and isinstance(value["f64"], str):
        try:
            number = float.fromhex(value["f64"])
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and number.hex() == value["f64"]:
            return number
    raise Corrupt(f"{value!r} is not a canonical float", code="record", what="float")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"floating-point number {text}")


def _check(value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        _reject(path, "more than 32 levels deep")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            _reject(path, f"the integer {value} does not fit 64 bits")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                _reject(path, f"the key {key!r} is not a string")
            _check_text(key, path)
            _check(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    else:
        _reject(path, f"a {type(value).__name__} has no canonical form")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        _reject(path, "the string holds a lone surrogate")


def _reject(path: str, why: str) -> NoReturn:
    raise InvalidInput(f"{path}: {why}", code="record", path=path)
