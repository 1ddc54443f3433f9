"""The ``forkpoint`` command: thin commands over repositories and language models.

Commands import what they need when they run, so that ``forkpoint log`` pays for no model.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from forkpoint import __version__
from forkpoint.cli import demo, models
from forkpoint.cli.output import print_error
from forkpoint.errors import Error

app = typer.Typer(
    name="forkpoint",
    help="Durable, forkable continuations: commit, branch, verify and exactly resume the state behind a computation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models.register(app)
demo.register(app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"forkpoint {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Holds the options that every command shares."""


def main() -> None:
    """Run the command line; exits with a code from ``forkpoint.errors.EXIT_CODES``."""
    try:
        app()
    except Error as error:
        sys.exit(print_error(error, as_json="--json" in sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, a pager) has gone; nothing is wrong here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
