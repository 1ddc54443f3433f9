"""Writers, makers of garbage and a collector at full speed on one repository: nothing that was named is ever lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.faults.children import ancestry, assert_sound
from tests.repo.drafts import draft_of

from forkpoint.errors import NotFound
from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository

TOKENS = list(range(600))


@pytest.mark.parametrize("duration_s", [3.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_nothing_that_was_named_is_lost(memory_path: Path, duration_s: float) -> None:
    Repository.create(memory_path).close()
    end = time.monotonic() + duration_s
    accepted: dict[str, list[ManifestId]] = {"one": [], "two": []}
    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(extend, memory_path, end, "one", accepted["one"]),
            pool.submit(extend, memory_path, end, "two", accepted["two"]),
            pool.submit(leave_garbage, memory_path, end),
            pool.submit(collect, memory_path, end),
        ]
        counts = [each.result() for each in work]
    assert all(counts)
    with Repository.open(memory_path) as repo:
        assert_sound(repo)
        for branch, ids in accepted.items():
            assert set(ids) <= ancestry(repo, branch)
        repo.collect()
        assert_sound(repo)
        assert repo.check() == []


def repeat(path: Path, end: float, step: Callable[[Repository, int], None]) -> int:
    count = 0
    with Repository.open(path) as repo:
        while time.monotonic() < end:
            step(repo, count)
            count += 1
    return count


def extend(path: Path, end: float, branch: str, accepted: list[ManifestId]) -> int:
    def step(repo: Repository, count: int) -> None:
        tokens = [*TOKENS[: 100 + count % 500], count]
        parent = accepted[-1] if accepted else None
        accepted.append(repo.publish(draft_of(tokens, parent=parent, payload={"n": count}), branch=branch).manifest_id)

    return repeat(path, end, step)


def leave_garbage(path: Path, end: float) -> int:
    """What it publishes shares chunks with the branches. Now and then it changes its mind and names what it left."""

    def step(repo: Repository, count: int) -> None:
        published = repo.publish(draft_of([*TOKENS[: 50 + count % 550], 9], payload={"n": count})).manifest_id
        if count % 3 == 0:
            try:
                repo.branch(f"kept-{count}", published)
            except NotFound:
                return  # collected already, so it is not named
            repo.verify(f"kept-{count}")

    return repeat(path, end, step)


def collect(path: Path, end: float) -> int:
    return repeat(path, end, lambda repo, _: void(repo.collect()))


def void(_: object) -> None:
    return None
