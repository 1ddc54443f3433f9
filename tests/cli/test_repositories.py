from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.runner import run, run_json
from tests.cli.stories import Story

from forkpoint.repo.repository import Repository


def test_init_makes_a_repository_that_status_finds_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("init", tmp_path / "new" / "work")
    assert (made.code, made.out) == (0, f"Empty repository in {tmp_path}/new/work/.forkpoint, on branch main\n")
    monkeypatch.chdir(tmp_path / "new" / "work")
    found = run("status")
    assert found.code == 0
    assert found.lines[0] == "On branch main"
    assert "Nothing is committed yet" in found.lines[1]


def test_init_without_a_path_uses_the_current_folder(elsewhere: Path) -> None:
    assert run_json("init") == {"branch": "main", "folder": str(elsewhere / ".forkpoint"), "namespace": "default"}


def test_init_keeps_a_namespace(tmp_path: Path) -> None:
    assert run_json("init", tmp_path, "--namespace", "team")["namespace"] == "team"
    assert run_json("status", "-C", tmp_path)["namespace"] == "team"


def test_init_twice_is_refused(tmp_path: Path) -> None:
    run("init", tmp_path)
    again = run("init", tmp_path)
    assert (again.code, again.out) == (4, "")
    assert "is a repository already; open it [conflict.repository]" in again.err


@pytest.mark.parametrize("name", ["n" * 300, "n\udcff"], ids=["too long", "no UTF-8"])
def test_a_path_that_cannot_be_used_is_refused_and_nothing_is_made(
    name: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (("init", name), ("status", "-C", name), ("demo", "--keep", name)):
        assert run_json(*arguments, code=2)["error"]["code"] == "invalid_input.path"
    monkeypatch.setenv("FORKPOINT_DIR", name)
    assert run_json("status", code=2)["error"]["code"] == "invalid_input.path"
    assert not list(elsewhere.iterdir())


def test_a_current_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for name in ("status", "init"):
        assert run_json(name, code=2)["error"]["code"] == "invalid_input.path"


def test_status_says_where_head_is_and_how_much_there_is(story: Story) -> None:
    found = run("status")
    assert found.lines == [
        "On branch main",
        f"{story.second[3:15]} at position 425, pending token 13 '.'",
        "    the sea",
        "2 branches, 1 tag",
        f"3 manifests, 4 chunks of {_size(story)}, 1 in the prefix index",
        "0 leases; 0 objects doomed, not deleted yet",
    ]


def test_status_as_json_has_the_same_facts(story: Story) -> None:
    record = run_json("status")
    assert set(record) == {"counts", "folder", "head", "namespace"}
    assert record["head"] == {
        "branch": "main",
        "manifest_id": story.second,
        "message": "the sea\n\nit rises",
        "pending": 13,
        "pending_text": ".",
        "position": 425,
    }
    counts = record["counts"]
    assert (counts["manifests"], counts["branches"], counts["tags"], counts["leases"]) == (3, 2, 1, 0)


def test_status_counts_running_leases(story: Story) -> None:
    with Repository.open(story.folder) as repository, repository.lease(story.first):
        assert run_json("status")["counts"]["leases"] == 1
    assert run_json("status")["counts"]["leases"] == 0


def test_status_serves_on_although_the_current_manifest_is_lost(story: Story) -> None:
    (path,) = story.folder.rglob(f"*{story.second[5:]}*")
    path.unlink()
    record = run_json("status")
    assert (record["head"]["position"], record["head"]["pending_text"]) == (425, None)


def test_a_repository_is_found_from_a_folder_below_it(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    below = story.folder / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert run_json("status")["folder"] == str(story.folder / ".forkpoint")


def test_the_environment_names_a_repository_and_the_option_wins(
    story: Story, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("FORKPOINT_DIR", str(story.folder))
    assert run_json("status")["head"]["manifest_id"] == story.second
    run("init", tmp_path / "other")
    assert run_json("status", "--repo", tmp_path / "other")["head"]["manifest_id"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",), ("branch",), ("tag",), ("fork", "main", "x"), ("checkout", "main"), ("reflog",), ("log",), ("show",),
        ("diff", "a", "b"), ("commit", "f"), ("snapshot", "main", "f"), ("cat-file", "abcd"), ("gc",), ("fsck",), ("verify",),
        ("run", "model", "-b", "x", "-p", "y"), ("chat", "-b", "x"), ("score", "model", "x", "--name", "main"),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_every_command_without_a_repository_says_how_to_make_one(arguments: tuple[str, ...]) -> None:
    told = run(*arguments)
    assert (told.code, told.out) == (3, "")
    assert "run forkpoint init" in told.err
    record = run_json(*arguments, code=3)
    assert record["error"]["code"] == "not_found.repository"
    assert record["exit_code"] == 3


def _size(story: Story) -> str:
    with Repository.open(story.folder) as repository:
        return f"{repository.status().counts.chunk_bytes / 1024:.1f} KiB"
