from __future__ import annotations

import pytest
from tests.cli.runner import run, run_json
from tests.cli.stories import Story

from forkpoint.repo.repository import Repository


def tips(story: Story) -> dict[str, str]:
    with Repository.open(story.folder) as repository:
        return {each.name: each.manifest_id for each in repository.branches()}


# ---- branch ----


@pytest.mark.parametrize("arguments", [("branch",), ("branch", "-l")])
def test_branches_are_listed_with_a_star_at_the_current_one(story: Story, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).lines == [f"* {story.second[3:15]}  main", f"  {story.storm[3:15]}  storm"]
    assert run_json(*arguments) == {
        "branches": [
            {"is_current": True, "manifest_id": story.second, "name": "main"},
            {"is_current": False, "manifest_id": story.storm, "name": "storm"},
        ]
    }


def test_a_branch_is_made_at_head_or_at_any_revision(story: Story) -> None:
    assert run("branch", "here").out == f"Branch here is at {story.second[3:15]}\n"
    assert run_json("branch", "there", "main~1") == {"manifest_id": story.first, "name": "there"}
    assert tips(story) == {"here": story.second, "main": story.second, "storm": story.storm, "there": story.first}


def test_a_branch_that_exists_moves_only_by_force(story: Story) -> None:
    refused = run("branch", "storm", "v1")
    assert (refused.code, refused.out) == (4, "")
    assert "storm is at" in refused.err
    assert tips(story)["storm"] == story.storm
    assert run("branch", "storm", "v1", "--force").code == 0
    assert tips(story)["storm"] == story.first


def test_a_deleted_branch_is_found_again_where_the_answer_says(story: Story) -> None:
    told = run("branch", "-d", "storm")
    assert (told.code, told.out) == (0, "Deleted branch storm; it was at storm@{1}\n")
    assert "storm" not in tips(story)
    assert run("branch", "storm", "storm@{1}").code == 0
    assert run_json("branch", "--delete", "storm") == {"deleted": "storm"}


def test_the_current_branch_cannot_be_deleted(story: Story) -> None:
    refused = run_json("branch", "-d", "main", code=4)
    assert refused["error"]["code"] == "conflict.current_branch"


