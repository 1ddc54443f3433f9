from __future__ import annotations

import pytest
import state_values as sv
from hypothesis import given

from forkpoint.errors import Incompatible
from forkpoint.state.canonical import from_float
from forkpoint.state.fingerprint import Fingerprint, check_execution, check_state, differences


@given(sv.records, sv.records)
def test_records_differ_exactly_when_a_field_is_named(one, two):
    ids = [Fingerprint(state=record, execution={}).state_id for record in (one, two)]
    assert bool(differences(one, two)) == (ids[0] != ids[1])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({'"a': {'b"': 1}}, {"a.b": 1}),
        ({"": {"a": 1}}, {"a": 1}),
        ({"a": {}}, {}),
        ({"a": {}}, {"a": "{}"}),
        ({"a": None}, {}),
        ({"a": True}, {"a": 1}),
        ({"a": from_float(1.0)}, {"a": 1}),
        ({"a": from_float(0.0)}, {"a": from_float(-0.0)}),
        ({"a": {"f64": "inf"}}, {"a": {"f64": "nonsense"}}),
        ({"a": {"f64": 5}}, {"a": {"f64": {}}}),
    ],
)
def test_records_that_look_alike_differ(one, two):
    assert differences(one, two)
    assert differences(two, one)


def test_a_refusal_names_the_field_and_both_values():
    have = Fingerprint(state={"config": {"heads": 4, "rope": from_float(1.5)}}, execution={"threads": 1})
    want = Fingerprint(state={"config": {"heads": 8, "rope": from_float(2.5)}}, execution={"threads": 2})
    with pytest.raises(Incompatible) as caught:
        check_state(have, want)
    assert caught.value.code == "incompatible.state_identity"
    assert caught.value.data == {"field": "config.heads", "have": "4", "want": "8", "num_fields": 2}
    with pytest.raises(Incompatible) as caught:
        check_execution(have, want)
    assert caught.value.code == "incompatible.execution_identity"
    check_state(have, have)
    check_execution(have, have)


def test_floats_are_shown_as_people_write_them():
    (difference,) = differences({"rope": from_float(1.5)}, {"rope": from_float(2.5)})
    assert str(difference) == "rope: have 1.5, want 2.5"
