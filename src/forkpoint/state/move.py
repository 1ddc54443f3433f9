"""A ref move: the immutable record of one step of a ref, stored as an object so that refs and reflog survive the catalog.

Moves of one ref form a chain through ``previous``. FORMAT.md ("Moves") says how refs are rebuilt from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import Corrupt, Incompatible
from forkpoint.ids import Bytes, MoveId, parse_object_id
from forkpoint.state.canonical import canonical_bytes, parse_canonical

FORMAT: Final = "forkpoint.move"
VERSION: Final = 1


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


def encode_move(move: Move) -> bytes:
    """Canonical bytes; their digest is the move's id."""
    return canonical_bytes(
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


def decode_move(data: Bytes) -> Move:
    """Read a move. Raises Corrupt ``corrupt.move``, or Incompatible ``incompatible.move_version`` for a newer version."""
    record = parse_canonical(data, "ref move")
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise Corrupt("not a ref move: it does not say that it is one", code="move")
    version = record.get("version")
    if isinstance(version, int) and version > VERSION:
        raise Incompatible(
            f"ref move version {version} is newer than {VERSION}, the newest this program reads; update forkpoint",
            code="move_version", field="version", have=version, want=VERSION,
        )  # fmt: skip
    previous = record.get("previous")
    facts = {key: record.get(key) for key in ("ref", "old", "new", "tx", "at_us", "who", "message", "is_trusted")}
    if not _is_sound(facts) or not (previous is None or isinstance(previous, str)):
        raise Corrupt(f"not a ref move: {facts}", code="move")
    return Move(previous=None if previous is None else parse_object_id(previous), **facts)  # type: ignore[arg-type]


def _is_sound(facts: Mapping[str, object]) -> bool:
    types: dict[str, tuple[type, ...]] = {
        "ref": (str,), "old": (str, type(None)), "new": (str, type(None)), "tx": (int,), "at_us": (int,),
        "who": (str,), "message": (str,), "is_trusted": (bool,),
    }  # fmt: skip
    return all(type(facts[key]) in allowed for key, allowed in types.items())
