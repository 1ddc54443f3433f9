"""The fingerprint of a computation: which state fits it, and whose bits it promises to repeat.

Two records. *State identity* must match to restore. *Execution identity* must match to promise that the same steps give the
same bits afterwards. A mismatch names the field and both values. Pure: whoever loads a model fills the records in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import Corrupt, Incompatible
from forkpoint.ids import ObjectId, digest_of
from forkpoint.state.canonical import Record, Value, canonical_bytes, to_float

_PLAIN: Final = re.compile(r'[^."]+')


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that differs: its dotted path, what is here and what the stored value needs. None means absent."""

    field: str
    have: str | None
    want: str | None

    def __str__(self) -> str:
        return f"{self.field}: have {self.have}, want {self.want}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """State identity and execution identity, both canonical records."""

    state: Record
    execution: Record

    @property
    def state_id(self) -> ObjectId:
        """Digest of the state identity's canonical bytes."""
        return digest_of([canonical_bytes(self.state)])

    @property
    def execution_id(self) -> ObjectId:
        """Digest of the execution identity's canonical bytes."""
        return digest_of([canonical_bytes(self.execution)])


def differences(have: Record, want: Record) -> list[Difference]:
    """Every field in which two records differ, in order of path."""
    if canonical_bytes(have) == canonical_bytes(want):
        return []
    left, right = dict(_leaves(have, "")), dict(_leaves(want, ""))
    return [
        Difference(field=path, have=left.get(path), want=right.get(path))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def check_state(have: Fingerprint, want: Fingerprint) -> None:
    """Refuse unless state stored under ``want`` fits an engine whose fingerprint is ``have``.

    Raises:
        Incompatible: ``incompatible.state_identity`` naming the first field that differs, with both values.
    """
    found = differences(have.state, want.state)
    if found:
        raise _refusal("state_identity", found, "load the model it was written with")


def check_execution(have: Fingerprint, want: Fingerprint) -> None:
    """Refuse unless the same steps would give the same bits.

    Raises:
        Incompatible: ``incompatible.execution_identity`` naming the first field that differs, with both values.
    """
    found = differences(have.execution, want.execution)
    if found:
        raise _refusal(
            "execution_identity",
            found,
            "pass allow_execution_difference to restore the same bytes without the promise of equal bits afterwards",
        )


def _refusal(code: str, found: list[Difference], hint: str) -> Incompatible:
    first, what = found[0], code.replace("_", " ")
    more = f" (and {len(found) - 1} more fields)" if len(found) > 1 else ""
    return Incompatible(
        f"{what} differs in {first.field}: this engine has {first.have}, the stored state needs {first.want}{more}; {hint}",
        code=code, field=first.field, have=first.have, want=first.want, num_fields=len(found),
    )  # fmt: skip


def _leaves(value: Value, path: str) -> Iterator[tuple[str, str]]:
    """Path and text of every value that is not a map. Different records never have the same leaves."""
    if isinstance(value, Mapping) and value and not _is_float(value):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{_step(key)}" if path else _step(key))
    else:
        yield path, repr(to_float(value)) if _is_float(value) else canonical_bytes(value).decode()


def _is_float(value: Value) -> bool:
    try:
        to_float(value)
    except Corrupt:
        return False
    return True


def _step(key: str) -> str:
    """A key as part of a path; quoted where it could be read as something else."""
    return key if _PLAIN.fullmatch(key) else canonical_bytes(key).decode()
