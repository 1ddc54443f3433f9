"""Full disks, file size limits and folders that cannot be written: typed refusals, and nothing half done."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.processes import run

from forkpoint.errors import CapacityExceeded, Error, Unavailable
from forkpoint.ids import digest_of
from forkpoint.store.local import LocalStore
from forkpoint.testing.store_contract import CHUNK, LARGE, SMALL, new

PUTS_UNDER_A_FILE_SIZE_LIMIT = """
import resource

store = LocalStore(root)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for batch in ([new(b"a" * 60_000, b"b" * 60_000)], [new(b"small"), new(b"c" * 200_000), new(b"other")]):
    try:
        store.put_many(batch)
    except Error as error:
        say(f"{error.code} {error.data['errno']}")
say(len(list(store.scan(CHUNK))))
say(os.listdir(root / "tmp"))
say(store.put(new(b"small")).was_written)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def filled_read_only(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStore]:
    """A store with SMALL in it, which cannot be written any more."""
    if os.geteuid() == 0:
        root: Path = request.getfixturevalue("small_disk")
        LocalStore(root).put(new(SMALL))
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        yield LocalStore(root)
        return
    root = tmp_path / "objects"
    LocalStore(root).put(new(SMALL))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    yield LocalStore(root)
    for folder in folders:
        folder.chmod(0o700)


def test_a_full_disk_is_a_capacity_refusal_and_nothing_is_visible(small_disk: Path) -> None:
    store = LocalStore(small_disk / "objects")
    with pytest.raises(CapacityExceeded, match="free space") as caught:
        store.put(new(LARGE * 8))
    assert caught.value.code == "capacity.disk"
    assert caught.value.data["errno"] == "ENOSPC"
    assert list(store.scan(CHUNK)) == []
    assert list((store.root / "tmp").iterdir()) == []
    assert store.put(new(LARGE)).was_written
    assert store.get(CHUNK, digest_of([LARGE])) == LARGE


def test_a_batch_that_does_not_fit_leaves_objects_absent_or_complete_and_a_retry_succeeds(small_disk: Path) -> None:
    store = LocalStore(small_disk / "objects")
    batch = [new(LARGE, b"%d" % number) for number in range(8)]
    with pytest.raises(CapacityExceeded):
        store.put_many(batch)
    for object_id in store.scan(CHUNK):
        store.verify(CHUNK, object_id)
    assert list((store.root / "tmp").iterdir()) == []
    assert all(store.put_many(batch[:3]))


def test_a_file_size_limit_is_a_capacity_refusal(tmp_path: Path) -> None:
    said = run(PUTS_UNDER_A_FILE_SIZE_LIMIT, tmp_path)
    assert said == ["capacity.disk EFBIG", "capacity.disk EFBIG", "0", "[]", "True"]


def test_a_read_only_store_can_be_read(filled_read_only: LocalStore) -> None:
    small = digest_of([SMALL])
    assert list(filled_read_only.scan(CHUNK)) == [small]
    assert filled_read_only.get(CHUNK, small) == SMALL
    assert not filled_read_only.put(new(SMALL)).was_written


def test_a_read_only_store_refuses_changes(filled_read_only: LocalStore) -> None:
    small = digest_of([SMALL])
    for change in (lambda: filled_read_only.put(new(LARGE)), lambda: filled_read_only.delete(CHUNK, small)):
        with pytest.raises(Error) as caught:
            change()
        assert isinstance(caught.value, Unavailable)
        assert caught.value.code == "unavailable.store"
        assert caught.value.data["errno"] in ("EROFS", "EACCES")
        assert str(filled_read_only.root) in caught.value.message
    assert filled_read_only.get(CHUNK, small) == SMALL
