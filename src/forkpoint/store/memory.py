"""A store in the memory of the process: for tests, trials and values that need not outlive it.

Keeps every sentence of the protocol but durability.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Final, final

from forkpoint.ids import ObjectId, ObjectKind, digest_of, parse_object_id
from forkpoint.store.base import NewObject, PutReceipt
from forkpoint.store.refusals import absent, check_range, damaged

_PLACE: Final = "in memory"


@final
class MemoryStore:
    """Objects in a dict. Views are of the stored bytes themselves, without a copy."""

    def __init__(self) -> None:
        self._objects: dict[tuple[ObjectKind, ObjectId], bytes] = {}
        self._verified: set[tuple[ObjectKind, ObjectId]] = set()
        self._lock = Lock()

    def put(self, new: NewObject) -> PutReceipt:
        """See ``Store.put``."""
        data = b"".join(new.parts)
        object_id = digest_of([data])
        key = (new.kind, object_id)
        with self._lock:
            was_written = self._objects.get(key) != data
            if was_written:
                self._objects[key] = data
        return PutReceipt(kind=new.kind, object_id=object_id, num_bytes=len(data), was_written=was_written)

    def put_many(self, batch: Iterable[NewObject]) -> list[PutReceipt]:
        """See ``Store.put_many``."""
        return [self.put(new) for new in batch]

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """See ``Store.get``."""
        data = self._get(kind, object_id)
        if (kind, object_id) not in self._verified:
            self._check_digest(kind, object_id, data)
        return memoryview(data)

    def read_range(self, kind: ObjectKind, object_id: ObjectId, start: int, stop: int) -> memoryview:
        """See ``Store.read_range``."""
        view = self.get(kind, object_id)
        check_range(kind, object_id, start, stop, view.nbytes)
        return view[start:stop]

    def has(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.has``."""
        return (kind, parse_object_id(object_id)) in self._objects

    def size(self, kind: ObjectKind, object_id: ObjectId) -> int:
        """See ``Store.size``."""
        return len(self._get(kind, object_id))

    def verify(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """See ``Store.verify``."""
        self._check_digest(kind, object_id, self._get(kind, object_id))

    def delete(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.delete``."""
        key = (kind, parse_object_id(object_id))
        with self._lock:
            self._verified.discard(key)
            return self._objects.pop(key, None) is not None

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """See ``Store.scan``."""
        with self._lock:
            present = [object_id for each, object_id in self._objects if each is kind]
        yield from present

    def _get(self, kind: ObjectKind, object_id: ObjectId) -> bytes:
        data = self._objects.get((kind, parse_object_id(object_id)))
        if data is None:
            raise absent(kind, object_id, _PLACE)
        return data

    def _check_digest(self, kind: ObjectKind, object_id: ObjectId, data: bytes) -> None:
        found = digest_of([data])
        if found != object_id:
            self._verified.discard((kind, object_id))
            raise damaged(kind, object_id, _PLACE, found=found, num_bytes=len(data))
        self._verified.add((kind, object_id))
