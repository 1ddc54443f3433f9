"""How commands speak: text for people, one JSON object with ``--json``, errors on stderr with an exit code from one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from forkpoint.errors import EXIT_CODES, Error

if TYPE_CHECKING:
    from forkpoint.llm.engines.base import PrefillProgress

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
_INTERRUPTED: Final = 130


def print_json(record: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(record, ensure_ascii=False))


def print_error(error: Error, *, as_json: bool) -> int:
    """Say what failed and what to do; returns the exit code."""
    exit_code = EXIT_CODES[error.family]
    if as_json:
        print_json(
            {"error": {"code": error.code, "data": error.data, "message": error.message}, "exit_code": exit_code}
        )
    else:
        print(f"forkpoint: {error.message} [{error.code}]", file=sys.stderr)
    return exit_code


def note(text: str) -> None:
    """Say on stderr what long work is going on."""
    print(f"forkpoint: {text}", file=sys.stderr)


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[PrefillProgress]:
    """A progress bar on stderr, shown only on a terminal and only for work of more than one step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update
