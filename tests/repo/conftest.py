from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.repo.repository import Repository


@pytest.fixture
def repo(memory_path: Path) -> Iterator[Repository]:
    with Repository.create(memory_path, who="tester") as repository:
        yield repository
