from __future__ import annotations

from typing import Any

import pytest
from tests.repo.drafts import draft_of

from forkpoint.errors import Conflict, InvalidInput, NotFound
from forkpoint.ids import ManifestId
from forkpoint.repo.names import branch_ref, parse_revision
from forkpoint.repo.repository import Repository


def publish_chain(repo: Repository, length: int, branch: str = "main") -> list[ManifestId]:
    ids: list[ManifestId] = []
    for index in range(length):
        parent = ids[-1] if ids else None
        ids.append(
            repo.publish(draft_of(range(index + 2), parent=parent), branch=branch, message=f"m{index}").manifest_id
        )
    return ids


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a..b", "a~b", "a^", "a:b", "a?", "a*", "a[", "a\\b", "/a", "a/", "a//b", ".a", "a/.b", "a.lock", "a.lock/b",
     "a.", "@", "a@{b", "a\x7f", "a\n", "-a", "HEAD", "refs/tags/a", "ab" * 32, "x" * 300, "\ud800"],
)  # fmt: skip
def test_a_name_that_git_would_refuse_is_refused(repo: Repository, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        repo.publish(draft_of([1, 2]), branch=name)
    assert caught.value.code == "invalid_input.ref_name"
    assert not repo.branches()


@pytest.mark.parametrize("name", ["main", "feature/one", "a.b", "beef", "ünï", "a@b", "x" * 200, "refs/heads/x"])
def test_a_name_that_git_would_take_is_taken(name: str) -> None:
    assert branch_ref(name).startswith("refs/heads/")


@pytest.mark.parametrize(
    "text", ["", "~", "^2", "main~x", "main@{-1}", "main@{x}", "main~1@{2}", "main^^a", "main~99999999"]
)
def test_what_is_no_revision_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_revision(text)


def test_names_resolve_as_in_git(repo: Repository) -> None:
    ids = publish_chain(repo, 4)
    repo.tag("v1", "main~1")
    expected = {
        "main": 3, "refs/heads/main": 3, "heads/main": 3, "HEAD": 3, "@": 3, "v1": 2, "tags/v1": 2, "main~2": 1, "main~": 2,
        "main^": 2, "main^^": 1, "main^1~1": 1, "main^0": 3, "@~3": 0, "main@{0}": 3, "main@{2}": 1, "@{1}": 2, "main@{1}~1": 1,
        "HEAD@{0}": 3, "HEAD@{3}": 0,
    }  # fmt: skip
    assert {name: ids.index(repo.resolve(name)) for name in expected} == expected
    for each in ids:
        assert repo.resolve(each) == repo.resolve(each[3:]) == repo.resolve(each[3:20]) == each


@pytest.mark.parametrize("name", ["nothing", "main~9", "main^2", "main@{9}", "0123456", "refs/heads/x", "v9"])
def test_what_is_not_there_is_not_found(repo: Repository, name: str) -> None:
    publish_chain(repo, 2)
    with pytest.raises(NotFound) as caught:
        repo.resolve(name)
    assert caught.value.code == "not_found.name"


def test_a_misspelt_name_gets_suggestions(repo: Repository) -> None:
    publish_chain(repo, 1)
    with pytest.raises(NotFound, match="did you mean main"):
        repo.resolve("mian")


def test_the_beginning_of_several_ids_is_ambiguous_and_a_ref_wins_over_it(repo: Repository) -> None:
    by_prefix: dict[str, list[ManifestId]] = {}
    index = 0
    while not (shared := [ids for ids in by_prefix.values() if len(ids) > 1]):
        published = repo.publish(draft_of([index, 1])).manifest_id
        by_prefix.setdefault(published[3:5], []).append(published)
        index += 1
    digits = shared[0][0][3:5]
    with pytest.raises(NotFound):  # two digits are fewer than a beginning needs
        repo.resolve(digits)
    other = publish_chain(repo, 1, branch="beef")[0]
    assert repo.resolve("beef") == other


def test_an_unborn_branch_says_so(repo: Repository) -> None:
    assert repo.head().branch == "main"
    assert repo.head().manifest_id is None
    with pytest.raises(NotFound, match="no manifest yet"):
        repo.resolve("HEAD")


def test_a_tag_does_not_move_unless_told(repo: Repository) -> None:
    ids = publish_chain(repo, 3)
    assert repo.tag("v1", "main~1") is not None
    assert repo.tag("v1", "main~1") is None
    with pytest.raises(Conflict):
        repo.tag("v1", "main")
    repo.tag("v1", "main", expect="anything")
    assert repo.resolve("v1") == ids[2]
    repo.delete_tag("v1")
    with pytest.raises(NotFound):
        repo.resolve("v1")
    with pytest.raises(NotFound):
        repo.delete_tag("v1")


def test_branches_are_made_moved_forward_and_deleted(repo: Repository) -> None:
    ids = publish_chain(repo, 3)
    repo.branch("side", "main~2")
    with pytest.raises(Conflict):
        repo.branch("side", "main")
    repo.branch("side", "main~1", expect="fast-forward")
    with pytest.raises(Conflict):
        repo.branch("side", "main~2", expect="fast-forward")
    assert [(ref.name, ref.manifest_id) for ref in repo.branches()] == [("main", ids[2]), ("side", ids[1])]
    repo.delete_branch("side")
    assert repo.resolve("side@{1}") == ids[1]
    assert [entry.manifest_id for entry in repo.reflog("side")] == [None, ids[1], ids[0]]
    with pytest.raises(Conflict, match="current branch"):
        repo.delete_branch("main")


def test_head_follows_checkout_and_rename(repo: Repository) -> None:
    ids = publish_chain(repo, 2)
    repo.branch("side", "main~1")
    assert repo.checkout("side").branch == "side"
    assert repo.resolve("HEAD") == ids[0]
    repo.rename_branch("side", "other")
    assert repo.head().branch == "other"
    with pytest.raises(NotFound):
        repo.rename_branch("side", "again")
    with pytest.raises(Conflict):
        repo.rename_branch("other", "main")
    assert repo.checkout("main~1") == repo.head()
    assert (repo.head().branch, repo.head().manifest_id) == (None, ids[0])
    with pytest.raises(NotFound):
        repo.checkout("nowhere")
    assert [repo.resolve(f"HEAD@{{{n}}}") for n in range(5)] == [ids[0], ids[0], ids[0], ids[1], ids[0]]


def test_an_unborn_branch_is_renamed_by_moving_head(repo: Repository) -> None:
    repo.rename_branch("main", "trunk")
    assert repo.head().branch == "trunk"


def test_the_past_can_be_asked(repo: Repository) -> None:
    ids = publish_chain(repo, 2)
    before = repo.catalog.moves("refs/heads/main")[0].tx - 1
    assert repo.resolve("main", as_of=before) == ids[0]
    assert [ref.manifest_id for ref in repo.branches(as_of=before)] == [ids[0]]
    assert [entry.row.manifest_id for entry in repo.log("main", as_of=before)] == [ids[0]]


def test_the_log_goes_back_newest_first_and_names_refs(repo: Repository) -> None:
    ids = publish_chain(repo, 3)
    entries = repo.log("main")
    assert [entry.row.manifest_id for entry in entries] == ids[::-1]
    assert entries[0].refs == ("HEAD", "refs/heads/main")
    assert [entry.row.message for entry in entries] == ["m2", "m1", "m0"]
    assert len(repo.log("main", limit=2)) == 2


@pytest.mark.parametrize("expect", ["fastforward", "", "b3:12", None, 7])
def test_an_expectation_that_means_nothing_is_refused(repo: Repository, expect: Any) -> None:
    repo.publish(draft_of([1, 2]), branch="main")
    data = b"".join(repo.export_bundle("main"))
    for attempt in (
        lambda: repo.publish(draft_of([1, 2, 3]), branch="main", expect=expect),
        lambda: repo.commit_bundle(data, branch="main", expect=expect),
        lambda: repo.branch("main", "main", expect=expect),
        lambda: repo.tag("new", "main", expect=expect),
        lambda: repo.delete_branch("main", expect=expect),
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert caught.value.code == "invalid_input.expect"
