"""Wrappers that make any store fail or be slow at a chosen step: for tests of what stands on a store.

    store = FaultyStore(LocalStore(root), Fault(step="put", nth=2, moment="after", effect=raising(lost_reply())))

Knows the protocol, no backend. A fault happens around whole operations; inside ``put_many`` also around each object that the
inner store draws from the batch (step ``put_many.object``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NoReturn, TypeAlias, TypeVar, final

from forkpoint.errors import CapacityExceeded, Error, Unavailable
from forkpoint.ids import ObjectId, ObjectKind
from forkpoint.store.base import NewObject, PutReceipt, Store

Step: TypeAlias = Literal[
    "put", "put_many", "put_many.object", "get", "read_range", "has", "size", "verify", "delete", "scan"
]
_Result = TypeVar("_Result")
Moment: TypeAlias = Literal["before", "after"]
Effect: TypeAlias = Callable[[], object]
"""What happens: it returns (and the operation goes on), raises, or ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """When something happens, and what.

    Attributes:
        step: the operation.
        effect: called at the moment; ``raising``, ``kill``, ``exiting`` or any other callable.
        nth: the first occurrence of the step that is hit, counted from 1 over all threads.
        times: how many occurrences in a row are hit.
        moment: before the operation, or after it succeeded. An error after it is a lost reply: the work is done and the caller
            does not know.
    """

    step: Step
    effect: Effect
    nth: int = 1
    times: int = 1
    moment: Moment = "before"


def raising(error: Error) -> Effect:
    """Effect: raise ``error``."""

    def effect() -> NoReturn:
        raise error

    return effect


def exiting(status: int) -> Effect:
    """Effect: end the process at once with ``status``, without unwinding or flushing anything."""
    return lambda: os._exit(status)


def kill() -> None:
    """Effect: SIGKILL this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> CapacityExceeded:
    """What a store raises when no space is left."""
    return CapacityExceeded("could not write: no space is left (injected); free space, then retry", code="disk")


def lost_reply() -> Unavailable:
    """What a store raises when it does not answer."""
    return Unavailable("the store did not answer (injected); retry", code="store")


@final
class FaultyStore:
    """``inner`` with faults. Without faults it passes everything through."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        self._inner = inner
        self._faults = faults
        self._counts: dict[Step, int] = {}
        self._lock = Lock()

    def num_calls(self, step: Step) -> int:
        """How often the step has begun."""
        return self._counts.get(step, 0)

    def put(self, new: NewObject) -> PutReceipt:
        """See ``Store.put``."""
        return self._around("put", lambda: self._inner.put(new))

    def put_many(self, batch: Iterable[NewObject]) -> list[PutReceipt]:
        """See ``Store.put_many``."""
        return self._around("put_many", lambda: self._inner.put_many(self._drawn(batch)))

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """See ``Store.get``."""
        return self._around("get", lambda: self._inner.get(kind, object_id))

    def read_range(self, kind: ObjectKind, object_id: ObjectId, start: int, stop: int) -> memoryview:
        """See ``Store.read_range``."""
        return self._around("read_range", lambda: self._inner.read_range(kind, object_id, start, stop))

    def has(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.has``."""
        return self._around("has", lambda: self._inner.has(kind, object_id))

    def size(self, kind: ObjectKind, object_id: ObjectId) -> int:
        """See ``Store.size``."""
        return self._around("size", lambda: self._inner.size(kind, object_id))

    def verify(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """See ``Store.verify``."""
        return self._around("verify", lambda: self._inner.verify(kind, object_id))

    def delete(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.delete``."""
        return self._around("delete", lambda: self._inner.delete(kind, object_id))

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """See ``Store.scan``. The fault is around the start of the listing."""
        return self._around("scan", lambda: self._inner.scan(kind))

    def _drawn(self, batch: Iterable[NewObject]) -> Iterator[NewObject]:
        """The moment "after" an object is when the inner store asks for the next one."""
        for new in batch:
            faults = self._due("put_many.object")
            _apply(faults, "before")
            yield new
            _apply(faults, "after")

    def _around(self, step: Step, operation: Callable[[], _Result]) -> _Result:
        faults = self._due(step)
        _apply(faults, "before")
        result = operation()
        _apply(faults, "after")
        return result

    def _due(self, step: Step) -> list[Fault]:
        with self._lock:
            count = self._counts[step] = self._counts.get(step, 0) + 1
        return [fault for fault in self._faults if fault.step == step and 0 <= count - fault.nth < fault.times]


def _apply(faults: Iterable[Fault], moment: Moment) -> None:
    for fault in faults:
        if fault.moment == moment:
            fault.effect()


@final
class SlowStore:
    """``inner`` behind a delay of ``latency_s`` seconds before each call, as a store across a network has."""

    def __init__(self, inner: Store, latency_s: float) -> None:
        self._inner = inner
        self._latency_s = latency_s

    def put(self, new: NewObject) -> PutReceipt:
        """See ``Store.put``."""
        return self._delayed().put(new)

    def put_many(self, batch: Iterable[NewObject]) -> list[PutReceipt]:
        """See ``Store.put_many``. One delay for the batch."""
        return self._delayed().put_many(batch)

    def get(self, kind: ObjectKind, object_id: ObjectId) -> memoryview:
        """See ``Store.get``."""
        return self._delayed().get(kind, object_id)

    def read_range(self, kind: ObjectKind, object_id: ObjectId, start: int, stop: int) -> memoryview:
        """See ``Store.read_range``."""
        return self._delayed().read_range(kind, object_id, start, stop)

    def has(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.has``."""
        return self._delayed().has(kind, object_id)

    def size(self, kind: ObjectKind, object_id: ObjectId) -> int:
        """See ``Store.size``."""
        return self._delayed().size(kind, object_id)

    def verify(self, kind: ObjectKind, object_id: ObjectId) -> None:
        """See ``Store.verify``."""
        return self._delayed().verify(kind, object_id)

    def delete(self, kind: ObjectKind, object_id: ObjectId) -> bool:
        """See ``Store.delete``."""
        return self._delayed().delete(kind, object_id)

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """See ``Store.scan``. One delay for the listing."""
        return self._delayed().scan(kind)

    def _delayed(self) -> Store:
        time.sleep(self._latency_s)
        return self._inner
