"""How much other processes took of the machine while an engine was asked: a measurement beside others says little."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class Contention:
    """Sums over the watched spans."""

    def __init__(self) -> None:
        self._others = 0.0
        self._wall = 0.0

    @property
    def seconds(self) -> float:
        """Processor seconds that others used."""
        return self._others

    @property
    def cores(self) -> float:
        """Cores that others used, on average over all watched spans."""
        return self._others / self._wall if self._wall else 0.0

    @contextlib.contextmanager
    def watched(self, session: int) -> Iterator[None]:
        """Count what runs meanwhile outside the session of this number and this process."""
        busy, own, started = _busy_seconds(), session_seconds(session), time.perf_counter()
        try:
            yield
        finally:
            others = (_busy_seconds() - busy) - (session_seconds(session) - own)
            self._others += max(0.0, others)
            self._wall += time.perf_counter() - started


def _busy_seconds() -> float:
    """Processor seconds of the whole machine since it started, idle ones and waits left out."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def session_seconds(session: int) -> float:
    """Processor seconds of the living processes of one session."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    total += int(fields[11]) + int(fields[12])
    return total / _TICKS
