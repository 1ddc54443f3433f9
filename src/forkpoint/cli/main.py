"""The ``forkpoint`` command: thin commands over repositories and language models.

Commands import what they need when they run, so that ``forkpoint log`` pays for no model, and ``forkpoint --help`` for no SQL. Only the
module of the command that was asked for is imported; for help and for what is no command, all are.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Final, NoReturn

import typer
from typer.exceptions import TyperException

from forkpoint import __version__
from forkpoint.cli.output import discard, prepare_streams, print_error, print_failure
from forkpoint.errors import EXIT_CODES, Error, InvalidInput, Unavailable

# Imports and long listings make many objects and no cycles: fewer passes over them save a tenth of a short command.
gc.set_threshold(50_000, 20, 20)

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "repositories": ("init", "status"),
    "refs": ("branch", "tag", "fork", "checkout", "reflog"),
    "history": ("log", "show"),
    "diff": ("diff",),
    "exchange": ("commit", "snapshot"),
    "objects": ("cat-file",),
    "maintenance": ("gc", "fsck", "verify"),
    "models": ("run", "score"),
    "chat": ("chat",),
    "doctor": ("doctor",),
    "demo": ("demo",),
    "demo_worker": ("demo-worker",),
}
"""The commands of each module, in the order in which help lists them."""

_INTERRUPTED: Final = 130


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"forkpoint {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Holds the options that every command shares."""


def make_app(command: str | None = None) -> typer.Typer:
    """The commands of the module that ``command`` is in, or all of them."""
    app = typer.Typer(
        name="forkpoint",
        help="Durable, forkable continuations: commit, branch, verify and exactly resume the state behind a computation.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    names = [name for name, commands in MODULES.items() if command in commands] or MODULES
    for name in names:
        import_module(f"forkpoint.cli.{name}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, 130 for an interrupt, or one of ``forkpoint.errors.EXIT_CODES``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        exit_code = _run(given)
    except BrokenPipeError:
        exit_code = 0  # the reader (head, a pager) has gone; nothing is wrong here
    except OSError as error:
        # Output that failed is still in the buffer, and fails again.
        exit_code = _bug(error, as_json="--json" in given) if _flush() is None else _unwritable(error)
    failure = _flush()
    if failure is None:
        return exit_code
    discard(sys.stdout)
    return exit_code or (0 if isinstance(failure, BrokenPipeError) else _unwritable(failure))


def _flush() -> OSError | None:
    """Write what is still in the buffer of standard output; returns why that cannot be done."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def _unwritable(failure: OSError) -> int:
    """Said on stderr, as JSON has nowhere to go either."""
    message = f"cannot write the output: {failure.strerror}; what was committed is kept"
    return print_error(Unavailable(message, code="output"), as_json=False)


def _run(arguments: list[str]) -> int:
    """What typer does in its standalone mode, with our own words and codes for what goes wrong."""
    as_json = "--json" in arguments
    command = typer.main.get_command(make_app(arguments[0] if arguments else None))
    try:
        with command.make_context("forkpoint", arguments.copy() or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    except Error as error:
        return print_error(error, as_json=as_json)
    except TyperException as refusal:
        return _refused(refusal, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(as_json)
    except OSError:
        raise  # may be the output's own, which only the caller can tell
    except Exception as error:  # noqa: BLE001 - the outermost rim: the rest are our own bugs, and are told as such
        return _bug(error, as_json=as_json)
    return 0


def _interrupted(as_json: bool) -> int:
    """People know what they did; programs get an object as always."""
    if as_json:
        print_failure("error.interrupted", "interrupted; what was committed is kept", {}, _INTERRUPTED, as_json=True)
    return _INTERRUPTED


def _bug(error: Exception, *, as_json: bool) -> int:
    """What nobody foresaw: a line, and for people also where it happened."""
    message = f"internal error: {type(error).__name__}: {error}"
    exit_code = print_failure("error.internal", message, {}, EXIT_CODES[Error.family], as_json=as_json)
    if not as_json:
        import traceback

        with suppress(OSError):
            traceback.print_exception(error)
    return exit_code


def _refused(refusal: TyperException, as_json: bool) -> int:
    """A command line that cannot be understood."""
    exit_code = EXIT_CODES[InvalidInput.family]
    context = getattr(refusal, "ctx", None)
    where = "forkpoint" if context is None else context.command_path
    message = f"{refusal.format_message().rstrip('.')}; see {where} --help"
    return print_failure("invalid_input.usage", message, {}, exit_code, as_json=as_json)


def run_as_process() -> NoReturn:
    """Run one command as the process's only work, and end it at once: taking down what was imported takes a tenth of a short command.

    Nothing is left to do then: output is flushed, and repositories, files and temporary folders were closed by those who opened them.
    """
    exit_code = main()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_as_process()
