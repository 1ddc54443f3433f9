"""An engine in a process of its own that runs only while it is asked something; stopped by signal otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 900.0
CALL_SECONDS = 600.0


class EngineFailed(Exception):
    """The engine's process answered with an error, ended, or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to start an engine. ``missing`` says why it cannot be started, where that is known beforehand."""

    name: str
    command: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


class EngineProcess:
    """One engine. All processes it makes are in one group, which is stopped whenever no call runs."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.name = spec.name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*spec.command, json.dumps(dict(spec.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
        self._unread = b""
        self._is_closed = False

    @property
    def process_id(self) -> int:
        """Number of the process, of its group and of its session."""
        return self._process.pid

    def started(self) -> Any:
        """Wait until the engine has loaded, and stop it; what it says of itself."""
        return self._answer(START_SECONDS)

    def call(self, do: str, **arguments: Any) -> Any:
        """Wake the engine, ask, and stop it again. Raises EngineFailed."""
        if self._is_closed:
            raise EngineFailed("it is closed")
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{error}; see {self._log}") from error
        return self._answer(CALL_SECONDS)

    def close(self) -> None:
        """End the process and those that it made; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._signal(signal.SIGCONT)
        for end in (signal.SIGTERM, signal.SIGKILL):
            self._signal(end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _answer(self, limit: float) -> Any:
        try:
            answer = json.loads(self._line(limit))
        except json.JSONDecodeError as error:
            raise EngineFailed(f"no JSON in its answer; see {self._log}") from error
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer["value"]

    def _line(self, limit: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, until = self._process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                why = f"its process ended with {self._ended()}" if ready else f"no answer in {limit:.0f} s"
                raise EngineFailed(f"{why}; see {self._log}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _ended(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return self._process.returncode

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
