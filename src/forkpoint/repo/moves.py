"""Moving refs: the decision whether a move may go ahead, and the move itself, inside a catalog transaction.

Each move is stored as an object before the catalog names it, so that refs and reflog survive the catalog. A move object whose
transaction did not commit is harmless: it says what was about to be true, and collection removes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forkpoint.catalog.records import MoveRow, RefRow
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Conflict, InvalidInput
from forkpoint.ids import ManifestId, MoveId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.names import HEAD, HEADS, SYMBOLIC, Expectation, short_name
from forkpoint.state.move import Move, encode_move
from forkpoint.store.base import NewObject

MAX_MESSAGE_CHARS: Final = 4096
FIRST_BRANCH: Final = HEADS + "main"


def decide_move(
    ref: str,
    tip: ManifestId | None,
    new: ManifestId | None,
    expect: Expectation,
    is_behind: Callable[[ManifestId], bool],
) -> bool:
    """Whether ``ref`` has to move; False when it is at ``new`` already, whatever was expected: a repeated call succeeds.

    Args:
        tip: what the ref holds now.
        new: what it is to hold; None deletes it.
        is_behind: whether a manifest is an ancestor of ``new``.

    Raises:
        Conflict: ``conflict.ref`` when the ref does not hold what was expected.
    """
    if tip == new:
        return False
    if expect == "anything":
        return True
    if expect == "fast-forward":
        if tip is not None and not is_behind(tip):
            raise _conflict(
                ref, tip, new, f"which is not an ancestor of {_shown(new)}; continue from it, or use another name"
            )
        return True
    if expect == "absent":
        if tip is not None:
            raise _conflict(ref, tip, new, "and was expected to be absent; choose another name")
        return True
    if tip != expect:
        raise _conflict(ref, tip, new, f"and was expected to be at {_shown(expect)}; look again and retry")
    return True


def cut_message(message: str) -> str:
    """A message as moves hold it, for the catalog to hold the same. Raises InvalidInput ``invalid_input.message``."""
    if not isinstance(message, str):
        raise InvalidInput(f"a message is text, not {message!r}; leave it empty for none", code="message")
    return message[:MAX_MESSAGE_CHARS]


def move_ref(
    backing: Backing, tx: Transaction, ref: str, new: ManifestId | None, *, message: str, is_trusted: bool
) -> MoveId:
    """Record and make one move of a branch, a tag or a detached HEAD. The caller has decided that it may be made."""
    found = tx.find_ref(ref)
    row = _record(backing, tx, ref, value_of(found), new, message=message, is_trusted=is_trusted)
    if new is None:
        tx.delete_ref(ref, row)
    else:
        tx.set_ref(ref, target=new, move=row)
    return row.move_id


def point_head(backing: Backing, tx: Transaction, ref: str, *, message: str) -> MoveId:
    """Make HEAD symbolic at ``ref``, which need not exist yet."""
    found = tx.find_ref(HEAD)
    row = _record(backing, tx, HEAD, value_of(found), SYMBOLIC + ref, message=message, is_trusted=True)
    tx.set_ref(HEAD, symbolic=ref, move=row)
    return row.move_id


def ensure_head(backing: Backing) -> None:
    """Point HEAD at the branch ``main`` if it points nowhere yet."""
    if backing.catalog.find_ref(HEAD) is not None:
        return
    with backing.catalog.transaction(reason="create") as tx:
        if tx.find_ref(HEAD) is None:
            point_head(backing, tx, FIRST_BRANCH, message="create")


def value_of(row: RefRow | None) -> str | None:
    """A ref's value as a reflog writes it."""
    if row is None:
        return None
    return SYMBOLIC + row.symbolic if row.symbolic is not None else row.target


def _record(
    backing: Backing, tx: Transaction, ref: str, old: str | None, new: str | None, *, message: str, is_trusted: bool
) -> MoveRow:
    move = Move(
        ref=ref, old=old, new=new, previous=tx.last_move_id(ref), tx=tx.number, at_us=tx.at_us,
        who=backing.who, message=cut_message(message), is_trusted=is_trusted,
    )  # fmt: skip
    receipt = backing.store.put(NewObject(kind=ObjectKind.MOVE, parts=[encode_move(move)]))
    return move_row(receipt.object_id, move)


def move_row(move_id: MoveId, move: Move) -> MoveRow:
    """A move as the catalog holds it."""
    return MoveRow(
        move_id=move_id, previous=move.previous, ref=move.ref, old=move.old, new=move.new, tx=move.tx,
        at_us=move.at_us, who=move.who, message=move.message, is_trusted=move.is_trusted,
    )  # fmt: skip


def _shown(manifest_id: ManifestId | None) -> str:
    return "nothing" if manifest_id is None else short(manifest_id)


def _conflict(ref: str, tip: ManifestId | None, new: ManifestId | None, why: str) -> Conflict:
    name = short_name(ref)
    where = "does not exist" if tip is None else f"is at {_shown(tip)}"
    return Conflict(f"{name} {where}, {why}", code="ref", ref=ref, tip=tip, new=new)
