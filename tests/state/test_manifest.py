from __future__ import annotations

import json
from dataclasses import replace

import pytest
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import Corrupt, Incompatible, InvalidInput
from forkpoint.ids import digest_of
from forkpoint.state.canonical import canonical_bytes, parse_canonical
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    MIGRATIONS,
    VERSION,
    ChunkRef,
    Group,
    Manifest,
    Parent,
    decode_manifest,
    encode_manifest,
    manifest_id,
    migrated,
)

ID = digest_of([b"x"])
CHUNK = ChunkRef(chunk_id=ID, num_bytes=7, domain=(("token", 0, 3),))
EXAMPLE = Manifest(
    kind="llm",
    fingerprint=Fingerprint(state={"a": 1}, execution={}),
    boundary={"position": 3},
    groups=(Group(name="full", kind="tokens", chunks=(CHUNK,)),),
    parents=(Parent(role="continues", manifest_id=ID),),
)


def read_and_write(data: bytes) -> bytes:
    return encode_manifest(decode_manifest(data))


def record() -> dict:
    return json.loads(encode_manifest(EXAMPLE))


@given(sv.manifests())
def test_a_manifest_comes_back_from_its_bytes(manifest):
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert read_and_write(data) == data
    assert manifest_id(manifest) == digest_of([data])


@given(sv.manifests(), sv.manifests())
def test_ids_are_equal_exactly_for_equal_manifests(one, two):
    assert (manifest_id(one) == manifest_id(two)) == (encode_manifest(one) == encode_manifest(two))


@given(st.data())
def test_a_mutated_manifest_is_refused_or_is_another_manifest(data):
    raw = encode_manifest(data.draw(sv.manifests()))
    sv.assert_one_form(read_and_write, data.draw(sv.mutations(raw)))


def test_no_flipped_byte_is_overlooked():
    raw = encode_manifest(EXAMPLE)
    for at in range(len(raw)):
        for flip in (0x01, 0x10, 0x20, 0x80):
            sv.assert_one_form(read_and_write, raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])


def chunk_with(**fields) -> dict:
    return {"groups": [{"kind": "tokens", "name": "full", "chunks": [{"bytes": 7, "domain": [], "id": ID} | fields]}]}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "forkpoint.move"},
        {"format": None},
        {"version": 0},
        {"version": -1},
        {"version": True},
        {"version": "1"},
        {"version": None},
        {"unknown": 1},
        {"kind": "image"},
        {"kind": None},
        {"boundary": []},
        {"payload": "text"},
        {"fingerprint": {"state": {}}},
        {"fingerprint": {"state": {}, "execution": {}, "more": {}}},
        {"fingerprint": {"state": [], "execution": {}}},
        {"groups": {}},
        {"groups": [7]},
        {"groups": [{"kind": "tokens", "name": "a"}]},
        {"groups": [{"kind": "tokens", "name": "a", "chunks": [], "more": 1}]},
        {"groups": [{"kind": "stream", "name": "a", "chunks": []}]},
        {"groups": [{"kind": "tokens", "name": "", "chunks": []}]},
        {"groups": [{"kind": "tokens", "name": "A", "chunks": []}]},
        {"groups": [{"kind": "tokens", "name": "a" * 65, "chunks": []}]},
        {"groups": [{"kind": "tokens", "name": name, "chunks": []} for name in "ba"]},
        {"groups": [{"kind": "tokens", "name": name, "chunks": []} for name in "aa"]},
        {"parents": [{"id": ID, "role": "copies"}]},
        {"parents": [{"id": ID}]},
        {"parents": [{"id": ID, "role": "continues", "more": 1}]},
        {"parents": [{"id": ID.upper(), "role": "continues"}]},
        {"parents": [{"id": ID, "role": "continues"}] * 2},
        chunk_with(id="b3:00"),
        chunk_with(id=7),
        chunk_with(bytes=-1),
        chunk_with(bytes=True),
        chunk_with(bytes="7"),
        chunk_with(bytes=2**63),
        chunk_with(more=1),
        chunk_with(domain={}),
        chunk_with(domain=[["token", 0]]),
        chunk_with(domain=[["token", 0, 1, 2]]),
        chunk_with(domain=["abc"]),
        chunk_with(domain=[["token", 1, 0]]),
        chunk_with(domain=[["token", False, 1]]),
        chunk_with(domain=[["to:ken", 0, 1]]),
        chunk_with(domain=[["b", 0, 1], ["a", 0, 1]]),
        chunk_with(domain=[["a", 0, 1], ["a", 0, 1]]),
    ],
)
def test_a_record_of_another_shape_is_corrupt(change):
    with pytest.raises(Corrupt) as caught:
        decode_manifest(canonical_bytes(record() | change))
    assert caught.value.code == "corrupt.manifest"


