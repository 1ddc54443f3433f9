"""Real processes, real SIGKILL, at moments nobody chose."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tests.faults.children import ancestry, assert_sound, start

from forkpoint.ids import ManifestId, ObjectKind
from forkpoint.repo.repository import Repository

COMMITTER = "tests.faults.committer"


def run_and_kill(path: Path, name: str, num_lines: int, pause_s: float) -> list[ManifestId]:
    """Let a committer report ``num_lines`` commits, wait a little, kill it; every id that it reported until then."""
    child = start(COMMITTER, str(path), name, "1000")
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(num_lines)]
    time.sleep(pause_s)
    child.kill()
    rest, _ = child.communicate()
    complete = [line for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]
    return [ManifestId(line.split()[1]) for line in complete if line.startswith("accepted")]


@pytest.mark.parametrize("num_commits", [30, pytest.param(200, marks=pytest.mark.full)])
def test_every_commit_that_was_reported_is_in_the_ancestry(memory_path: Path, num_commits: int) -> None:
    Repository.create(memory_path).close()
    chance = random.Random(20)
    accepted: list[ManifestId] = []
    while len(accepted) < num_commits:
        accepted += run_and_kill(memory_path, f"n{len(accepted)}", chance.randint(1, 8), chance.random() * 0.1)
        with Repository.open(memory_path) as repo:
            assert_sound(repo)
            assert set(accepted) <= ancestry(repo, "main")
    with Repository.open(memory_path) as repo:
        repo.collect()
        assert repo.check() == []
        assert set(accepted) <= ancestry(repo, "main")


def test_ids_do_not_depend_on_the_interpreter_and_nothing_is_written_twice(memory_path: Path) -> None:
    """Write, SIGKILL, restart with another hash seed."""
    ids: list[list[ManifestId]] = []
    for hash_seed in (1, 2):
        path = memory_path / str(hash_seed)
        Repository.create(path).close()
        child = start(COMMITTER, str(path), "same", "1000", hash_seed=hash_seed)
        assert child.stdout is not None
        ids.append([ManifestId(child.stdout.readline().split()[1]) for _ in range(4)])
        child.kill()
        child.communicate()
    assert ids[0] == ids[1]
    with Repository.open(memory_path / "1") as repo, Repository.open(memory_path / "2") as other:
        listed = {row.manifest_id for row in repo.catalog.manifests()}
        assert set(ids[0]) <= listed
        for each in listed:
            repo.verify(each)
        before = written(memory_path / "1")
        bundle = b"".join(other.export_bundle(ids[0][-1]))
        again = repo.commit_bundle(bundle, branch="again")
        assert (again.was_new, again.bytes_written) == (False, 0)
        assert before.items() <= written(memory_path / "1").items()
        assert set(repo.store.scan(ObjectKind.MANIFEST)) >= set(ids[0])


def written(path: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every object but moves."""
    objects = (path / ".forkpoint/objects").rglob("*.*")
    return {str(each): (each.stat().st_ino, each.stat().st_mtime_ns) for each in objects}


@pytest.mark.parametrize("num_commits", [4, pytest.param(40, marks=pytest.mark.full)])
def test_six_writers_of_one_branch_lose_no_update(memory_path: Path, num_commits: int) -> None:
    """Every accepted commit is in the ancestry, and nothing else is; every other one got a conflict."""
    Repository.create(memory_path).close()
    children = [start(COMMITTER, str(memory_path), f"writer{n}", str(num_commits)) for n in range(6)]
    lines = [line.split() for child in children for line in child.communicate()[0].splitlines()]
    assert all(child.returncode == 0 for child in children)
    assert len(lines) == 6 * num_commits
    accepted = {ManifestId(value) for word, value in lines if word == "accepted"}
    with Repository.open(memory_path) as repo:
        assert accepted == ancestry(repo, "main")
        assert len(repo.reflog("main")) == len(accepted)
        assert_sound(repo)
