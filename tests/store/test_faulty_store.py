"""Faults happen at the chosen occurrence, before or after the operation; without faults the wrappers change nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.store.damage import damage_in
from tests.store.processes import start

from forkpoint.errors import CapacityExceeded, Unavailable
from forkpoint.ids import digest_of
from forkpoint.store.memory import MemoryStore
from forkpoint.testing.faulty_store import Fault, FaultyStore, SlowStore, disk_full, lost_reply, raising
from forkpoint.testing.store_contract import CHUNK, LARGE, SMALL, Damage, StoreContract, new

SMALL_ID = digest_of([SMALL])

ENDS_ITSELF = """
from forkpoint.testing.faulty_store import Fault, FaultyStore, exiting, kill

fault = Fault(step="put_many.object", nth=2, effect={"kill": kill, "exit": exiting(17)}[sys.argv[2]])
store = FaultyStore(LocalStore(root), fault)
store.put(new(b"put before"))
store.put_many([new(b"one"), new(b"two"), new(b"three")])
say("not reached")
"""


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, inner: MemoryStore) -> FaultyStore:
        return FaultyStore(inner)

    @pytest.fixture
    def damage(self, inner: MemoryStore) -> Damage:
        return damage_in(inner)


class TestSlowStore(StoreContract):
    @pytest.fixture
    def store(self, inner: MemoryStore) -> SlowStore:
        return SlowStore(inner, latency_s=0.0)

    @pytest.fixture
    def damage(self, inner: MemoryStore) -> Damage:
        return damage_in(inner)


def test_a_fault_before_an_operation_keeps_it_from_happening(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(step="put", effect=raising(disk_full())))
    with pytest.raises(CapacityExceeded):
        store.put(new(SMALL))
    assert not inner.has(CHUNK, SMALL_ID)
    assert store.put(new(SMALL)).was_written


def test_a_fault_after_an_operation_loses_only_its_reply(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(step="put", effect=raising(lost_reply()), moment="after"))
    with pytest.raises(Unavailable):
        store.put(new(SMALL))
    assert inner.has(CHUNK, SMALL_ID)
    assert not store.put(new(SMALL)).was_written


def test_a_fault_hits_the_occurrences_it_names_and_no_others(inner: MemoryStore) -> None:
    hits: list[int] = []
    store = FaultyStore(inner, Fault(step="has", effect=lambda: hits.append(store.num_calls("has")), nth=3, times=2))
    for _ in range(6):
        store.has(CHUNK, SMALL_ID)
        list(store.scan(CHUNK))
    assert hits == [3, 4]
    assert store.num_calls("has") == 6


def test_a_fault_within_a_batch_hits_between_two_of_its_objects(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(step="put_many.object", effect=raising(disk_full()), nth=2))
    with pytest.raises(CapacityExceeded):
        store.put_many([new(SMALL), new(LARGE)])
    assert not inner.has(CHUNK, digest_of([LARGE]))


@pytest.mark.parametrize("step", ["put", "put_many", "get", "read_range", "has", "size", "verify", "delete", "scan"])
def test_every_operation_can_fail(inner: MemoryStore, step: str) -> None:
    inner.put(new(SMALL))
    store = FaultyStore(inner, Fault(step=step, effect=raising(lost_reply())))  # type: ignore[arg-type]
    arguments = {"put": [new(SMALL)], "put_many": [[new(SMALL)]], "scan": [CHUNK]}.get(step, [CHUNK, SMALL_ID])
    if step == "read_range":
        arguments = [CHUNK, SMALL_ID, 0, 1]
    with pytest.raises(Unavailable):
        getattr(store, step)(*arguments)
    getattr(store, step)(*arguments)


@pytest.mark.parametrize(("way", "status"), [("kill", -signal.SIGKILL), ("exit", 17)])
def test_a_fault_can_end_the_process(tmp_path: Path, way: str, status: int) -> None:
    with start(ENDS_ITSELF, tmp_path, way) as process:
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (status, "")


def test_a_slow_store_takes_its_latency_for_each_call_and_once_for_a_batch(inner: MemoryStore) -> None:
    store = SlowStore(inner, latency_s=0.02)
    begin = time.monotonic()
    store.put_many([new(SMALL), new(LARGE)])
    store.has(CHUNK, SMALL_ID)
    assert 0.04 <= time.monotonic() - begin < 2
