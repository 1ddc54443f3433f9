"""A process that dies between any two steps of a commit: what was there stays, what was not yet is absent, a retry succeeds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
from tests.faults.children import assert_sound, in_child
from tests.repo.drafts import draft_of

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository
from forkpoint.store.local import LocalStore
from forkpoint.testing.faulty_store import Fault, FaultyStore, Moment, Step, kill

FIRST, SECOND = list(range(300)), list(range(600))


@dataclass(frozen=True)
class Scene:
    """A repository with one commit on main, to which a second is about to be added."""

    path: Path
    first: ManifestId

    def commit(self, *faults: Fault) -> FaultyStore:
        folder = self.path / ".forkpoint"
        store = FaultyStore(LocalStore(folder / "objects"), *faults)
        with Repository(store=store, catalog=Catalog.open(sqlite_url(folder / "catalog.db"))) as repo:
            repo.publish(draft_of(SECOND, parent=self.first, tokenizer=b"{}"), branch="main")
        return store

    def assert_survived(self) -> None:
        with Repository.open(self.path) as repo:
            assert_sound(repo)
            tip = repo.resolve("main")
            assert tip == self.first or repo.tokens(tip) == SECOND
            again = repo.publish(draft_of(SECOND, parent=self.first, tokenizer=b"{}"), branch="main")
            assert repo.resolve("main") == again.manifest_id
            assert repo.resolve("main~1") == self.first
            assert_sound(repo)
            repo.collect()
            assert repo.check() == []
            repo.verify("main")


def scene_at(path: Path) -> Scene:
    with Repository.create(path) as repo:
        return Scene(path=path, first=repo.publish(draft_of(FIRST), branch="main").manifest_id)


def steps_of_a_commit(path: Path) -> list[tuple[Step, int, Moment]]:
    store = scene_at(path).commit()
    steps: tuple[Step, ...] = ("put_many", "put_many.object", "put", "has", "get")
    moments: tuple[Moment, ...] = ("before", "after")
    return [(step, nth + 1, moment) for step in steps for nth in range(store.num_calls(step)) for moment in moments]


def test_killed_at_each_step_of_the_store(memory_path: Path) -> None:
    steps = steps_of_a_commit(memory_path / "dry")
    assert len({step for step, _, _ in steps}) >= 4
    for number, (step, nth, moment) in enumerate(steps):
        scene = scene_at(memory_path / str(number))
        fault = Fault(step=step, nth=nth, moment=moment, effect=kill)
        assert in_child(lambda scene=scene, fault=fault: scene.commit(fault)) == -signal.SIGKILL, (step, nth, moment)
        scene.assert_survived()


def killing_at_call(number: int) -> Callable[[FrameType, str, object], None]:
    """A profiler that kills the process when the code of the package, or what it calls, makes its ``number``-th call."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return profile


def num_calls_of_a_commit(scene: Scene, path: Path) -> int:
    def work() -> None:
        count = 0

        def profile(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        scene.commit()
        sys.setprofile(None)
        path.write_text(str(count))

    assert in_child(work) == 0
    return int(path.read_text())


@pytest.mark.parametrize("num_moments", [20, pytest.param(400, marks=pytest.mark.full)])
def test_killed_at_moments_spread_over_all_that_is_called(memory_path: Path, num_moments: int) -> None:
    """No hooks: the moments fall anywhere in our code, in the database layer and in what they call, commit included."""
    total = num_calls_of_a_commit(scene_at(memory_path / "dry"), memory_path / "count")
    num_killed = 0
    for moment in range(num_moments):
        scene = scene_at(memory_path / str(moment))

        def work(scene: Scene = scene, moment: int = moment) -> None:
            sys.setprofile(killing_at_call(1 + moment * total // num_moments))
            scene.commit()

        num_killed += in_child(work) == -signal.SIGKILL
        scene.assert_survived()
    assert num_killed >= num_moments * 9 // 10
