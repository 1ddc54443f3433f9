"""Tiny engines, built once and shared by tests that leave their weights alone; the real bundled model likewise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import transformers
from tests.llm.models import ARCHITECTURES, load, save_model

from forkpoint.llm import TransformersEngine
from forkpoint.repo.repository import Repository

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

Folders: TypeAlias = Callable[[str], Path]
Engines: TypeAlias = Callable[..., TransformersEngine]


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines of tests keep digests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of the tiny model of an architecture, not to be changed."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: save_model(root / name, ARCHITECTURES[name]()))


@pytest.fixture(scope="session")
def engines(folders: Folders, model_cache: Path) -> Engines:
    """A shared engine of an architecture and dtype, whose weights are not to be changed; as a native program if it can be."""
    return cache(
        lambda name="llama", dtype="float32", native=True: load(folders(name), model_cache, dtype=dtype, native=native)
    )


@pytest.fixture
def engine(engines: Engines) -> TransformersEngine:
    """The shared tiny Llama in float32."""
    return engines()


@pytest.fixture(scope="session")
def smollm2() -> TransformersEngine:
    """The bundled model in bfloat16 on one thread."""
    return load("bundled:smollm2", None, dtype="bfloat16")


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", who="tester") as repository:
        yield repository
