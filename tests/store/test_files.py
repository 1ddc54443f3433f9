"""Parts are written whole however the system takes them; ranges are read and mapped exactly; memories are bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkpoint.ids import digest_of
from forkpoint.store.files import (
    FileIdentity,
    FileMemory,
    digest_of_file,
    identity_of,
    is_in_memory,
    map_view,
    read_view,
    write_parts,
)
from forkpoint.testing.store_contract import CHUNK, MANIFEST

real_writev: Callable[[int, Sequence[memoryview]], int] = os.writev


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.binary(max_size=40), max_size=30), most=st.integers(1, 50), most_parts=st.integers(1, 40))
def test_parts_are_written_whole_however_few_bytes_a_call_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: list[bytes], most: int, most_parts: int
) -> None:
    def short_writev(fd: int, views: Sequence[memoryview]) -> int:
        assert len(views) <= most_parts
        return os.write(fd, b"".join(views)[:most])

    monkeypatch.setattr(os, "writev", short_writev)
    monkeypatch.setattr("forkpoint.store.files._MAX_PARTS_PER_WRITE", most_parts)
    path = tmp_path / "file"
    with path.open("wb") as file:
        write_parts(file.fileno(), [memoryview(part) for part in parts])
    assert path.read_bytes() == b"".join(parts)


@pytest.mark.parametrize("num_bytes", [0, 1, 262_143, 262_144, 262_145, 1_000_000])
@pytest.mark.parametrize("hint", [0, 10, 2_000_000])
def test_the_digest_of_a_file_is_that_of_its_bytes_whatever_size_was_expected(
    tmp_path: Path, num_bytes: int, hint: int
) -> None:
    data = os.urandom(num_bytes)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert digest_of_file(file.fileno(), hint) == digest_of([data])


@given(edges=st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)).map(sorted))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_range_is_mapped_and_read_exactly(tmp_path: Path, edges: list[int]) -> None:
    data = bytes(range(200)) * 100
    start, stop = edges
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert read_view(file.fileno(), start, stop) == data[start:stop]
        if start < stop:
            view = map_view(file.fileno(), start, stop)
            assert view == data[start:stop]
            assert view.readonly


def test_a_mapping_that_the_system_refuses_is_an_os_error() -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        map_view(reader, 0, 100_000)
    os.close(reader)
    os.close(writer)


def test_the_identity_of_a_file_changes_when_its_bytes_do(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with path.open("rb") as file:
        before = identity_of(file.fileno())
    os.utime(path, ns=(0, before.modified_ns))
    while not before.is_telling():
        pass
    path.write_bytes(b"after.")
    with path.open("rb") as file:
        assert identity_of(file.fileno()) != before


def test_the_identity_of_a_file_that_has_just_changed_tells_nothing() -> None:
    now = time.time_ns()
    assert not FileIdentity(1, 2, 3, now, now).is_telling()
    assert not FileIdentity(1, 2, 3, 0, now - 10_000_000).is_telling()
    assert FileIdentity(1, 2, 3, now, now - 1_000_000_000).is_telling()


def test_a_memory_forgets_the_oldest_beyond_its_size() -> None:
    memory = FileMemory(max_entries=3)
    identity = FileIdentity(1, 2, 3, 4, 5)
    ids = [digest_of([b"%d" % number]) for number in range(5)]
    for object_id in ids:
        memory.add(CHUNK, object_id, identity)
    assert [memory.holds(CHUNK, object_id, identity) for object_id in ids] == [False, False, True, True, True]
    assert len(memory) == 3


def test_a_memory_holds_an_object_only_of_that_kind_with_that_identity_until_it_is_discarded() -> None:
    memory = FileMemory()
    object_id = digest_of([b"x"])
    identity = FileIdentity(1, 2, 3, 4, 5)
    memory.add(CHUNK, object_id, identity)
    assert not memory.holds(MANIFEST, object_id, identity)
    for field in FileIdentity._fields:
        assert not memory.holds(CHUNK, object_id, identity._replace(**{field: 9}))
    memory.discard(CHUNK, object_id)
    memory.discard(CHUNK, object_id)
    assert not memory.holds(CHUNK, object_id, identity)


def test_a_file_that_was_just_written_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(os.urandom((1 << 20) + 17))
    with path.open("rb") as file:
        assert is_in_memory(map_view(file.fileno(), 0, (1 << 20) + 17))