def test_a_renamed_branch_takes_head_along(story: Story) -> None:
    assert run("branch", "-m", "main", "trunk").out == "Renamed branch main to trunk\n"
    assert run_json("status")["head"]["branch"] == "trunk"
    assert run_json("branch", "-m", "trunk", "main") == {"new": "main", "old": "trunk"}
    assert run_json("branch", "-m", "main", "storm", code=4)["error"]["code"] == "conflict.ref"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("branch", "a b"), 2, "invalid_input.ref_name"),
        (("branch", "--", "-x"), 2, "invalid_input.ref_name"),
        (("branch", "new", "nothing"), 3, "not_found.name"),
        (("branch", "new", "main~~^^x"), 2, "invalid_input.revision"),
        (("branch", "-d", "nothing"), 3, "not_found.ref"),
        (("branch", "-m", "nothing", "x"), 3, "not_found.ref"),
        (("branch", "x", "-d", "storm"), 2, "invalid_input.usage"),
        (("branch", "-d", "storm", "-m", "a", "b"), 2, "invalid_input.usage"),
        (("branch", "-l", "x"), 2, "invalid_input.usage"),
        (("branch", "--force"), 2, "invalid_input.usage"),
        (("branch", "-d", "storm", "--force"), 2, "invalid_input.usage"),
        (("branch", "-m", "only"), 2, "invalid_input.usage"),
        (("tag", "v1"), 4, "conflict.ref"),
        (("tag", "x..y"), 2, "invalid_input.ref_name"),
        (("tag", "-d", "nothing"), 3, "not_found.ref"),
        (("tag", "x", "-d", "v1"), 2, "invalid_input.usage"),
        (("tag", "--force"), 2, "invalid_input.usage"),
        (("fork", "nothing"), 3, "not_found.name"),
        (("fork", "main", "storm"), 4, "conflict.ref"),
        (("fork", "main", "new", "new"), 4, "conflict.ref"),
        (("fork", "main", "a~b"), 2, "invalid_input.ref_name"),
        (("fork", "main", "a", "b", "-n", "2"), 2, "invalid_input.usage"),
        (("fork", "main", "-n", "0"), 2, "invalid_input.usage"),
        (("fork",), 2, "invalid_input.usage"),
        (("checkout", "nothing"), 3, "not_found.name"),
        (("reflog", "nothing"), 3, "not_found.name"),
        (("reflog", "main~1"), 3, "not_found.name"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(
    story: Story, arguments: tuple[str, ...], code: int, error: str
) -> None:
    before = tips(story)
    told = run(*arguments)
    assert (told.code, told.out) == (code, "")
    assert told.err.startswith("forkpoint: ")
    assert f"[{error}]" in told.err
    with_json = (arguments[0], "--json", *arguments[1:])
    record = run(*with_json).json
    assert (record["error"]["code"], record["exit_code"]) == (error, code)
    assert tips(story) == before


# ---- tag ----


def test_tags_are_listed_made_moved_by_force_and_deleted(story: Story) -> None:
    assert run("tag").lines == [f"{story.first[3:15]}  v1"]
    assert run("tag", "v2").out == f"Tag v2 is at {story.second[3:15]}\n"
    assert run_json("tag", "v2", "storm", "--force") == {"manifest_id": story.storm, "name": "v2"}
    assert run_json("tag", "-d", "v1") == {"deleted": "v1"}
    assert run_json("tag") == {"tags": [{"manifest_id": story.storm, "name": "v2"}]}


# ---- fork ----


def test_a_fork_is_a_new_branch_at_the_same_state_and_copies_no_bytes(story: Story) -> None:
    told = run("fork", "main", "experiment")
    assert told.lines[0] == "experiment"
    assert told.lines[1].startswith(f"1 branch at {story.second[3:15]} (position 425): ")
    assert told.lines[1].endswith(" shared, 0 bytes copied")
    assert tips(story)["experiment"] == story.second


def test_forks_are_numbered_after_the_branch_or_after_one_new_name(story: Story) -> None:
    assert run_json("fork", "main", "-n", "2")["branches"] == ["main-1", "main-2"]
    assert run_json("fork", "main")["branches"] == ["main-3"]
    assert run_json("fork", "main", "idea", "-n", "2")["branches"] == ["idea-1", "idea-2"]
    assert run_json("fork", "main~1", "--count", "1")["branches"] == ["fork-1"]
    assert tips(story)["fork-1"] == story.first


def test_several_forks_can_be_named(story: Story) -> None:
    record = run_json("fork", "v1", "a", "b", "c")
    assert record["branches"] == ["a", "b", "c"]
    assert (record["manifest_id"], record["bytes_copied"], record["position"]) == (story.first, 0, 407)


def test_a_fork_of_which_one_name_is_taken_makes_none(story: Story) -> None:
    before = tips(story)
    assert run("fork", "main", "fresh", "storm").code == 4
    assert tips(story) == before


# ---- checkout ----


def test_checkout_verifies_and_moves_head_to_a_branch(story: Story) -> None:
    told = run("checkout", "storm")
    assert told.lines[0] == "On branch storm"
    assert told.lines[1].startswith(f"{story.storm[3:15]}: 443 tokens, 2 chunks verified by digest, ")
    record = run_json("checkout", "main")
    assert record["head"] == {"branch": "main", "manifest_id": story.second}
    receipt = record["receipt"]
    assert (receipt["manifest_id"], receipt["tokens"], receipt["chunks_verified"]) == (story.second, 426, 2)
    assert receipt["bytes_verified"] > 0
    assert receipt["elapsed_us"] > 0


def test_checkout_of_anything_else_detaches_head(story: Story) -> None:
    assert run("checkout", "v1").lines[0] == f"HEAD is detached at {story.first[3:15]}"
    assert run("status").lines[0] == "HEAD is detached"
    assert run_json("checkout", story.storm[3:13])["head"] == {"branch": None, "manifest_id": story.storm}


def test_checkout_of_damaged_state_is_refused_and_head_stays(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        chunk = repository.manifest(story.storm).groups[0].chunks[-1].chunk_id
    (path,) = story.folder.rglob(f"*{chunk[5:]}*")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    refused = run("checkout", "storm")
    assert (refused.code, refused.out) == (6, "")
    assert "[corrupt.object]" in refused.err
    path.unlink()
    assert run_json("checkout", "storm", code=3)["error"]["code"] == "not_found.object"
    assert run_json("status")["head"]["branch"] == "main"


# ---- reflog ----


def test_the_reflog_of_a_branch_counts_its_moves_back(story: Story) -> None:
    lines = run("reflog", "main").lines
    assert [line.split("  ")[:2] for line in lines] == [
        [story.second[3:15], "main@{0}"],
        [story.first[3:15], "main@{1}"],
    ]
    assert lines[0].endswith("  ada@desk  the sea")
    assert run("reflog", "main", "-n", "1").lines == lines[:1]


def test_the_reflog_as_json_has_every_move(story: Story) -> None:
    run("branch", "-d", "storm")
    record = run_json("reflog", "storm")
    assert record["ref"] == "storm"
    assert [each["manifest_id"] for each in record["entries"]] == [None, story.storm]
    last = record["entries"][0]
    assert set(last) == {"at_us", "index", "is_trusted", "manifest_id", "message", "new", "old", "ref", "tx", "who"}
    assert (last["index"], last["old"], last["new"], last["who"]) == (0, story.storm, None, "ada@desk")
    assert run("reflog", "storm").lines[0].startswith("deleted       storm@{0}  ")


def test_the_reflog_of_head_is_shown_without_an_argument(story: Story) -> None:
    run("checkout", "storm")
    assert run("reflog").lines[0].split("  ")[:2] == [story.storm[3:15], "HEAD@{0}"]
