"""A ref move: the immutable record of one step of a ref, stored as an object so that refs and reflog survive the catalog.

Moves of one ref form a chain through ``previous``. FORMAT.md ("Moves") says how refs are rebuilt from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.ids import Bytes, MoveId, parse_object_id
from forkpoint.state.canonical import Value, canonical_bytes, parse_canonical
from forkpoint.state.record import as_count, as_fields, as_map, as_text, format_version, is_count

FORMAT: Final = "forkpoint.move"
VERSION: Final = 1
MAX_MOVE_BYTES: Final = 1 << 20
SYMBOLIC: Final = "ref:"
"""What a target that names another ref begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move of one ref.

    Attributes:
        ref: full name, e.g. ``refs/heads/main`` or ``HEAD``.
        old, new: a manifest id, ``ref:<name>`` for a symbolic HEAD, or None (absent before, deleted after).
        previous: the move of this ref before this one, deletions included.
        tx, at_us: the transaction that made it and its time (microseconds since 1970, UTC, the catalog's clock).
        who, message: for people.
        is_trusted: the state was computed or verified here; False for what came from outside.
    """

    ref: str
    old: str | None
    new: str | None
    previous: MoveId | None
    tx: int
    at_us: int
    who: str
    message: str
    is_trusted: bool

    def __post_init__(self) -> None:
        if not self.ref:
            raise _refusal("ref", "a move needs the name of its ref")
        for name, target in (("old", self.old), ("new", self.new)):
            if target is not None and not (target.startswith(SYMBOLIC) and target != SYMBOLIC):
                _check_id(name, target)
        if self.previous is not None:
            _check_id("previous", self.previous)
        for name, number in (("tx", self.tx), ("at_us", self.at_us)):
            if not is_count(number):
                raise _refusal(name, f"{name} {number!r:.64} is not an integer from 0 to 2**63 - 1")


def encode_move(move: Move) -> bytes:
    """Canonical bytes; their digest is the move's id. InvalidInput ``invalid_input.move`` above 1 MiB (a huge message)."""
    data = canonical_bytes(
        {
            "at_us": move.at_us,
            "format": FORMAT,
            "is_trusted": move.is_trusted,
            "message": move.message,
            "new": move.new,
            "old": move.old,
            "previous": move.previous,
            "ref": move.ref,
            "tx": move.tx,
            "version": VERSION,
            "who": move.who,
        }
    )
    if len(data) > MAX_MOVE_BYTES:
        raise _refusal("message", f"a move of {len(data)} bytes is over {MAX_MOVE_BYTES}; shorten its message")
    return data


def decode_move(data: Bytes) -> Move:
    """Read a move.

    Raises:
        Corrupt: ``corrupt.move`` or ``corrupt.record`` for bytes that are no move.
        Incompatible: ``incompatible.move_version`` for a newer version.
    """
    if memoryview(data).nbytes > MAX_MOVE_BYTES:
        raise Corrupt(f"not a move: {memoryview(data).nbytes} bytes are over {MAX_MOVE_BYTES}", code="move")
    try:
        record = as_map(parse_canonical(data, "move"))
        format_version(record, name="move", newest=VERSION)
        as_fields(
            record,
            "at_us", "format", "is_trusted", "message", "new", "old", "previous", "ref", "tx", "version", "who",
        )  # fmt: skip
        previous = _text_or_none(record["previous"])
        return Move(
            ref=as_text(record["ref"]),
            old=_text_or_none(record["old"]),
            new=_text_or_none(record["new"]),
            previous=None if previous is None else MoveId(previous),
            tx=as_count(record["tx"]),
            at_us=as_count(record["at_us"]),
            who=as_text(record["who"]),
            message=as_text(record["message"]),
            is_trusted=_flag(record["is_trusted"]),
        )
    except InvalidInput as error:
        raise Corrupt(f"not a move: {error.message}", code="move") from error


def _text_or_none(value: Value) -> str | None:
    return None if value is None else as_text(value)


def _flag(value: Value) -> bool:
    if not isinstance(value, bool):
        raise _refusal("is_trusted", f"is_trusted is a {type(value).__name__}, not true or false")
    return value


def _check_id(field: str, text: str) -> None:
    try:
        parse_object_id(text)
    except InvalidInput as error:
        raise _refusal(field, f"{field} {text!r:.160} is no id and no ref:<name>") from error


def _refusal(field: str, why: str) -> InvalidInput:
    return InvalidInput(why, code="move", field=field)
