from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: what a killed process leaves does not depend on the disk, and this is faster."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="forkpoint-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)