@pytest.mark.parametrize("field", sorted(record()))
def test_a_missing_field_is_corrupt(field):
    with pytest.raises(Corrupt):
        decode_manifest(canonical_bytes({key: value for key, value in record().items() if key != field}))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"7", b'{"format":"forkpoint.manifest"}', b"\0" * 100])
def test_other_bytes_are_corrupt(data):
    with pytest.raises(Corrupt):
        decode_manifest(data)


def test_a_newer_version_is_incompatible_whatever_else_it_holds():
    newer = {"format": "forkpoint.manifest", "version": VERSION + 1, "entirely": "other"}
    with pytest.raises(Incompatible) as caught:
        decode_manifest(canonical_bytes(newer))
    assert caught.value.code == "incompatible.manifest_version"
    assert (caught.value.data["have"], caught.value.data["want"]) == (VERSION + 1, VERSION)


def test_every_older_version_has_a_migration():
    assert sorted(MIGRATIONS) == list(range(1, VERSION))


def test_older_versions_are_brought_forward_one_at_a_time():
    migrations = {
        1: lambda old: {**old, "version": 2, "steps": ["1 to 2"]},
        2: lambda old: {**old, "version": 3, "steps": [*old["steps"], "2 to 3"]},
    }
    old = parse_canonical(encode_manifest(EXAMPLE), "manifest")
    assert migrated(old, migrations=migrations, newest=3)["steps"] == ["1 to 2", "2 to 3"]
    assert migrated({**old, "version": 2, "steps": []}, migrations=migrations, newest=3)["steps"] == ["2 to 3"]
    assert migrated({**old, "version": 3}, migrations=migrations, newest=3) == {**old, "version": 3}
    with pytest.raises(Incompatible):
        migrated({**old, "version": 4}, migrations=migrations, newest=3)


def test_a_record_that_its_migration_cannot_read_is_corrupt():
    with pytest.raises(Corrupt) as caught:
        migrated(record(), migrations={1: lambda old: {"x": old["absent"]}}, newest=2)
    assert caught.value.code == "corrupt.manifest"


def test_a_payload_over_the_limit_is_refused():
    room = MAX_PAYLOAD_BYTES - len(canonical_bytes({"message": ""}))
    replace(EXAMPLE, payload={"message": "m" * room})
    with pytest.raises(InvalidInput) as caught:
        replace(EXAMPLE, payload={"message": "m" * (room + 1)})
    assert caught.value.code == "invalid_input.payload"


def test_a_manifest_over_the_limit_is_neither_written_nor_read():
    with pytest.raises(InvalidInput) as caught:
        encode_manifest(replace(EXAMPLE, boundary={"x": "x" * MAX_MANIFEST_BYTES}))
    assert caught.value.code == "invalid_input.manifest_size"
    with pytest.raises(InvalidInput) as caught:
        decode_manifest(bytes(MAX_MANIFEST_BYTES + 1))
    assert caught.value.code == "invalid_input.manifest_size"


def test_sizes_are_summed_over_every_group():
    manifest = replace(EXAMPLE, groups=(replace(EXAMPLE.groups[0], name="a"), EXAMPLE.groups[0]))
    assert manifest.num_bytes == 14
    assert list(manifest.chunks()) == [CHUNK, CHUNK]
