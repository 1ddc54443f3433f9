"""What every store must do, as tests to inherit.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path): return MyStore(tmp_path)

        @pytest.fixture
        def damage(self, store): return store.overwrite_behind_its_back

Each test is one sentence of the protocol (``forkpoint.store.base.Store``).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest

from forkpoint.errors import Corrupt, Error, InvalidInput, NotFound
from forkpoint.ids import Bytes, ObjectId, ObjectKind, digest_of
from forkpoint.store.base import NewObject, PutReceipt, Store

CHUNK = ObjectKind.CHUNK
MANIFEST = ObjectKind.MANIFEST
SMALL = b"a small object"
LARGE = bytes(range(256)) * 1024
ABSENT = digest_of([b"never put"])

Damage: TypeAlias = Callable[[ObjectKind, ObjectId, bytes], None]
"""Replaces the stored bytes of a present object without the store's knowledge, as a bad disk would."""


class _Tracked(bytearray):
    """Bytes whose end can be watched."""


def new(*parts: Bytes, kind: ObjectKind = CHUNK) -> NewObject:
    """An object to put."""
    return NewObject(kind=kind, parts=parts)


class StoreContract:
    """Inherit, and give the fixtures ``store`` (empty) and ``damage``."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError

    @pytest.fixture
    def damage(self, store: Store) -> Damage:
        """See ``Damage``."""
        raise NotImplementedError

    # put

    @pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
    def test_what_was_put_can_be_got_under_the_digest_of_its_bytes(self, store: Store, data: bytes) -> None:
        receipt = store.put(new(data))
        expected = PutReceipt(kind=CHUNK, object_id=digest_of([data]), num_bytes=len(data), was_written=True)
        assert receipt == expected
        assert store.get(CHUNK, receipt.object_id) == data

    @pytest.mark.parametrize(
        "parts",
        [
            (),
            (b"",),
            (b"", b"ab", b"", bytearray(b"cd"), memoryview(b"efgh")[1:3], b""),
            (b"xyz",) * 5000,
            (LARGE, b"z"),
        ],
        ids=["none", "one-empty", "mixed", "many", "large"],
    )
    def test_parts_are_stored_one_after_another(self, store: Store, parts: Sequence[Bytes]) -> None:
        receipt = store.put(new(*parts))
        assert receipt.num_bytes == sum(len(part) for part in parts)
        assert store.get(CHUNK, receipt.object_id) == b"".join(parts)

    def test_parts_of_wider_elements_are_stored_as_their_bytes(self, store: Store) -> None:
        receipt = store.put(new(memoryview(LARGE).cast("I"), memoryview(SMALL[:12]).cast("B", (3, 4))))
        assert receipt.num_bytes == len(LARGE) + 12
        assert store.get(CHUNK, receipt.object_id) == LARGE + SMALL[:12]

    def test_putting_equal_bytes_again_writes_nothing(self, store: Store) -> None:
        first = store.put(new(LARGE))
        again = store.put(new(LARGE[:7], LARGE[7:]))
        assert (first.was_written, again.was_written) == (True, False)
        assert again.object_id == first.object_id
        assert again.num_bytes == len(LARGE)
        assert list(store.scan(CHUNK)) == [first.object_id]

    def test_kinds_are_apart(self, store: Store) -> None:
        object_id = store.put(new(SMALL)).object_id
        assert not store.has(MANIFEST, object_id)
        assert store.put(new(SMALL, kind=MANIFEST)).was_written
        assert store.delete(MANIFEST, object_id)
        assert store.get(CHUNK, object_id) == SMALL

    @pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
    def test_put_replaces_a_damaged_object(self, store: Store, damage: Damage, data: bytes) -> None:
        object_id = store.put(new(data)).object_id
        damage(CHUNK, object_id, data[:-1] + b"?")
        assert store.put(new(data)).was_written
        assert store.get(CHUNK, object_id) == data
        store.verify(CHUNK, object_id)
        assert not store.put(new(data)).was_written

    def test_put_replaces_an_object_that_was_damaged_after_it_was_read(self, store: Store, damage: Damage) -> None:
        object_id = store.put(new(LARGE)).object_id
        assert store.get(CHUNK, object_id) == LARGE
        damage(CHUNK, object_id, LARGE[:-1])
        assert store.put_many([new(LARGE)])[0].was_written
        assert store.get(CHUNK, object_id) == LARGE

    # put_many

    def test_put_many_returns_receipts_in_the_order_of_the_batch(self, store: Store) -> None:
        store.put(new(b"3"))
        receipts = store.put_many(new(b"%d" % number, kind=kind) for number in range(40) for kind in (CHUNK, MANIFEST))
        assert [receipt.object_id for receipt in receipts] == [digest_of([b"%d" % (place // 2)]) for place in range(80)]
        assert [place for place, receipt in enumerate(receipts) if not receipt.was_written] == [6]
        for receipt in receipts:
            assert digest_of([store.get(receipt.kind, receipt.object_id)]) == receipt.object_id

    def test_put_many_of_nothing_does_nothing(self, store: Store) -> None:
        assert store.put_many([]) == []

    def test_of_equal_objects_in_one_batch_only_the_first_is_written(self, store: Store) -> None:
        receipts = store.put_many([new(SMALL), new(LARGE), new(SMALL), new(SMALL, kind=MANIFEST)])
        assert [receipt.was_written for receipt in receipts] == [True, True, False, True]
        assert receipts[2].num_bytes == len(SMALL)

    def test_put_many_holds_the_parts_of_at_most_one_object(self, store: Store) -> None:
        alive: list[weakref.ref[_Tracked]] = []
        num_held: list[int] = []

        def batch() -> Iterator[NewObject]:
            for number in range(20):
                num_held.append(sum(reference() is not None for reference in alive))
                part = _Tracked(b"%d" % number)
                alive.append(weakref.ref(part))
                wanted = new(part)
                del part
                yield wanted
                del wanted

        store.put_many(batch())
        gc.collect()
        assert max(num_held) <= 1
        assert not any(reference() for reference in alive)

    def test_put_many_lets_the_batch_use_the_store(self, store: Store) -> None:
        def batch() -> Iterator[NewObject]:
            for number in range(3):
                yield new(store.get(CHUNK, store.put(new(b"source %d" % number)).object_id), b" copied")

        assert len(store.put_many(batch())) == 3
        assert len(list(store.scan(CHUNK))) == 6

    def test_put_many_passes_on_what_the_batch_raises_and_leaves_objects_absent_or_complete(self, store: Store) -> None:
        def batch() -> Iterator[NewObject]:
            yield new(LARGE)
            yield new(SMALL)
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="the source broke"):
            store.put_many(batch())
        for object_id in store.scan(CHUNK):
            store.verify(CHUNK, object_id)
        store.put_many([new(LARGE), new(SMALL)])
        assert set(store.scan(CHUNK)) == {digest_of([LARGE]), digest_of([SMALL])}

    # get

    @pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
    def test_get_gives_flat_read_only_bytes(self, store: Store, data: bytes) -> None:
        view = store.get(CHUNK, store.put(new(data)).object_id)
        assert (view.readonly, view.format, view.ndim, view.nbytes) == (True, "B", 1, len(data))

    def test_what_is_absent_cannot_be_read(self, store: Store) -> None:
        reads: list[Callable[[], object]] = [
            lambda: store.get(CHUNK, ABSENT),
            lambda: store.read_range(CHUNK, ABSENT, 0, 0),
            lambda: store.size(CHUNK, ABSENT),
            lambda: store.verify(CHUNK, ABSENT),
        ]
        for read in reads:
            with pytest.raises(NotFound) as caught:
                read()
            assert caught.value.code == "not_found.object"
            assert (caught.value.data["kind"], caught.value.data["id"]) == ("chunk", ABSENT)

    @pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
    @pytest.mark.parametrize("harm", ["first byte", "last byte", "cut", "longer", "emptied"])
    def test_damaged_bytes_are_refused(self, store: Store, damage: Damage, data: bytes, harm: str) -> None:
        object_id = store.put(new(data)).object_id
        damage(CHUNK, object_id, _harmed(data, harm))
        for read in (lambda: store.get(CHUNK, object_id), lambda: store.verify(CHUNK, object_id)):
            _assert_refused_as_corrupt(read, object_id)

    def test_a_damaged_object_does_not_keep_others_from_being_read(self, store: Store, damage: Damage) -> None:
        bad, good = (receipt.object_id for receipt in store.put_many([new(LARGE), new(SMALL)]))
        damage(CHUNK, bad, LARGE[1:])
        _assert_refused_as_corrupt(lambda: store.get(CHUNK, bad), bad)
        assert store.get(CHUNK, good) == SMALL

    # read_range

    @pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
    def test_ranges_are_half_open_and_may_be_empty_or_all(self, store: Store, data: bytes) -> None:
        object_id = store.put(new(data)).object_id
        size = len(data)
        edges = sorted({0, 1, 4095, 4096, 4097, 70_000, size // 2, size - 1, size} & set(range(size + 1)))
        for start in edges:
            for stop in (edge for edge in edges if edge >= start):
                view = store.read_range(CHUNK, object_id, start, stop)
                assert view == data[start:stop], (start, stop)
                assert (view.readonly, view.format, view.ndim) == (True, "B", 1)

    @pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 15), (15, 15), (-3, -1), (15, 14)])
    def test_a_range_outside_the_object_is_refused(self, store: Store, start: int, stop: int) -> None:
        object_id = store.put(new(SMALL)).object_id
        with pytest.raises(InvalidInput) as caught:
            store.read_range(CHUNK, object_id, start, stop)
        assert caught.value.code == "invalid_input.range"
        assert (caught.value.data["start"], caught.value.data["stop"]) == (start, stop)

    def test_damage_outside_the_range_is_refused_too(self, store: Store, damage: Damage) -> None:
        object_id = store.put(new(LARGE)).object_id
        damage(CHUNK, object_id, LARGE[:-1] + b"?")
        _assert_refused_as_corrupt(lambda: store.read_range(CHUNK, object_id, 0, 10), object_id)

    # has, size, verify

    @pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
    def test_has_and_size_tell_what_is_present(self, store: Store, data: bytes) -> None:
        assert not store.has(CHUNK, digest_of([data]))
        object_id = store.put(new(data)).object_id
        assert store.has(CHUNK, object_id)
        assert store.size(CHUNK, object_id) == len(data)

    def test_verify_finds_damage_that_came_after_the_first_touch(self, store: Store, damage: Damage) -> None:
        object_id = store.put(new(LARGE)).object_id
        store.get(CHUNK, object_id)
        store.verify(CHUNK, object_id)
        damage(CHUNK, object_id, LARGE[:-1] + b"?")
        _assert_refused_as_corrupt(lambda: store.verify(CHUNK, object_id), object_id)
        _assert_refused_as_corrupt(lambda: store.get(CHUNK, object_id), object_id)

    # delete

    def test_delete_tells_whether_the_object_was_present(self, store: Store) -> None:
        object_id = store.put(new(SMALL)).object_id
        assert not store.delete(CHUNK, ABSENT)
        assert [store.delete(CHUNK, object_id) for _ in range(2)] == [True, False]
        assert not store.has(CHUNK, object_id)
        with pytest.raises(NotFound):
            store.get(CHUNK, object_id)

    def test_a_deleted_object_can_be_put_again(self, store: Store) -> None:
        object_id = store.put(new(LARGE)).object_id
        store.get(CHUNK, object_id)
        store.delete(CHUNK, object_id)
        assert store.put(new(LARGE)).was_written
        assert store.get(CHUNK, object_id) == LARGE

    @pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
    def test_a_view_stays_readable_after_its_object_is_deleted(self, store: Store, data: bytes) -> None:
        object_id = store.put(new(data)).object_id
        view = store.get(CHUNK, object_id)
        part = store.read_range(CHUNK, object_id, 1, len(data))
        store.delete(CHUNK, object_id)
        store.put(new(data[::-1]))
        gc.collect()
        assert view == data
        assert part == data[1:]

    # ids and scan

    @pytest.mark.parametrize("text", ["", "b3:", "b3:" + "0" * 63, "b3:" + "A" * 64, "b3:../" + "0" * 61, "0" * 64])
    def test_text_that_is_no_id_is_refused_everywhere(self, store: Store, text: str) -> None:
        object_id = ObjectId(text)
        calls: list[Callable[[], object]] = [
            lambda: store.get(CHUNK, object_id),
            lambda: store.read_range(CHUNK, object_id, 0, 0),
            lambda: store.has(CHUNK, object_id),
            lambda: store.size(CHUNK, object_id),
            lambda: store.verify(CHUNK, object_id),
            lambda: store.delete(CHUNK, object_id),
        ]
        for call in calls:
            with pytest.raises(InvalidInput) as caught:
                call()
            assert caught.value.code == "invalid_input.id"

    def test_scan_lists_every_present_object_of_a_kind_once(self, store: Store) -> None:
        assert list(store.scan(CHUNK)) == []
        receipts = store.put_many(new(b"%d" % number) for number in range(300))
        store.put(new(SMALL, kind=MANIFEST))
        present = {receipt.object_id for receipt in receipts}
        assert sorted(store.scan(CHUNK)) == sorted(present)
        gone = receipts[7].object_id
        store.delete(CHUNK, gone)
        assert sorted(store.scan(CHUNK)) == sorted(present - {gone})

    def test_objects_may_be_deleted_while_they_are_scanned(self, store: Store) -> None:
        store.put_many(new(b"%d" % number) for number in range(50))
        for object_id in store.scan(CHUNK):
            store.delete(CHUNK, object_id)
        assert list(store.scan(CHUNK)) == []

    # threads

    def test_threads_may_put_the_same_and_other_objects_at_once(self, store: Store) -> None:
        shared = [LARGE[number:] for number in range(6)]

        def work(thread: int) -> set[ObjectId]:
            own = [b"%d of %d" % (number, thread) for number in range(6)]
            batch = [new(data) for pair in zip(shared, own, strict=True) for data in pair]
            return {receipt.object_id for receipt in [*store.put_many(batch), *map(store.put, batch)]}

        with ThreadPoolExecutor(6) as threads:
            put = set().union(*threads.map(work, range(6)))
        assert set(store.scan(CHUNK)) == put
        assert len(put) == 6 + 36
        for object_id in put:
            store.verify(CHUNK, object_id)

    def test_readers_beside_writers_find_objects_absent_or_complete(self, store: Store) -> None:
        object_id = digest_of([LARGE])

        def write(_: int) -> None:
            store.put(new(LARGE))
            store.delete(CHUNK, object_id)

        def read(_: int) -> int:
            try:
                assert store.get(CHUNK, object_id) == LARGE
            except NotFound:
                return 0
            return 1

        with ThreadPoolExecutor(4) as threads:
            writes = [threads.submit(write, turn) for turn in range(30)]
            num_complete = sum(threads.map(read, range(300)))
        for future in writes:
            future.result()
        assert 0 <= num_complete <= 300


def _harmed(data: bytes, harm: str) -> bytes:
    return {
        "first byte": bytes([data[0] ^ 1]) + data[1:],
        "last byte": data[:-1] + bytes([data[-1] ^ 128]),
        "cut": data[: len(data) // 2],
        "longer": data + b"\0",
        "emptied": b"",
    }[harm]


def _assert_refused_as_corrupt(read: Callable[[], object], object_id: ObjectId) -> None:
    with pytest.raises(Error) as caught:
        read()
    assert isinstance(caught.value, Corrupt)
    assert caught.value.code == "corrupt.object"
    assert (caught.value.data["kind"], caught.value.data["id"]) == ("chunk", object_id)
