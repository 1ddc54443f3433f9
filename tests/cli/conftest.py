from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.stories import Story, tell

from forkpoint.repo.repository import Repository


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in an empty folder, by somebody whose name is known, with no repository in the environment."""
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORKPOINT_WHO", "ada@desk")
    monkeypatch.delenv("FORKPOINT_DIR", raising=False)
    return folder


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A repository with a history, and the current folder in it."""
    with Repository.create(tmp_path / "work", who="ada@desk") as repository:
        ids = tell(repository)
    monkeypatch.chdir(tmp_path / "work")
    return Story(folder=tmp_path / "work", **ids)
