"""Resident execution against what people use on CPUs today.

``python benchmarks/resident.py [--quick] [--json FILE] [--no-peers] [--threads 2]``

SmolLM2-135M in bfloat16. Every engine runs in a process of its own, asked in turn and stopped otherwise; medians over rounds.
``benchmarks/peers/setup`` installs the peers; docs/BENCHMARKS.md says what each row means.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.engines import OURS, PEERS, Engines, limits, ours, peers
from peers.model import ModelFacts
from reporting import Report, arguments

PREFIX = 2048
SHORT_PREFIX = 16
CONTEXT = 512
LANES = 8
MANY_LANES = 32
POOL_BYTES = 1 << 30
LONG = 8128
"""The model's limit is 8,192; the steps need room."""

WIDE = "forkpoint, 32 lanes"

Rates = Mapping[str, float]
"""Tokens a second by engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. ``many`` are the peers that run 32 forks too; that row's target is against our own eight."""

    rounds: int
    steps: int
    growth_rounds: int
    growth_steps: int
    many: tuple[str, ...]


FULL = Effort(rounds=7, steps=32, growth_rounds=50, growth_steps=200, many=PEERS[:4])
QUICK = Effort(rounds=2, steps=12, growth_rounds=6, growth_steps=30, many=())


def main() -> None:
    """Measure and report."""
    options = arguments(
        "Forkpoint: resident execution",
        lambda parser: parser.add_argument("--threads", type=int, default=2, help="threads of every engine"),
    )
    report = Report()

    def note(engine: str, why: str) -> None:
        report.unmeasured(engine, why, target="is measured" if engine == OURS else None)

    with Engines(note) as engines:
        own = ours(OURS, options.threads, dtype="bfloat16", cache="paged", lanes=LANES, pool_bytes=POOL_BYTES)
        others = [] if options.no_peers else peers(options.threads)
        facts = engines.start([own, limits(options.threads), *others])
        if OURS in facts:
            Measurement(report, engines, facts[OURS], QUICK if options.quick else FULL, options.threads).run()
        report.add("cores used by other processes meanwhile", engines.contention.cores, "cores")
    report.write(options.json)


