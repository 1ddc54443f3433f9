"""Rows of a benchmark: a table for people, a JSON list for programs.

A benchmark whose every target holds exits 0, one with a missed target 1; the JSON is written either way.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, None where it could not be measured. ``target`` is None where nothing is promised; ``holds`` is then None too."""

    name: str
    value: float | None
    unit: str
    target: str | None = None
    holds: bool | None = None


@dataclass(slots=True)
class Report:
    """Collects rows, prints each as it comes, writes them at the end."""

    rows: list[Row] = field(default_factory=list)

    def add(
        self, name: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Add a figure and compare it with its target."""
        target = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}" if at_most is not None else None
        holds = None
        if at_least is not None:
            holds = value >= at_least
        elif at_most is not None:
            holds = value <= at_most
        row = Row(name=name, value=value, unit=unit, target=target, holds=holds)
        self.rows.append(row)
        verdict = {True: "holds", False: "MISSED", None: ""}[holds]
        print(f"{name:66s}{value:12.3f} {unit:8s}{target or '':>10s}  {verdict}", flush=True)

    def unmeasured(self, name: str, why: str, *, target: str | None = None) -> None:
        """Say that a figure could not be measured; a target that was not measured is missed."""
        self.rows.append(
            Row(name=f"{name}: {why}", value=None, unit="", target=target, holds=None if target is None else False)
        )
        print(f"{name:66s}{'-':>12s} not measured: {why}{'' if target is None else f'  {target}  MISSED'}", flush=True)

    def write(self, path: Path | None) -> None:
        """Write the rows as JSON where asked. Raises SystemExit with 1 after that if a target was missed."""
        if path is not None:
            path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1) + "\n")
        missed = [row.name for row in self.rows if row.holds is False]
        if missed:
            print(f"\n{len(missed)} missed: {', '.join(missed)}", flush=True)
            sys.exit(1)


def arguments(
    description: str, extend: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> argparse.Namespace:
    """The options that every benchmark takes, and those that ``extend`` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--no-peers", action="store_true", help="leave out what other software is measured for")
    extend(parser)
    options = parser.parse_args()
    print(f"{description}\n{platform.machine()}, Python {platform.python_version()}\n", flush=True)
    return options


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(repetitions: int, **works: Callable[[], float]) -> dict[str, float]:
    """Median of each work's own measure (seconds), taken in turn so that all see the same machine."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repetitions):
        for name, work in works.items():
            samples[name].append(work())
    return {name: statistics.median(values) for name, values in samples.items()}
