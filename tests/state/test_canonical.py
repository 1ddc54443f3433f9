from __future__ import annotations

import json
import math
from types import MappingProxyType

import pytest
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.state.canonical import MAX_DEPTH, canonical_bytes, from_float, parse_canonical, to_float


def read_and_write(data: bytes) -> bytes:
    return canonical_bytes(parse_canonical(data, "test"))


@given(sv.values)
def test_every_value_comes_back_from_its_bytes(value):
    assert parse_canonical(canonical_bytes(value), "test") == value


@given(sv.values)
def test_any_json_reader_sees_the_same_value(value):
    assert json.loads(canonical_bytes(value)) == value


@given(sv.records)
def test_the_order_of_insertion_changes_nothing(record):
    assert canonical_bytes(dict(reversed(record.items()))) == canonical_bytes(record)


@given(st.data())
def test_a_mutated_record_is_refused_or_is_another_value(data):
    raw = canonical_bytes(data.draw(sv.values))
    sv.assert_one_form(read_and_write, data.draw(sv.mutations(raw)))


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_refused_or_canonical(data):
    sv.assert_one_form(read_and_write, data)


@given(st.lists(st.text(), unique=True))
def test_keys_stand_in_order_of_code_points_which_is_that_of_utf8(keys):
    written = list(json.loads(canonical_bytes(dict.fromkeys(keys))))
    assert written == sorted(keys, key=lambda key: [ord(character) for character in key])
    assert written == sorted(keys, key=str.encode)


def test_utf16_order_would_be_another_one():
    keys = ["\uff5e", "\U0001f600"]
    assert list(json.loads(canonical_bytes(dict.fromkeys(reversed(keys))))) == keys
    assert sorted(keys, key=lambda key: key.encode("utf-16-be")) != keys


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"-0", b"01", b"+1", b"1.0", b"1e3", b"NaN", b"Infinity", b"-Infinity", b"tru", b"[1,]", b"[1 ]", b" 1", b"1\n",
        b'{"a":1,"a":1}', b'{"a":1,"a":2}', b'{"b":1,"a":2}', b'{"a": 1}', b"{1:2}", b'"\\u0041"', b'"\\/"', b'"\\u000A"', b'"\\u000a"',
        b'"\\u001F"', b'"\n"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\xff"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", "1".encode("utf-16"),
        b"18446744073709551616", b"-9223372036854775809", b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"[" * 33 + b"]" * 33,
        b"1 2", b"'a'", b"0x10",
    ],
)  # fmt: skip
def test_other_spellings_are_corrupt(text):
    with pytest.raises(Corrupt) as caught:
        parse_canonical(text, "test")
    assert caught.value.code == "corrupt.record"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, 0.5]}, "$.a[1]"),
        ({"a": math.nan}, "$.a"),
        ({1: 2}, "$"),
        ([{"x": 2**64}], "$[0].x"),
        ([10**5000], "$[0]"),
        ("\ud800", "$"),
        ({"\ud800": 1}, "$"),
        ([b"bytes"], "$[0]"),
        ({"a": {1, 2}}, "$.a"),
    ],
)
def test_a_value_without_canonical_form_is_named_by_its_path(value, path):
    with pytest.raises(InvalidInput) as caught:
        canonical_bytes(value)
    assert caught.value.code == "invalid_input.record"
    assert caught.value.data["path"] == path


def test_maps_and_lists_of_other_types_are_written_alike():
    assert canonical_bytes(MappingProxyType({"b": (1, 2), "a": MappingProxyType({})})) == b'{"a":{},"b":[1,2]}'


def test_thirty_two_levels_are_allowed_and_one_more_is_not():
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert read_and_write(deepest) == deepest
    with pytest.raises(Corrupt):
        parse_canonical(b"[" + deepest + b"]", "test")


@given(sv.floats)
def test_floats_come_back_bit_for_bit(number):
    back = to_float(from_float(number))
    assert (back, math.copysign(1, back)) == (number, math.copysign(1, number))


@pytest.mark.parametrize(
    "text", ["0x1p0", "1.0", "inf", "nan", "0x0p+0", "0X1.0000000000000p+0", "0x1.0000000000000p+00", " 0x0.0p+0", "0x1p999999999999", ""]
)  # fmt: skip
def test_other_spellings_of_a_float_are_corrupt(text):
    with pytest.raises(Corrupt):
        to_float({"f64": text})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_have_no_form(number):
    with pytest.raises(InvalidInput):
        from_float(number)
