"""Which repository a command works on: ``--repo``, then FORKPOINT_DIR, then the nearest one above the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from forkpoint.repo.repository import Repository

RepositoryPath: TypeAlias = Annotated[
    Path | None,
    typer.Option("--repo", "-C", help="Folder of the repository; default: found from the current folder upwards."),
]


def find_repository(path: Path | None) -> Path:
    """The folder of the repository that a command works on. Raises NotFound ``not_found.repository``."""
    from forkpoint.config import Config
    from forkpoint.repo import layout

    if path is not None:
        layout.read_settings(layout.Layout.at(path))
        return path
    return layout.discover(Config.from_environment().repository_dir or Path.cwd()).folder


def open_repository(path: Path | None) -> Repository:
    """Open the repository that a command works on. Raises NotFound ``not_found.repository``."""
    from forkpoint.repo.repository import Repository

    return Repository.open(find_repository(path))
