from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
from tests.cli.runner import command, run, run_json, run_process
from tests.cli.stories import SCENE, Story, written

from forkpoint.repo.repository import Repository


@pytest.fixture
def other(tmp_path: Path) -> Path:
    run("init", tmp_path / "other")
    return tmp_path / "other"


def test_a_snapshot_is_committed_in_another_repository(story: Story, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "storm.bundle"
    told = run("snapshot", "storm", file)
    assert told.code == 0
    assert told.out.startswith(f"{story.storm[3:15]} is in {file}, ")
    done = run("commit", file, "-b", "theirs", "-m", "from ada", "-C", other)
    assert done.out.startswith(f"theirs is at {story.storm[3:15]}: 2 chunks written (")
    assert done.out.endswith("0 shared (0 B)\n")
    assert run_json("log", "theirs", "-C", other)["entries"][0]["message"] == "from ada"
    with Repository.open(other) as repository:
        assert repository.text(story.storm) == run_json("show", "storm")["text"]


def test_commit_and_snapshot_as_json(story: Story, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "storm.bundle"
    record = run_json("snapshot", "storm", file)
    assert record == {"file": str(file), "manifest_id": story.storm, "num_bytes": file.stat().st_size}
    done = run_json("commit", file, "-C", other)
    assert set(done) == {
        "branch", "bytes_shared", "bytes_written", "chunks_shared", "chunks_written", "elapsed_us", "manifest_id", "was_new",
    }  # fmt: skip
    assert (done["branch"], done["was_new"], done["chunks_written"]) == ("main", True, 2)
    again = run_json("commit", file, "-C", other)
    assert (again["was_new"], again["bytes_written"], again["chunks_shared"]) == (False, 0, 2)


def test_a_snapshot_goes_through_a_pipe(story: Story, other: Path) -> None:
    line, environment = command(["snapshot", "main", "-"])
    data = subprocess.run(line, env=environment, capture_output=True, check=True).stdout
    record = run_json("commit", "-", "-b", "piped", "-C", other, stdin=data)
    assert record["manifest_id"] == story.second


def test_a_snapshot_replaces_a_file_whole_or_not_at_all(story: Story, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    assert run("snapshot", "nothing", file).code == 3
    assert file.read_bytes() == b"old"
    assert run("snapshot", "main", file).code == 0
    assert file.stat().st_size > 1000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "work"]


def test_a_branch_that_the_snapshot_does_not_continue_moves_only_by_force(story: Story, tmp_path: Path) -> None:
    run("snapshot", "storm", tmp_path / "file")
    refused = run("commit", tmp_path / "file", "-b", "main")
    assert refused.code == 4
    assert "[conflict.ref]" in refused.err
    assert run_json("commit", tmp_path / "file", "-b", "main", "--force")["manifest_id"] == story.storm


def test_with_head_detached_the_branch_must_be_named(story: Story, tmp_path: Path) -> None:
    run("snapshot", "storm", tmp_path / "file")
    run("checkout", "v1")
    assert run_json("commit", tmp_path / "file", code=2)["error"]["code"] == "invalid_input.branch"


def test_a_damaged_file_is_refused_and_nothing_is_advertised(story: Story, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    run("snapshot", "storm", file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    for broken in (bytes(data), bytes(data[:-100]), b"", b"not a bundle"):
        file.write_bytes(broken)
        refused = run("commit", file, "-b", "theirs", "-C", other)
        assert refused.code == 6, refused
        assert run_json("branch", "-C", other) == {"branches": []}


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("commit", "absent", "-b", "x"), 3, "not_found.file"),
        (("commit", ".", "-b", "x"), 8, "unavailable.file"),
        (("snapshot", "main", "absent/file"), 8, "unavailable.file"),
        (("snapshot", "main", "-"), 2, "invalid_input.usage"),
        (("snapshot", "main"), 2, "invalid_input.usage"),
    ],
)
def test_files_that_do_not_serve_are_said(story: Story, arguments: tuple[str, ...], code: int, error: str) -> None:
    record = run_json(*arguments, code=code)
    assert (record["error"]["code"], record["exit_code"]) == (error, code)


def test_a_write_that_fails_half_way_leaves_no_half_file(story: Story, tmp_path: Path) -> None:
    with Repository.open(story.folder) as repository:
        repository.publish(written(SCENE, state_bytes=300_000, model="big"), branch="big")
    limit = 200_000
    told = run_process(
        "snapshot",
        "big",
        tmp_path / "file",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert told.code == 8, told
    assert "[unavailable.file]" in told.err
    assert [each.name for each in tmp_path.iterdir()] == ["work"]


def test_a_pipe_with_a_name_is_written_to_and_not_replaced(story: Story, tmp_path: Path) -> None:
    fifo, copy = tmp_path / "fifo", tmp_path / "copy"
    os.mkfifo(fifo)
    with copy.open("wb") as out, subprocess.Popen(["cat", fifo], stdout=out) as reader:
        record = run_json("snapshot", "main", fifo)
        is_kept = fifo.is_fifo()
        if not is_kept:
            reader.kill()  # it would wait for ever
    assert is_kept
    assert copy.stat().st_size == record["num_bytes"] > 1000
    assert run_json("commit", copy)["manifest_id"] == story.second


def test_no_space_is_told_as_such(story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forkpoint.cli.exchange.os.fsync", fill)
    assert run_json("snapshot", "main", tmp_path / "file", code=7)["error"]["code"] == "capacity.disk"
    assert [each.name for each in tmp_path.iterdir()] == ["work"]
