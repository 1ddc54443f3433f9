from __future__ import annotations

import struct

import pytest
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import Corrupt, Incompatible, InvalidInput
from forkpoint.ids import ObjectKind, digest_of
from forkpoint.state import bundle as bundle_module
from forkpoint.state.bundle import MAX_INDEX_BYTES, BundleEntry, bundle_size, encode_bundle, parse_bundle
from forkpoint.state.canonical import canonical_bytes

HEAD = digest_of([b"head"])
heads = st.lists(sv.ids, max_size=2, unique=True)


def entry(data: bytes, kind: ObjectKind = ObjectKind.CHUNK) -> BundleEntry:
    return BundleEntry(kind=kind, object_id=digest_of([data]), parts=[data])


def read_and_write(data: bytes) -> bytes:
    bundle = parse_bundle(data)
    entries = [
        BundleEntry(kind=kind, object_id=object_id, parts=[view]) for (kind, object_id), view in bundle.objects.items()
    ]
    return sv.joined(encode_bundle(bundle.heads, entries))


def example() -> bytes:
    return sv.joined(encode_bundle([HEAD], [entry(b"one"), entry(b"two", ObjectKind.MOVE)]))


def with_index(record: object, body: bytes = b"", spaces: int = 0) -> bytes:
    index = canonical_bytes(record)
    index += b" " * (-(16 + len(index)) % 64 + spaces)
    return b"FPBUNDLE" + struct.pack("<Q", len(index)) + index + body


def index(**changes) -> dict:
    return {"format": "forkpoint.bundle", "heads": [], "objects": [], "version": 1} | changes


def listed(data: bytes, **changes) -> dict:
    return {"bytes": len(data), "id": digest_of([data]), "kind": "chunk"} | changes


@given(heads, sv.bundle_entries())
def test_a_bundle_comes_back_with_every_object(heads, entries):
    data = sv.joined(encode_bundle(heads, entries))
    bundle = parse_bundle(data)
    assert bundle.heads == tuple(heads)
    for item in entries:
        assert bytes(bundle.get(item.kind, item.object_id)) == sv.joined(item.parts)
    assert len(bundle.objects) == len(entries)
    assert len(data) == bundle_size(heads, entries)
    assert read_and_write(data) == data


@given(st.data())
def test_a_mutated_bundle_is_refused_or_is_another_bundle(data):
    raw = sv.joined(encode_bundle(data.draw(heads), data.draw(sv.bundle_entries())))
    sv.assert_one_form(read_and_write, data.draw(sv.mutations(raw)))


def test_no_flipped_byte_is_overlooked():
    raw = example()
    for at in range(len(raw)):
        for flip in (0x01, 0x10, 0x20, 0x80):
            sv.assert_one_form(read_and_write, raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])


def test_the_index_of_these_tests_is_sound():
    assert parse_bundle(with_index(index(objects=[listed(b"a" * 64)]), b"a" * 64)).objects


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"FPBUNDLE",
        b"FPBUNDLF" + example()[8:],
        b"FPBUNDLE" + struct.pack("<Q", 2**64 - 16) + example()[16:],
        b"FPBUNDLE" + struct.pack("<Q", MAX_INDEX_BYTES + 48) + example()[16:],
        example()[:-1],
        example()[:-64],
        example() + bytes(64),
        with_index([]),
        with_index({}),
        with_index(index(), spaces=64),
        with_index(index(format="forkpoint.move")),
        with_index(index(version=0)),
        with_index(index(version=True)),
        with_index(index(version="1")),
        with_index(index(more=1)),
        with_index(index(heads="abc")),
        with_index(index(heads=[7])),
        with_index(index(heads=[HEAD, HEAD])),
        with_index(index(objects={})),
        with_index(index(objects=[7])),
        with_index(index(objects=[listed(b"", kind="image")])),
        with_index(index(objects=[listed(b"", kind=["chunk"])])),
        with_index(index(objects=[listed(b"", more=1)])),
        with_index(index(objects=[listed(b"", bytes=False)])),
        with_index(index(objects=[listed(b"", bytes="0")])),
        with_index(index(objects=[listed(b"", bytes=-64)])),
        with_index(index(objects=[listed(b"", bytes=2**62)])),
        with_index(index(objects=[listed(b""), listed(b"")])),
        with_index(index(objects=[listed(b"a" * 64)]), b"b" * 64),
        with_index(index(objects=[listed(b"a")]), b"a" + b"\1" * 63),
        with_index(index(objects=[listed(b"a")]), b"a"),
    ],
)
def test_other_bytes_are_corrupt(data):
    with pytest.raises(Corrupt):
        parse_bundle(data)


def test_a_newer_version_is_incompatible_whatever_else_it_holds():
    with pytest.raises(Incompatible) as caught:
        parse_bundle(with_index({"format": "forkpoint.bundle", "version": 2}))
    assert caught.value.code == "incompatible.bundle_version"


def test_a_bundle_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(bundle_module, "MAX_BUNDLE_BYTES", 64)
    with pytest.raises(InvalidInput) as caught:
        parse_bundle(example())
    assert caught.value.code == "invalid_input.bundle_size"


def test_a_head_or_an_object_twice_is_not_written():
    for twice in (([HEAD, HEAD], []), ([], [entry(b"one"), entry(b"one")])):
        with pytest.raises(InvalidInput) as caught:
            list(encode_bundle(*twice))
        assert caught.value.code == "invalid_input.bundle"


def test_the_same_bytes_under_two_kinds_are_two_objects():
    data = sv.joined(encode_bundle([], [entry(b"one"), entry(b"one", ObjectKind.MOVE)]))
    assert len(parse_bundle(data).objects) == 2


def test_an_absent_object_is_corrupt():
    with pytest.raises(Corrupt, match="lacks"):
        parse_bundle(example()).get(ObjectKind.MANIFEST, HEAD)
