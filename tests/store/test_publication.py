"""The order of system calls: bytes are on the disk before their name appears, and names before the put returns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from forkpoint.errors import Unavailable
from forkpoint.store.local import LocalStore
from forkpoint.testing.store_contract import CHUNK, LARGE, SMALL, new


class Calls:
    """What the system was asked, in order of completion: flushes of files (by inode) and folders, and renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed_files: list[int] = []
        self.flushed_folders: list[Path] = []
        self._flush, self._flush_folder, self._rename = os.fdatasync, os.fsync, os.replace
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fdatasync(self, fd: int) -> None:
        num_bytes = os.fstat(fd).st_size
        self._flush(fd)
        assert os.fstat(fd).st_size == num_bytes
        self.flushed_files.append(os.fstat(fd).st_ino)

    def fsync(self, fd: int) -> None:
        self._flush_folder(fd)
        self.flushed_folders.append(Path(f"/proc/self/fd/{fd}").readlink())

    def replace(self, source: str, target: Path) -> None:
        assert Path(source).stat().st_ino in self.flushed_files, "named before its bytes were flushed"
        self._rename(source, target)
        self.flushed_folders = [folder for folder in self.flushed_folders if folder != target.parent]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def calls(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("num_objects", [1, 2, 50])
def test_bytes_are_flushed_before_their_names_and_names_before_the_return(
    store: LocalStore, calls: Calls, num_objects: int
) -> None:
    store.put_many(new(LARGE, b"%d" % number) for number in range(num_objects))
    folders = set((store.root / "chunks").iterdir())
    assert len(calls.flushed_files) == num_objects
    assert set(calls.flushed_folders) == {*folders, store.root / "chunks", store.root}


def test_each_folder_is_flushed_once_a_batch_and_parents_only_the_first_time(store: LocalStore, calls: Calls) -> None:
    store.put_many(new(b"%d" % number) for number in range(2000))
    assert len(calls.flushed_folders) == 258
    calls.flushed_folders.clear()
    object_id = store.put(new(SMALL)).object_id
    assert calls.flushed_folders == [store.root / "chunks" / object_id[3:5]]


def test_an_object_that_another_process_has_named_is_flushed_before_its_put_returns(
    store: LocalStore, calls: Calls
) -> None:
    LocalStore(store.root).put(new(SMALL))
    calls.flushed_folders.clear()
    object_id = store.put(new(SMALL)).object_id
    assert set(calls.flushed_folders) == {store.root / "chunks" / object_id[3:5], store.root / "chunks", store.root}
    calls.flushed_folders.clear()
    store.put(new(SMALL))
    assert calls.flushed_folders == []


def test_folders_made_again_after_they_were_removed_are_flushed_with_their_parents(
    store: LocalStore, calls: Calls
) -> None:
    object_id = store.put(new(SMALL)).object_id
    shutil.rmtree(store.root / "chunks")
    calls.flushed_folders.clear()
    store.put(new(SMALL))
    assert set(calls.flushed_folders) == {store.root / "chunks" / object_id[3:5], store.root / "chunks", store.root}


def test_a_deletion_is_flushed_before_it_returns(store: LocalStore, calls: Calls) -> None:
    object_id = store.put(new(SMALL)).object_id
    for _ in range(2):
        calls.flushed_folders.clear()
        store.delete(CHUNK, object_id)
        assert calls.flushed_folders == [store.root / "chunks" / object_id[3:5]]


@pytest.mark.parametrize("failing_flush", [1, 2, 3])
def test_nothing_of_a_batch_is_visible_when_a_flush_of_its_bytes_fails(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, failing_flush: int
) -> None:
    count = 0

    def fdatasync(fd: int) -> None:
        nonlocal count
        count += 1
        if count == failing_flush:
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(Unavailable) as caught:
        store.put_many([new(b"a"), new(b"b"), new(b"c")])
    assert caught.value.code == "unavailable.store"
    assert caught.value.data["errno"] == "EIO"
    assert list(store.scan(CHUNK)) == []
    assert list((store.root / "tmp").iterdir()) == []
