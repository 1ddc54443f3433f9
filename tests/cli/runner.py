"""Runs commands as a user does, but in this process: arguments in; exit code, standard output and standard error out."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forkpoint
from forkpoint.cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class _Stream(io.TextIOWrapper):
    """Text in memory with a ``buffer`` for bytes."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(errors="surrogateescape")


def run(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
    """Run one command."""
    out, err = _Stream(), _Stream()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", _Stream(stdin)):
        code = main([str(each) for each in arguments])
    return Outcome(code=code, out=out.text(), err=err.text())


def run_json(*arguments: str | Path, code: int = 0, stdin: bytes = b"") -> Any:
    """Run one command with ``--json`` and return its object; nothing else may be printed on standard output."""
    outcome = run(*arguments, "--json", stdin=stdin)
    assert outcome.code == code, outcome
    return outcome.json


def command(arguments: Sequence[str | Path]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a command in a process of its own."""
    source = str(Path(forkpoint.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    line = [sys.executable, "-m", "forkpoint.cli.main", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}  # as users have it
    return line, {**environment, "PYTHONPATH": path}


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process of its own, its output piped; an interrupt reaches it even where a shell has its jobs ignore them."""
    line, environment = command(arguments)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    # A signal that is handled here is not inherited as ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(line, env=environment, text=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)


def run_process(*arguments: str | Path, **options: Any) -> Outcome:
    """Run a command in a process of its own."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return Outcome(code=process.returncode, out=out, err=err)
