from __future__ import annotations

import pytest
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import InvalidInput
from forkpoint.state.domain import check_domain, domain_text, parse_domain


@given(sv.domains())
def test_a_domain_comes_back_from_its_text(domain):
    check_domain(domain)
    assert parse_domain(domain_text(domain)) == domain


@given(st.data())
def test_a_mutated_text_is_refused_or_is_another_domain(data):
    raw = domain_text(data.draw(sv.domains())).encode() or b","
    text = data.draw(sv.mutations(raw)).decode("latin-1")
    sv.assert_one_form(lambda raw: domain_text(parse_domain(raw.decode("latin-1"))).encode(), text.encode("latin-1"))


@pytest.mark.parametrize(
    "text",
    [
        ",", "token", "token:1", "token:1:2:3", "token:2:1", "token:01:2", "token:-1:2", "token:1:2,", "token:1:2,token:1:2", "b:0:1,a:0:1",
        "token:1:9223372036854775808", "token:0:" + "9" * 5000, "to ken:0:1", "token:0:²", "token:0:１", "TOKEN:0:1", ":0:1",
        ",".join(f"{axis}:0:1" for axis in "abcdefghi"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(InvalidInput) as caught:
        parse_domain(text)
    assert caught.value.code == "invalid_input.domain"


@pytest.mark.parametrize(
    "domain",
    [
        [("a:1:2,b", 3, 4)],
        [("b", 0, 1), ("a", 0, 1)],
        [("a", 0, 1), ("a", 0, 1)],
        [("a", 1, 0)],
        [("a", False, 1)],
        [("a", 0, 1.0)],
        [("a", 0, 2**63)],
        [(None, 0, 1)],
        [("", 0, 1)],
    ],
)
def test_a_domain_that_could_be_misread_is_refused(domain):
    with pytest.raises(InvalidInput):
        check_domain(domain)
