"""The local store keeps the contract, and what it promises beyond: layout, modes, mappings, descriptors."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.errors import Corrupt, Unavailable
from forkpoint.ids import ObjectId, ObjectKind, digest_of
from forkpoint.store.files import FileIdentity
from forkpoint.store.layout import Layout
from forkpoint.store.local import LocalStore
from forkpoint.testing.store_contract import CHUNK, LARGE, MANIFEST, SMALL, Damage, StoreContract, new


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "objects")


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "objects")

    @pytest.fixture
    def damage(self, store: LocalStore) -> Damage:
        def write(kind: ObjectKind, object_id: ObjectId, data: bytes) -> None:
            Layout(store.root).path_of(kind, object_id).write_bytes(data)

        return write


@pytest.mark.parametrize(
    ("kind", "folder", "suffix"),
    [
        (ObjectKind.CHUNK, "chunks", ".safetensors"),
        (ObjectKind.MANIFEST, "manifests", ".json"),
        (ObjectKind.MOVE, "moves", ".json"),
        (ObjectKind.TOKENIZER, "tokenizers", ".json"),
    ],
)
def test_an_object_is_one_file_of_exactly_its_bytes(
    store: LocalStore, kind: ObjectKind, folder: str, suffix: str
) -> None:
    digits = store.put(new(SMALL, LARGE, kind=kind)).object_id[3:]
    assert (store.root / folder / digits[:2] / (digits[2:] + suffix)).read_bytes() == SMALL + LARGE


def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = LocalStore(tmp_path / "objects")
        store.put_many([new(SMALL), new(SMALL, kind=MANIFEST)])
    finally:
        os.umask(before)
    for path in (store.root, *store.root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_left_in_the_staging_folder_after_a_put(store: LocalStore) -> None:
    store.put_many([new(SMALL), new(LARGE), new(SMALL)])
    assert list((store.root / "tmp").iterdir()) == []


def test_another_store_in_the_same_folder_sees_what_was_put(store: LocalStore) -> None:
    object_id = store.put(new(LARGE)).object_id
    other = LocalStore(str(store.root))
    assert other.get(CHUNK, object_id) == LARGE
    assert not other.put(new(LARGE)).was_written


def test_opening_creates_the_root_with_its_parents_and_nothing_in_it(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "objects"
    LocalStore(root)
    assert list(root.iterdir()) == []


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("not a folder")
    with pytest.raises(Unavailable) as caught:
        LocalStore(tmp_path / "objects")
    assert caught.value.code == "unavailable.store"


def test_a_store_whose_folders_were_removed_takes_objects_again(store: LocalStore) -> None:
    store.put(new(SMALL))
    for path in sorted((store.root / "chunks").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert store.put(new(SMALL)).was_written
    assert store.get(CHUNK, digest_of([SMALL])) == SMALL


def test_scan_passes_over_names_that_are_no_ids(store: LocalStore) -> None:
    object_id = store.put(new(SMALL)).object_id
    chunks = store.root / "chunks"
    digits = object_id[3:]
    for name in ("README", "zz/" + "0" * 62 + ".safetensors", f"{digits[:2]}/{digits[2:]}.json"):
        (chunks / name).parent.mkdir(exist_ok=True)
        (chunks / name).write_text("junk")
    for rest in ("0" * 61, "0" * 63, "A" * 62, "0" * 62 + ".safetensors", ""):
        (chunks / digits[:2] / f"{rest}.safetensors").write_text("junk")
    (chunks / digits[:2] / ("1" * 62 + ".safetensors")).mkdir()
    (chunks / "00f").mkdir()
    assert list(store.scan(CHUNK)) == [object_id]
    assert not store.has(CHUNK, ObjectId("b3:" + digits[:2] + "1" * 62))


def test_a_flip_of_equal_size_is_found_right_after_the_bytes_were_verified(store: LocalStore) -> None:
    path_of = Layout(store.root).path_of
    for number in range(50):
        data = LARGE + b"%d" % number
        object_id = store.put(new(data)).object_id
        store.get(CHUNK, object_id)
        with path_of(CHUNK, object_id).open("r+b") as file:
            file.write(b"?")
        with pytest.raises(Corrupt):
            store.get(CHUNK, object_id)


def test_rot_that_no_time_shows_is_found_by_verify_and_remembered(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_id = store.put(new(LARGE)).object_id
    unchanged = FileIdentity(1, 2, len(LARGE), 0, 0)
    monkeypatch.setattr("forkpoint.store.local.identity_of", lambda fd: unchanged)
    store.get(CHUNK, object_id)
    Layout(store.root).path_of(CHUNK, object_id).write_bytes(LARGE[:-1] + b"?")
    store.get(CHUNK, object_id)  # nothing tells that it was touched
    for read in (store.verify, store.get):
        with pytest.raises(Corrupt):
            read(CHUNK, object_id)


def test_large_objects_are_mapped_and_small_ones_copied(store: LocalStore) -> None:
    large, small = (receipt.object_id for receipt in store.put_many([new(LARGE), new(SMALL)]))
    views = [store.get(CHUNK, large), store.get(CHUNK, small)]
    maps = Path("/proc/self/maps").read_text()
    assert large[5:] in maps
    assert small[5:] not in maps
    del views
    gc.collect()
    assert large[5:] not in Path("/proc/self/maps").read_text()


def test_views_hold_no_file_descriptors(store: LocalStore) -> None:
    object_id = store.put(new(LARGE)).object_id
    num_open = _num_open()
    views = [store.get(CHUNK, object_id) for _ in range(200)]
    views += [store.read_range(CHUNK, object_id, start, len(LARGE)) for start in range(200)]
    assert _num_open() == num_open
    assert views[-1] == LARGE[199:]


def test_a_batch_holds_few_file_descriptors_and_closes_them(store: LocalStore) -> None:
    num_open = _num_open()
    num_held: list[int] = []

    def batch() -> Iterator:
        for number in range(300):
            num_held.append(_num_open() - num_open)
            yield new(b"%d" % number)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        store.put_many(batch())
    assert max(num_held) < 50
    assert _num_open() == num_open
    assert list((store.root / "tmp").iterdir()) == []


def test_a_range_of_a_verified_object_reads_no_more_than_the_range(store: LocalStore) -> None:
    object_id = store.put(new(LARGE * 40)).object_id
    time.sleep(0.06)  # a file that has just changed is verified every time
    store.get(CHUNK, object_id)
    before = _bytes_read()
    assert store.read_range(CHUNK, object_id, 1000, 2000) == (LARGE * 40)[1000:2000]
    assert _bytes_read() - before < 10_000


def _num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
