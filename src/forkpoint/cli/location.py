"""Which repository a command works on: ``--repo``, then FORKPOINT_DIR, then the nearest one above the current folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from forkpoint.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from forkpoint.repo.repository import Repository

RepositoryPath: TypeAlias = Annotated[
    Path | None,
    typer.Option("--repo", "-C", help="Folder of the repository; default: found from the current folder upwards."),
]


@contextmanager
def usable_path() -> Iterator[None]:
    """Around work with a path that a user gave: InvalidInput or Unavailable, ``path``, where the system does not take it."""
    try:
        yield
    except PermissionError as error:
        raise Unavailable(f"this path cannot be reached: {error.strerror}", code="path") from error
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds bytes that are no UTF-8"
        raise InvalidInput(f"this path cannot be used: {reason}; choose another folder", code="path") from error


def check_path(path: Path) -> None:
    """Whether a repository can be at a path at all. Raises InvalidInput ``invalid_input.path``, Unavailable ``unavailable.path``."""
    with usable_path():
        str(path.absolute()).encode()  # SQLite takes no other names
        with suppress(FileNotFoundError, NotADirectoryError):  # which is for others to judge
            path.stat()


def find_repository(path: Path | None) -> Path:
    """The folder of the repository that a command works on.

    Raises:
        NotFound: ``not_found.repository``.
        InvalidInput: ``invalid_input.path``.
        Unavailable: ``unavailable.path``.
    """
    from forkpoint.config import Config
    from forkpoint.repo import layout

    if path is not None:
        check_path(path)
        layout.read_settings(layout.Layout.at(path))
        return path
    with usable_path():
        start = Config.from_environment().repository_dir or Path.cwd()
    check_path(start)
    return layout.discover(start).folder


def open_repository(path: Path | None) -> Repository:
    """Open the repository that a command works on. Raises NotFound ``not_found.repository``."""
    from forkpoint.repo.repository import Repository

    return Repository.open(find_repository(path))
