"""The suite's options. ``--full`` also runs the tests marked ``full`` and gives hypothesis more examples."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # so that tests can import builders beside them as tests.<package>.<module>

settings.register_profile(
    "default", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("full", settings.get_profile("default"), max_examples=400)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long forms (marker full)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    long = [item for item in items if item.get_closest_marker("full")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: faster, and a killed process leaves there what it would leave on a disk."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="forkpoint-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)
