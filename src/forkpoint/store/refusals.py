"""What stores say when they refuse: one wording and one set of facts for every backend.

Knows errors and ids, no backend. ``place`` is where the store lies, as its user would name it.
"""

from __future__ import annotations

from forkpoint.errors import Corrupt, InvalidInput, NotFound
from forkpoint.ids import ObjectId, ObjectKind


def absent(kind: ObjectKind, object_id: ObjectId, place: str) -> NotFound:
    """``not_found.object``: the id is well formed, the store does not hold it."""
    return NotFound(
        f"{kind} {object_id} is not in the store {place}; check the id, or fetch the object from a store that has it",
        code="object",
        kind=kind.value,
        id=object_id,
        place=place,
    )


def damaged(kind: ObjectKind, object_id: ObjectId, place: str, *, found: ObjectId, num_bytes: int) -> Corrupt:
    """``corrupt.object``: ``num_bytes`` bytes are there, but they have the id ``found``."""
    return Corrupt(
        f"{kind} {object_id} in the store {place} is damaged: its {num_bytes} bytes have the id {found}; "
        "put the object again to replace it, or fetch it from another store",
        code="object",
        kind=kind.value,
        id=object_id,
        place=place,
        found=found,
        num_bytes=num_bytes,
    )


def check_range(kind: ObjectKind, object_id: ObjectId, start: int, stop: int, num_bytes: int) -> None:
    """Check that ``[start, stop)`` lies in an object of ``num_bytes``; empty ranges are allowed, negative indices not.

    Raises:
        InvalidInput: ``invalid_input.range``.
    """
    if 0 <= start <= stop <= num_bytes:
        return
    raise InvalidInput(
        f"the range [{start}, {stop}) is not in {kind} {object_id}; choose 0 <= start <= stop <= {num_bytes}",
        code="range",
        kind=kind.value,
        id=object_id,
        start=start,
        stop=stop,
        num_bytes=num_bytes,
    )
