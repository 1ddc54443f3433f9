"""Which claims of exactness hold for a loaded model on this machine: measured at load, by running the same tokens in different ways.

The first run is the *probe*: its bits are part of the execution identity. Every other run computes the same tokens otherwise; where all
give the bits of the probe, results do not depend on how, beside what and on how many threads they were computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol, final

from forkpoint.errors import CapacityExceeded, Error
from forkpoint.ids import ObjectId, digest_of, parse_object_id
from forkpoint.llm.engines.base import Logits
from forkpoint.llm.engines.cached import put_text
from forkpoint.llm.resident.base import GroupSpec, State, Strategy
from forkpoint.llm.resident.plan import DecodePlan
from forkpoint.state.canonical import Record, canonical_bytes
from forkpoint.state.prefix import CHUNK_TOKENS

_PROMPT_TOKENS: Final = CHUNK_TOKENS + 8
_DECODED_TOKENS: Final = 3
_THREADS: Final = (1, 2)
_COMPANY: Final = (5, 1, 17)
"""Lengths of neighbours in the run in company."""


class Passes(Protocol):
    """What a self-test needs of a runtime."""

    vocabulary: int
    groups: tuple[GroupSpec, ...]
    plan: DecodePlan

    @property
    def strategy(self) -> Strategy:
        """Makes the states."""
        ...

    def run(
        self, lanes: Sequence[tuple[State, Sequence[int]]], *, output: str, threads: int | None = None
    ) -> tuple[list[State], Logits]:
        """One pass; see ``TransformersRuntime.run``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was measured.

    Attributes:
        probe: digest of the logits, keys and values of the fixed run.
        repeats: the fixed run gave the same bits twice.
        differing: which other ways of computing the same tokens gave other bits, in words.
        are_threads_alike: one and two threads give the same bits.
        elapsed_ms: how long measuring took; 0 where it was known from an earlier load.
    """

    probe: ObjectId
    repeats: bool
    differing: tuple[str, ...]
    are_threads_alike: bool
    elapsed_ms: float

    @property
    def is_invariant(self) -> bool:
        """Whether claim 3 holds."""
        return self.repeats and not self.differing

    @property
    def claim(self) -> str:
        """The strongest claim that holds."""
        return "invariance" if self.is_invariant else "continuation" if self.repeats else "bytes"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in sentences."""
        if not self.repeats:
            return (
                "a fixed run gave other bits when it was repeated: this machine or build does not compute deterministically",
            )
        if self.differing:
            return (
                "a fixed run repeats bit for bit: restored and forked state goes on as if it had never stopped",
                *(f"the same tokens gave other bits {way}" for way in self.differing),
            )
        return (
            "the same tokens gave the same keys, values and logits at once, in pieces, one by one, beside others"
            + (" and on one and two threads" if self.are_threads_alike else ""),
        )


@final
class FindingsCache:
    """Findings by everything that decides them, so that the next load of the same model on the same machine need not measure again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: Record) -> Findings | None:
        """What was found under a key, or None; a file that cannot be read is as good as none."""
        try:
            stored = json.loads(self._path(key).read_text())
            return Findings(
                probe=parse_object_id(stored["probe"]),
                repeats=bool(stored["repeats"]),
                differing=tuple(map(str, stored["differing"])),
                are_threads_alike=bool(stored["are_threads_alike"]),
                elapsed_ms=0.0,
            )
        except (OSError, ValueError, KeyError, TypeError, Error):
            return None

    def put(self, key: Record, findings: Findings) -> None:
        """Remember findings."""
        stored = {name: getattr(findings, name) for name in ("probe", "repeats", "differing", "are_threads_alike")}
        put_text(self._path(key), json.dumps(stored))

    def _path(self, key: Record) -> Path:
        return self._folder / digest_of([canonical_bytes(key)]).removeprefix("b3:")


def measure(passes: Passes, max_tokens: int) -> Findings:
    """Run the probe and its variation, in at most ``max_tokens`` tokens of context; where they differ, find out by what."""
    started = perf_counter()
    count = min(_PROMPT_TOKENS + _DECODED_TOKENS, max_tokens)
    tokens = [1 + (index * 7919) % (passes.vocabulary - 1) for index in range(count)]
    plain, otherwise = _one_by_one_at_the_end(count), _in_odd_pieces(count)
    company = _company(passes, max_tokens)
    probe = _digest(passes, tokens, plain)
    own = _digest(passes, tokens, plain, threads=1), _digest(passes, tokens, otherwise, threads=2, company=company)
    if own == (probe, probe):
        differing: list[str] = []
        repeats = are_threads_alike = True
    else:
        repeats = _digest(passes, tokens, plain) == probe
        are_threads_alike = all(_digest(passes, tokens, plain, threads=each) == probe for each in _THREADS)
        ways = {"in other pieces": (otherwise, None), "beside other lanes": (plain, company)}
        differing = [
            way for way, (ends, others) in ways.items() if _digest(passes, tokens, ends, company=others) != probe
        ]
    return Findings(
        probe=probe,
        repeats=repeats,
        differing=tuple(differing),
        are_threads_alike=are_threads_alike,
        elapsed_ms=(perf_counter() - started) * 1e3,
    )


def _one_by_one_at_the_end(count: int) -> list[int]:
    """Where passes end: whole chunks and a rest, then the last tokens one at a time."""
    prompt = max(1, count - _DECODED_TOKENS)
    return [*range(CHUNK_TOKENS, prompt, CHUNK_TOKENS), *range(prompt, count + 1)]


def _in_odd_pieces(count: int) -> list[int]:
    """Some tokens alone, then pieces of no particular size, across the end of a chunk too."""
    return [*(end for end in (1, 2, 5, 12, 29, 61, 190) if end < count), count]


def _company(passes: Passes, room: int) -> Callable[[], list[tuple[State, list[int]]]]:
    def make() -> list[tuple[State, list[int]]]:
        lengths = [min(length, room) for length in _COMPANY][: passes.plan.lanes - 1]
        return [
            (passes.strategy.empty(), [(length * 31 + place * 7) % passes.vocabulary for place in range(length)])
            for length in lengths
        ]

    return make


def _digest(
    passes: Passes,
    tokens: Sequence[int],
    ends: Sequence[int],
    *,
    threads: int | None = None,
    company: Callable[[], list[tuple[State, list[int]]]] | None = None,
) -> ObjectId:
    """Digest of keys and values of all tokens, and of the last token's logits, computed in passes that end at ``ends``."""
    state, start, logits = passes.strategy.empty(), 0, None
    for end in ends:
        others = [] if company is None else company()
        state, logits = _advance(passes, state, list(tokens[start:end]), others, threads)
        start = end
    assert logits is not None
    parts: list[bytes | bytearray | memoryview] = [logits.tobytes()]
    for group in range(len(passes.groups)):
        keys, values = state.slab_pieces(group, 0, state.length)
        parts.extend((*keys, *values))
    return digest_of(parts)


def _advance(
    passes: Passes, state: State, tokens: list[int], others: list[tuple[State, list[int]]], threads: int | None
) -> tuple[State, Logits]:
    """One pass beside ``others``, as many of them as memory holds at the same time."""
    while True:
        lanes = [*others[:1], (state, tokens), *others[1:]]
        try:
            states, rows = passes.run(lanes, output="last", threads=threads)
        except CapacityExceeded:
            if not others:
                raise
            others.pop()
        else:
            place = len(others[:1])
            return states[place], rows[place]
