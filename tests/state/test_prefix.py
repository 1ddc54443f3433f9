from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.errors import InvalidInput
from forkpoint.ids import digest_of
from forkpoint.state.prefix import CHUNK_TOKENS, next_key, prefix_keys, root_key, token_bytes

STATE, OTHER = digest_of([b"state"]), digest_of([b"other"])
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=6)


@given(st.text(), st.text(), st.sampled_from([STATE, OTHER]), st.sampled_from([STATE, OTHER]))
def test_roots_are_equal_only_for_equal_model_and_namespace(one, two, first, second):
    assert (root_key(first, one) == root_key(second, two)) == ((first, one) == (second, two))


@given(st.lists(token_lists, max_size=3), st.lists(token_lists, max_size=3))
def test_chains_are_equal_only_for_equal_chunks(one, two):
    def chain(chunks):
        key = root_key(STATE, "")
        for chunk in chunks:
            key = next_key(key, chunk)
        return key

    assert (chain(one) == chain(two)) == (one == two)


@given(token_lists.filter(bool))
def test_a_token_that_moves_to_the_next_chunk_makes_another_key(tokens):
    root = root_key(STATE, "")
    keys = {next_key(next_key(root, tokens[:cut]), tokens[cut:]) for cut in range(len(tokens) + 1)}
    assert len(keys) == len(tokens) + 1
    assert next_key(root, tokens) not in keys


def test_bytes_that_move_between_namespace_and_tokens_make_another_key():
    assert next_key(root_key(STATE, "ab"), [0x63]) != next_key(root_key(STATE, "abc"), [])
    assert root_key(STATE, "") != next_key(STATE, [])


def test_the_same_suffix_under_another_prefix_has_other_keys():
    suffix = list(range(512))
    one = list(prefix_keys(STATE, "", [0] * 256 + suffix))
    two = list(prefix_keys(STATE, "", [1] * 256 + suffix))
    assert not set(one) & set(two)


@given(st.integers(0, 3 * CHUNK_TOKENS))
def test_only_full_chunks_have_keys(length):
    keys = list(prefix_keys(STATE, "n", list(range(length))))
    assert len(keys) == length // CHUNK_TOKENS
    assert keys == list(prefix_keys(STATE, "n", list(range(3 * CHUNK_TOKENS))))[: len(keys)]


@pytest.mark.parametrize("token", [-1, 2**32, 2**200, "7", 1.5, None])
def test_a_token_outside_32_bits_is_refused(token):
    with pytest.raises(InvalidInput) as caught:
        token_bytes([token])
    assert caught.value.code == "invalid_input.token"


def test_a_namespace_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidInput) as caught:
        root_key(STATE, "\udc80")
    assert caught.value.code == "invalid_input.namespace"
