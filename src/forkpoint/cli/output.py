"""How commands speak: text for people, one JSON object with ``--json``, errors on stderr with an exit code from one table.

Plain lines are printed as they are; ``rich`` is imported for a progress bar on a terminal and for nothing else.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO, TextIOWrapper
from itertools import islice
from typing import IO, Annotated, Any, Final, TypeAlias, final

import typer

from forkpoint.errors import EXIT_CODES, Error

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_JOINERS: Final = "\u200c\u200d"
_HEX_FLOAT: Final = re.compile(r"""(["']?)(-?0x[01]\.[0-9a-f]+p[+-][0-9]{1,4})\1""")


def print_json(record: Mapping[str, Any]) -> None:
    """One JSON object on stdout, in ASCII: it can be written whatever the encoding of stdout is."""
    print(json.dumps(record, ensure_ascii=True))


def print_lines(blocks: Iterable[str]) -> None:
    """Print each block and a line break, a hundred at a time: a long listing is not a write each."""
    rest = iter(blocks)
    while batch := list(islice(rest, 100)):
        print("\n".join(batch))


def print_error(error: Error, *, as_json: bool) -> int:
    """Say what failed and what to do; returns the exit code."""
    return print_failure(error.code, error.message, error.data, EXIT_CODES[error.family], as_json=as_json)


def print_failure(code: str, message: str, data: Mapping[str, Any], exit_code: int, *, as_json: bool) -> int:
    """An error as every command shows it: a line on stderr, or one JSON object on stdout. Returns the exit code."""
    if as_json:
        print_json({"error": {"code": code, "data": data, "message": message}, "exit_code": exit_code})
    else:
        _say(f"forkpoint: {message} [{code}]")
    return exit_code


def note(text: str) -> None:
    """Say on stderr what long work is going on."""
    _say(f"forkpoint: {text}")


def prepare_streams() -> None:
    """Have three streams that take every text: closed ones lead to nowhere, and what an encoding lacks is escaped.

    Opened here, a file takes the descriptor of the closed stream, so that no later file gets what is printed.
    """
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123 - open as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    out: Any = sys.stdout
    is_own = sys.stdout is sys.__stdout__
    if is_own and isinstance(getattr(out, "buffer", None), FileIO):
        # Python was asked for no buffer (PYTHONUNBUFFERED). A line at a time it is then: what failed stays where it is found again.
        sys.stdout = open(out.fileno(), "w", buffering=1, encoding=out.encoding, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: IO[str]) -> None:
    """Let a stream that cannot be written lead to nowhere, also what is still in its buffer: Python flushes once more at the end."""
    with suppress(OSError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _say(line: str) -> None:
    """A line on stderr. One that cannot be written stops no work: what it tells of is worth more."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def shown_bytes(num_bytes: int) -> str:
    """A size for people: ``812 B``, ``3.4 MiB``."""
    size, unit = float(num_bytes), 0
    while size >= 1023.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def shown_time(at_us: int) -> str:
    """A time of the catalog (microseconds UTC) in local ISO form, to the second."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at_us // 1_000_000))
    return f"{stamp[:-2]}:{stamp[-2:]}"


def counted(count: int, what: str) -> str:
    """``1 chunk``, ``1,204 chunks``, ``2 branches``."""
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}{ending}"


def indented(text: str, prefix: str = "    ") -> str:
    """``text`` with ``prefix`` before each line; control characters but tabs and line breaks are written out."""
    return "\n".join(prefix + printable(line) for line in text.split("\n"))


def printable(line: str) -> str:
    """A line that does nothing to a terminal: stored text may hold escape sequences.

    Decided character by character, so that pieces of a stream come out as the whole would.
    """
    if line.isprintable():
        return line
    return "".join(each if _is_harmless(each) else repr(each)[1:-1] for each in line)


def printable_text(text: str) -> str:
    """As :func:`printable`, line breaks kept: what a model writes, whole or in pieces."""
    return indented(text, "")


def show_text(text: str) -> None:
    """Print a piece of what a model writes at once, doing nothing else to the terminal."""
    print(printable_text(text), end="", flush=True)


@final
class Screen:
    """Shows text for as long as that is possible, so that what is generated outlives a reader that went away.

    Attributes:
        failure: why nothing is shown any more; None while it is.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.failure: OSError | UnicodeError | None = None

    def show(self, text: str) -> None:
        """Show a piece of text; nothing after a failure."""
        if self.failure is not None:
            return
        try:
            self._show(text)
        except (OSError, UnicodeError) as error:
            self.failure = error

    def check(self) -> None:
        """Raises the failure, if there was one."""
        if self.failure is not None:
            raise self.failure


def in_decimal(text: str) -> str:
    """``text`` with the floats that records spell as ``float.hex`` written for people: ``0x1.8p+0`` is 1.5."""
    return _HEX_FLOAT.sub(_decimal, text)


def _decimal(found: re.Match[str]) -> str:
    try:
        return repr(float.fromhex(found[2]))
    except OverflowError:
        return found[0]


def _is_harmless(character: str) -> bool:
    """Also tabs, spaces of other widths, and what joins letters and emoji; Python calls none of them printable."""
    return character.isprintable() or character in "\t" + _JOINERS or unicodedata.category(character) == "Zs"


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Progress]:
    """A progress bar on stderr, shown only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
