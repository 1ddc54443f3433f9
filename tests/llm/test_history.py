"""Token histories: immutable, though they share one list."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.llm.history import History

pytestmark = pytest.mark.model


@given(
    st.lists(st.integers(0, 99), max_size=5), st.lists(st.tuples(st.integers(0, 10), st.integers(0, 99)), max_size=30)
)
def test_histories_that_share_a_list_are_each_what_was_appended_to_them(
    first: list[int], appends: list[tuple[int, int]]
) -> None:
    values, models = [History(first)], [list(first)]
    for which, token in appends:
        source = which % len(values)
        values.append(values[source].append(token))
        models.append([*models[source], token])
    for value, model in zip(values, models, strict=True):
        assert list(value) == model
        assert len(value) == len(model)
        assert np.asarray(value).tolist() == model


@given(st.lists(st.integers(0, 99), max_size=8), st.integers(-12, 12), st.slices(8))
def test_a_short_view_indexes_like_a_list_of_its_own_items(items: list[int], index: int, part: slice) -> None:
    short = History(items)
    short.append(77)
    assert short[part] == items[part]
    if -len(items) <= index < len(items):
        assert short[index] == items[index]
    else:
        with pytest.raises(IndexError):
            short[index]


def test_appending_to_the_longest_view_shares_and_to_a_shorter_one_copies() -> None:
    base = History([1, 2])
    longer, other = base.append(3), base.append(4)
    assert longer._items is base._items
    assert other._items is not base._items
    assert (list(base), list(longer), list(other)) == ([1, 2], [1, 2, 3], [1, 2, 4])


def test_a_history_does_not_follow_the_list_it_was_made_from() -> None:
    source = [1, 2]
    history = History(source)
    source.append(3)
    assert list(history) == [1, 2]


def test_threads_that_append_to_one_history_each_get_their_own() -> None:
    for _ in range(50):
        base, found = History([0]), {}
        barrier = threading.Barrier(4)

        def grow(
            number: int,
            base: History = base,
            found: dict[int, list[int]] = found,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait()
            value = base
            for step in range(20):
                value = value.append(100 * number + step)
            found[number] = list(value)

        threads = [threading.Thread(target=grow, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: [0, *(100 * number + step for step in range(20))] for number in range(4)}