class Measurement:
    """The rows, in the order in which they are measured."""

    def __init__(
        self, report: Report, engines: Engines, described: Mapping[str, Any], effort: Effort, threads: int
    ) -> None:
        self._report = report
        self._engines = engines
        self._described = described
        self._facts = ModelFacts.read(described["folder"], described["token_bytes"])
        self._effort = effort
        self._threads = threads
        self._bandwidth = 0.0
        self._products = 0.0

    def run(self) -> None:
        """Everything."""
        self.machine()
        for context in (CONTEXT, PREFIX):
            self.prefill(context)
        forks = self.forks()
        self.lanes()
        for context in (CONTEXT, PREFIX):
            self.alone(context)
        self.context_growth()
        self.many_forks(forks)
        self.fork()
        self.claim()
        self.memory()

    def machine(self) -> None:
        """What the machine can do at most, in this run."""
        for _ in range(self._effort.rounds):
            self._look_again()
        self._report.add("this machine: reading memory", self._bandwidth / 1e9, "GB/s")
        self._report.add("this machine: bfloat16 matrix product", self._products / 1e9, "GFLOP/s")

    def _look_again(self) -> None:
        """Measure the limits once more: the best that was ever seen is the limit."""
        self._bandwidth = max(self._bandwidth, self._rate("read"))
        self._products = max(self._products, self._rate("multiply"))

    def _rate(self, do: str) -> float:
        answer = self._engines.ask("limits", do)
        return 0.0 if answer is None else float(answer["rate"])

    # ---- against the peers ----

    def prefill(self, context: int) -> None:
        """A prompt to its first token, alone."""
        name = f"prefill of {context:,}"
        rates = self._engines.rates([OURS, *PEERS], self._effort.rounds, "prefill", context=context)
        self._compare(name, rates, at_least=1.0)
        self._look_again()
        if OURS in rates and self._products:
            seconds = self._facts.prefill_operations(context) / self._products
            self._report.add(f"{name}: share of the matrix limit", seconds * rates[OURS] / context, "x")

    def forks(self) -> Rates:
        """Eight forks of one long prefix, and of a short one."""
        name = f"{LANES} forks of {PREFIX:,}"
        rates = self._decode([OURS, *PEERS], LANES, PREFIX, is_shared=True)
        self._compare(name, rates, at_least=1.5, over_transformers=6)
        self._limit(name, rates, lanes=LANES, tokens=PREFIX)
        by_prefix = self._by_context(LANES, (PREFIX, SHORT_PREFIX))
        if by_prefix:
            ratio = by_prefix[PREFIX] / by_prefix[SHORT_PREFIX]
            self._report.add(f"{name} against a prefix of {SHORT_PREFIX}", ratio, "x", at_least=0.8)
            self._attention_limit(name, LANES / by_prefix[SHORT_PREFIX])
        return rates

    def _attention_limit(self, name: str, short: float) -> None:
        """What that ratio would be if attention ran at the measured rate of products, beside a step of ``short`` seconds."""
        if self._products:
            least = self._facts.attention_operations(LANES, PREFIX - SHORT_PREFIX) / self._products
            name = f"{name} against a prefix of {SHORT_PREFIX}: the matrix limit"
            self._report.add(name, short / (short + least), "x")

    def lanes(self) -> None:
        """Eight lanes that share nothing."""
        name = f"{LANES} unrelated lanes at {CONTEXT}"
        rates = self._decode([OURS, *PEERS], LANES, CONTEXT, is_shared=False)
        self._compare(name, rates, at_least=1.2)
        self._limit(name, rates, lanes=LANES, tokens=LANES * CONTEXT)

    def alone(self, context: int) -> None:
        """One lane."""
        name = f"one lane at {context:,}"
        rates = self._decode([OURS, *PEERS], 1, context, is_shared=True)
        self._compare(name, rates, at_least=1.0)
        self._limit(name, rates, lanes=1, tokens=context)

    def _decode(
        self, names: Sequence[str], lanes: int, context: int, *, is_shared: bool, rounds: int | None = None
    ) -> Rates:
        return self._engines.rates(
            names, rounds or self._effort.rounds, "decode",
            lanes=lanes, context=context, is_shared=is_shared, steps=self._effort.steps,
        )  # fmt: skip

    def _compare(self, name: str, rates: Rates, *, at_least: float, over_transformers: float | None = None) -> None:
        """Every engine's rate, and ours over the best of the others."""
        for engine, rate in rates.items():
            self._report.add(f"{name}: {engine}", rate, "tok/s")
        others = {engine: rate for engine, rate in rates.items() if engine != OURS}
        if not others or OURS not in rates:
            return
        best = max(others, key=others.__getitem__)
        self._report.add(f"{name} against the best peer ({best})", rates[OURS] / others[best], "x", at_least=at_least)
        if over_transformers is not None and "transformers" in others:
            ratio = rates[OURS] / others["transformers"]
            self._report.add(f"{name} against transformers", ratio, "x", at_least=over_transformers)

    def _limit(self, name: str, rates: Rates, *, lanes: int, tokens: int) -> None:
        """How near a step is to only reading what it must: the weights once, and each distinct token's keys and values once."""
        self._look_again()
        if OURS in rates and self._bandwidth:
            seconds = self._facts.step_bytes(tokens) / self._bandwidth
            self._report.add(f"{name}: share of the memory limit", seconds * rates[OURS] / lanes, "x")

    # ---- Forkpoint alone ----

    def context_growth(self) -> None:
        """A step of one lane against its context. Faster than the bytes: a later token costs more than an earlier one."""
        middle = (CONTEXT + LONG) // 2
        rates = self._by_context(1, (CONTEXT, middle, LONG))
        if not rates:
            return
        seconds = {context: 1 / rate for context, rate in rates.items()}
        for context, step in seconds.items():
            self._report.add(f"step of one lane at {context:,}", step * 1e3, "ms")
        early, late = seconds[middle] - seconds[CONTEXT], seconds[LONG] - seconds[middle]
        moved = self._facts.token_bytes * (LONG - CONTEXT)
        self._report.add(
            "keys and values read in the time that a longer context adds", moved / (early + late) / 1e9, "GB/s"
        )
        self._report.add(f"a token's cost beyond {middle:,} over one's before", late / early, "x", at_most=1.1)

    def _by_context(self, lanes: int, contexts: Sequence[int]) -> dict[int, float]:
        """Our median rate at each context, measured in turn; empty where we failed."""
        samples: dict[int, list[float]] = {context: [] for context in contexts}
        for _ in range(self._effort.rounds):
            for context in contexts:
                rates = self._decode([OURS], lanes, context, is_shared=True, rounds=1)
                if OURS not in rates:
                    return {}
                samples[context].append(rates[OURS])
        return {context: statistics.median(values) for context, values in samples.items()}

    def many_forks(self, eight: Rates) -> None:
        """Thirty-two forks in one plan, against eight."""
        self._engines.start([ours(WIDE, self._threads, dtype="bfloat16", cache="paged", lanes=MANY_LANES)])
        rates = self._decode([WIDE, *self._effort.many], MANY_LANES, PREFIX, is_shared=True)
        for engine, rate in rates.items():
            self._report.add(f"{MANY_LANES} forks of {PREFIX:,}: {engine}", rate, "tok/s")
        if WIDE in rates and OURS in eight:
            ratio = rates[WIDE] / eight[OURS]
            self._report.add(f"{MANY_LANES} forks against {LANES}", ratio, "x", at_least=1.0)
        self._engines.end(WIDE)

    def fork(self) -> None:
        """A fork, and a thousand that are never written to."""
        found = self._engines.ask(OURS, "fork", context=PREFIX, count=1000)
        if found is not None:
            self._report.add(f"fork of {PREFIX:,} tokens", found["seconds"] * 1e6, "us", at_most=100)
            self._report.add("1,000 unwritten forks: memory of each", found["bytes"] / 1024, "KiB", at_most=2)
            before, after = found["stats"]
            held = after["pages_held"] - before["pages_held"]
            self._report.add("1,000 unwritten forks: pages copied", held, "pages", at_most=0)

    def claim(self) -> None:
        """What the third claim costs where it costs anything: the dense layers of a step in one order, and in a library's own."""
        for rows in (1, LANES, 256):
            found = self._engines.ask("limits", "dense", shapes=self._facts.dense_shapes, rows=rows)
            if found is not None:
                cost = found["invariant"] / found["library"] - 1
                self._report.add(f"claim 3 costs, dense layers of {rows} rows", 100 * cost, "%", at_most=10)

    def memory(self) -> None:
        """Weights once, and no growth."""
        loaded = self._described["load_bytes"] / self._facts.weight_bytes
        self._report.add("memory that loading takes over one copy of the weights", loaded, "x", at_most=1.5)
        rounds, steps = self._effort.growth_rounds, self._effort.growth_steps
        found = self._engines.ask(OURS, "growth", lanes=LANES, context=CONTEXT, rounds=rounds, steps=steps)
        if found is not None:
            first, last = found["bytes"][len(found["bytes"]) // 5], found["bytes"][-1]
            name = f"growth over {rounds * steps:,} steps of {LANES} lanes, forked and freed"
            self._report.add(name, (last - first) / 2**20, "MiB", at_most=1)
            taken = (last - self._described["own_bytes"]) / POOL_BYTES
            self._report.add("memory taken since loading over the pool's budget", taken, "x", at_most=1)


if __name__ == "__main__":
    main()
