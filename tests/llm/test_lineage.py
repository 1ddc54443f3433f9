"""Parents and ids: the nearest committed ancestor, chosen once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.ids import ManifestId, digest_of
from forkpoint.llm.lineage import Lineage
from forkpoint.state.draft import Draft
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import Parent

pytestmark = pytest.mark.model


def an_id(number: int) -> ManifestId:
    return ManifestId(digest_of([str(number).encode()]))


def continues(number: int) -> tuple[Parent, ...]:
    return (Parent(role="continues", manifest_id=an_id(number)),)


def draft_of(link: Lineage) -> Draft:
    return Draft(
        kind="llm", fingerprint=Fingerprint(state={}, execution={}), boundary={}, groups=(), parents=link.parents()
    )


def test_a_root_has_no_parent() -> None:
    assert Lineage().parents() == ()
    assert Lineage().child().child().parents() == ()


def test_the_parent_is_the_nearest_committed_ancestor_and_not_the_value_itself() -> None:
    root = Lineage()
    middle = root.child()
    leaf = middle.child().child()
    root.mark_committed(an_id(1))
    middle.mark_committed(an_id(2))
    leaf.mark_committed(an_id(3))
    assert leaf.parents() == continues(2)
    assert middle.parents() == continues(1)
    assert root.parents() == ()


def test_a_choice_once_made_stays_when_an_ancestor_is_committed_later() -> None:
    root = Lineage(committed=an_id(1))
    middle = root.child()
    leaf = middle.child()
    before = leaf.identify(lambda: draft_of(leaf))
    middle.mark_committed(an_id(2))
    assert leaf.parents() == continues(1)
    assert leaf.identify(lambda: draft_of(leaf)) == before
    assert leaf.child().parents() == continues(2)


def test_what_was_checked_out_is_the_parent_of_what_follows() -> None:
    assert Lineage(committed=an_id(5)).child().parents() == continues(5)


def test_a_commit_settles_the_parents() -> None:
    root = Lineage()
    leaf = root.child()
    leaf.mark_committed(an_id(2))
    root.mark_committed(an_id(1))
    assert leaf.parents() == ()


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=20), st.data())
def test_in_any_tree_a_link_finds_its_nearest_committed_ancestor_of_when_it_was_first_asked(
    steps: list[tuple[int, bool]], data: st.DataObject
) -> None:
    links: list[Lineage] = [Lineage()]
    above: dict[int, int | None] = {0: None}
    committed: set[int] = set()
    chosen: dict[int, tuple[Parent, ...]] = {}

    def nearest(which: int) -> tuple[Parent, ...]:
        place = above[which]
        while place is not None and place not in committed:
            place = above[place]
        return () if place is None else continues(place)

    for which, commits in steps:
        source = which % len(links)
        links.append(links[source].child())
        above[len(links) - 1] = source
        if commits:
            chosen.setdefault(source, nearest(source))
            committed.add(source)
            links[source].mark_committed(an_id(source))
    which = data.draw(st.integers(0, len(links) - 1))
    assert links[which].parents() == chosen.get(which, nearest(which))


def test_a_stored_value_keeps_its_parents_and_what_follows_a_snapshot_continues_them() -> None:
    stored = continues(1)
    checked_out = Lineage(committed=an_id(2), parents=stored)
    assert checked_out.parents() == stored
    assert checked_out.child().parents() == continues(2)
    restored = Lineage(parents=stored)
    assert restored.parents() == stored
    assert restored.child().child().parents() == stored
    restored.mark_committed(an_id(2))
    assert restored.child().parents() == continues(2)
