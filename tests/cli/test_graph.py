from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from forkpoint.cli.graph import Graph
from forkpoint.ids import ManifestId


def drawn(history: Mapping[str, str]) -> list[str]:
    """Draw a history written as ``{"d": "bc"}``: children first, each with its parents."""
    graph = Graph({ManifestId(each) for each in history})
    lines: list[str] = []
    for each, parents in history.items():
        lines.append(graph.node(ManifestId(each)) + each)
        lines += graph.edges(ManifestId(each), [ManifestId(parent) for parent in parents])
    return lines


def test_a_straight_history_is_one_column() -> None:
    assert drawn({"c": "b", "b": "a", "a": ""}) == ["* c", "* b", "* a"]


def test_a_fork_is_drawn_as_git_draws_it() -> None:
    assert drawn({"c": "a", "b": "a", "a": ""}) == ["* c", "| * b", "|/", "* a"]


def test_a_second_parent_opens_a_column() -> None:
    assert drawn({"d": "bc", "c": "a", "b": "a", "a": ""}) == ["* d", "|\\", "| * c", "* | b", "|/", "* a"]


def test_a_column_far_to_the_right_bends_under_the_others() -> None:
    history = {"e": "b", "d": "c", "f": "b", "c": "a", "b": "a", "a": ""}
    assert drawn(history) == ["* e", "| * d", "| | * f", "|_|/", "| * c", "* | b", "|/", "* a"]


def test_three_parents_open_two_columns() -> None:
    assert drawn({"e": "bcd", "d": "", "c": "", "b": ""}) == ["* e", "|\\", "| |\\", "| | * d", "| * c", "* b"]


def test_a_root_left_of_others_ends_its_column() -> None:
    lines = drawn({"d": "c", "b": "a", "c": "", "a": ""})
    assert lines == ["* d", "| * b", "* | c", " /", "* a"]


def test_a_parent_that_is_not_shown_is_not_drawn() -> None:
    assert drawn({"c": "b", "a": ""}) == ["* c", "* a"]


def test_text_below_a_manifest_stands_right_of_all_columns() -> None:
    graph = Graph({ManifestId(each) for each in "cba"})
    graph.node(ManifestId("c"))
    graph.edges(ManifestId("c"), [ManifestId("a")])
    graph.node(ManifestId("b"))
    assert graph.margin() == "| | "


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Sequence[int]]]:
    """Children first: every manifest's parents come after it."""
    count = draw(st.integers(1, 12))
    return [
        (
            each,
            draw(st.lists(st.sampled_from(range(each + 1, count)), unique=True, max_size=3))
            if each < count - 1
            else [],
        )
        for each in range(count)
    ]


@given(histories())
def test_every_history_can_be_drawn_with_one_star_a_manifest_and_ends_with_no_column_open(
    history: list[tuple[int, Sequence[int]]],
) -> None:
    named = {str(each): [ManifestId(str(parent)) for parent in parents] for each, parents in history}
    graph = Graph({ManifestId(each) for each in named})
    for each, parents in named.items():
        assert graph.node(ManifestId(each)).count("*") == 1
        for line in graph.edges(ManifestId(each), parents):
            assert set(line) <= set("|/\\_ ")
    assert graph.margin() == ""
