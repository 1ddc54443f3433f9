"""What is measured at load: a runtime that depends on something is found out, and the claim falls to what holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from forkpoint.llm.engines.selftest import Findings, measure

Fault = Callable[[int, int, int], int]
"""(rows of the pass, lanes of the pass, threads) to what it adds to the bits of a row."""


class Tokens:
    """A state that is its tokens, each with the fault of the pass that computed it."""

    def __init__(self, rows: tuple[tuple[int, int], ...] = ()) -> None:
        self.rows = rows
        self.length = len(rows)

    def slab_pieces(self, group: int, start: int, stop: int) -> tuple[list[bytes], list[bytes]]:
        raw = np.array(self.rows[start:stop], dtype=np.int64).tobytes()
        return [raw], [raw]


class FaultyPasses:
    """Computes nothing but the faults it was given."""

    vocabulary, groups = 100, (None,)
    strategy = SimpleNamespace(empty=Tokens)
    plan = SimpleNamespace(lanes=8)

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_passes = 0

    def run(
        self, lanes: Sequence[tuple[Tokens, Sequence[int]]], *, output: str, threads: int | None = None
    ) -> tuple[list[Tokens], np.ndarray]:
        self.num_passes += 1
        rows = sum(len(tokens) for _, tokens in lanes)
        states = [
            Tokens((*state.rows, *((token, self.fault(rows, len(lanes), threads or 1)) for token in tokens)))
            for state, tokens in lanes
        ]
        return states, np.array([state.rows[-1] for state in states], dtype=np.float32)


def found(fault: Fault) -> Findings:
    return measure(FaultyPasses(fault), 1000)  # type: ignore[arg-type]


def test_what_depends_on_nothing_is_invariant() -> None:
    findings = found(lambda rows, lanes, threads: 0)
    assert findings.claim == "invariance"
    assert findings.are_threads_alike
    assert findings.differing == ()


@pytest.mark.parametrize(
    ("fault", "differing"),
    [
        (lambda rows, lanes, threads: int(rows < 4), "in other pieces"),
        (lambda rows, lanes, threads: int(60 < rows < 120), "in other pieces"),
        (lambda rows, lanes, threads: int(lanes > 1), "beside other lanes"),
    ],
)
def test_what_depends_on_rows_or_lanes_is_not_and_says_by_what(fault: Fault, differing: str) -> None:
    findings = found(fault)
    assert findings.claim == "continuation"
    assert differing in findings.differing
    assert differing in " ".join(findings.reasons)


def test_threads_that_change_bits_are_found_and_do_not_weaken_the_claim() -> None:
    findings = found(lambda rows, lanes, threads: int(threads == 2))
    assert findings.claim == "invariance"
    assert not findings.are_threads_alike


def test_what_does_not_repeat_itself_keeps_only_the_bytes() -> None:
    calls = iter(range(10**9))
    findings = found(lambda rows, lanes, threads: next(calls))
    assert findings.claim == "bytes"
    assert "repeated" in findings.reasons[0]
