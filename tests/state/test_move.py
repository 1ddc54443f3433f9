from __future__ import annotations

import json
from dataclasses import replace

import pytest
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import Corrupt, Incompatible, InvalidInput
from forkpoint.ids import digest_of
from forkpoint.state.canonical import canonical_bytes
from forkpoint.state.move import MAX_MOVE_BYTES, Move, decode_move, encode_move

ID = digest_of([b"x"])
EXAMPLE = Move(
    ref="refs/heads/main", old=None, new=ID, previous=None, tx=1, at_us=2, who="ada", message="m", is_trusted=True
)


def read_and_write(data: bytes) -> bytes:
    return encode_move(decode_move(data))


@given(sv.moves)
def test_a_move_comes_back_from_its_bytes(move):
    assert decode_move(encode_move(move)) == move


@given(st.data())
def test_a_mutated_move_is_refused_or_is_another_move(data):
    raw = encode_move(data.draw(sv.moves))
    sv.assert_one_form(read_and_write, data.draw(sv.mutations(raw)))


def test_no_flipped_byte_is_overlooked():
    raw = encode_move(EXAMPLE)
    for at in range(len(raw)):
        for flip in (0x01, 0x10, 0x20, 0x80):
            sv.assert_one_form(read_and_write, raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])


@pytest.mark.parametrize(
    "change",
    [
        {"format": "forkpoint.manifest"},
        {"version": 0},
        {"version": True},
        {"version": None},
        {"unknown": 1},
        {"ref": ""},
        {"ref": None},
        {"old": "refs/heads/main"},
        {"old": "ref:"},
        {"new": 7},
        {"new": ID[:-1]},
        {"previous": "ref:refs/heads/main"},
        {"previous": "b3:zz"},
        {"previous": False},
        {"tx": -1},
        {"tx": True},
        {"tx": "1"},
        {"at_us": 2**63},
        {"who": None},
        {"message": []},
        {"is_trusted": 1},
        {"is_trusted": None},
    ],
)
def test_a_record_of_another_shape_is_corrupt(change):
    with pytest.raises(Corrupt) as caught:
        decode_move(canonical_bytes(json.loads(encode_move(EXAMPLE)) | change))
    assert caught.value.code == "corrupt.move"


@pytest.mark.parametrize("field", sorted(json.loads(encode_move(EXAMPLE))))
def test_a_missing_field_is_corrupt(field):
    record = json.loads(encode_move(EXAMPLE))
    del record[field]
    with pytest.raises(Corrupt):
        decode_move(canonical_bytes(record))


def test_a_newer_version_is_incompatible_whatever_else_it_holds():
    with pytest.raises(Incompatible) as caught:
        decode_move(canonical_bytes({"format": "forkpoint.move", "version": 2}))
    assert caught.value.code == "incompatible.move_version"


@pytest.mark.parametrize("change", [{"ref": ""}, {"new": "main"}, {"previous": "main"}, {"tx": -1}, {"at_us": True}])
def test_a_move_outside_the_format_cannot_be_made(change):
    with pytest.raises(InvalidInput) as caught:
        replace(EXAMPLE, **change)
    assert caught.value.code == "invalid_input.move"
    assert caught.value.data["field"] == next(iter(change))


def test_a_move_over_the_limit_is_neither_written_nor_read():
    with pytest.raises(InvalidInput):
        encode_move(replace(EXAMPLE, message="m" * MAX_MOVE_BYTES))
    with pytest.raises(Corrupt):
        decode_move(b'"' + b"m" * MAX_MOVE_BYTES + b'"')
