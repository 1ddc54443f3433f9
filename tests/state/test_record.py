from __future__ import annotations

import pytest

from forkpoint.errors import Incompatible, InvalidInput
from forkpoint.state.record import MAX_COUNT, as_count, as_fields, as_list, as_map, as_text, format_version


@pytest.mark.parametrize(
    ("reader", "sound", "others"),
    [
        (as_map, {"a": 1}, [[], "a", 1, None, True]),
        (as_list, [1], [{}, "ab", 1, None, (1, 2)]),
        (as_text, "a", [1, None, ["a"], {"a": 1}, b"a"]),
        (as_count, MAX_COUNT, [-1, MAX_COUNT + 1, True, False, "1", None, 1.0]),
    ],
)
def test_a_reader_takes_its_type_and_no_other(reader, sound, others):
    assert reader(sound) == sound
    for value in others:
        with pytest.raises(InvalidInput) as caught:
            reader(value)
        assert caught.value.code == "invalid_input.record"


def test_fields_are_exactly_those_named():
    assert as_fields({"a": 1, "b": None}, "b", "a") == {"a": 1, "b": None}
    for record in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {}):
        with pytest.raises(InvalidInput):
            as_fields(record, "a", "b")


def test_versions_up_to_the_newest_are_read():
    for version in (1, 2, 3):
        assert format_version({"format": "forkpoint.x", "version": version}, name="x", newest=3) == version
    with pytest.raises(Incompatible) as caught:
        format_version({"format": "forkpoint.x", "version": 4}, name="x", newest=3)
    assert caught.value.code == "incompatible.x_version"


def test_a_refusal_stays_short_whatever_was_sent():
    for refuse in (lambda: as_count("9" * 10**6), lambda: as_fields({str(key): 0 for key in range(10**4)}, "a")):
        with pytest.raises(InvalidInput) as caught:
            refuse()
        assert len(caught.value.message) < 400
