"""The store protocol: content-addressed immutable bytes, in one folder a kind.

A store knows nothing of manifests, refs or models. Its invariant: an object is absent, or complete and durable; once
``put`` has returned, a crash of the process or the machine does not lose it. Vary a store by wrapping it, not by options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from forkpoint.ids import Bytes, ObjectId, ObjectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """Bytes on their way into a store.

    ``parts`` are written one after another and never joined in memory, so that a chunk can be written straight from the
    tensors it was captured from. They must not change until the put has returned.
    """

    kind: ObjectKind
    parts: Sequence[Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReceipt:
    """What a put did: the id and size of the object, and whether its bytes had to be written."""

    kind: ObjectKind
    object_id: ObjectId
    num_bytes: int
    was_written: bool


class Store(Protocol):
    """Content-addressed bytes. Every method is safe to call from several threads and processes at once.

    Kinds are apart: an object of one kind is not present under another. Every method that takes an id raises InvalidInput
    ``invalid_input.id`` for text that is no complete id, and Unavailable ``unavailable.store`` when the store does not serve.
    """

    def put(self, new: NewObject) -> PutReceipt:
        """Make one object durable; idempotent. An existing object that turns out to be corrupt is replaced.

        Raises:
            CapacityExceeded: ``capacity.disk`` when no space is left; nothing is visible afterwards.
            Unavailable: ``unavailable.store`` when the store cannot be written (read-only, permission).
        """
        ...

    def put_many(self, batch: Iterable[NewObject]) -> list[PutReceipt]:
        """Make a batch durable, in order, for fewer flushes than one ``put`` each.

        Consumes ``batch`` lazily, holding at most one object's parts beyond what the caller holds. When it raises, objects
        of the batch may or may not be present, each absent or complete. Receipts are in the order of the batch; of equal
        objects in one batch, only the first is written. Raises like ``put``, and whatever ``batch`` raises.
        """
        ...

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """Read-only bytes of an object, verified against its id on first touch. The view keeps what it maps alive.

        Raises:
            NotFound: ``not_found.object``.
            Corrupt: ``corrupt.object`` when the bytes do not have this id.
        """
        ...

    def read_range(self, kind: ObjectKind, object_id: ObjectId, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)`` of an object, possibly none, verified like ``get``.

        Raises:
            NotFound: ``not_found.object``.
            Corrupt: ``corrupt.object``, wherever in the object the damage is.
            InvalidInput: ``invalid_input.range`` unless ``0 <= start <= stop <= size``.
        """
        ...

    def has(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """Whether the object is present (its bytes are not read)."""
        ...

    def size(self, kind: ObjectKind, object_id: ObjectId) -> int:
        """Size in bytes. Raises NotFound ``not_found.object``."""
        ...

    def verify(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """Recompute the digest now, whatever was verified before.

        Raises:
            NotFound: ``not_found.object``.
            Corrupt: ``corrupt.object``; from then on ``get`` raises it too, until the object is put again.
        """
        ...

    def delete(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """Remove an object durably; False when it was absent already. Views handed out before stay readable."""
        ...

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """Every present object of a kind, in no particular order. Names that are no ids are passed over."""
        ...
