"""What runs a loaded model, which claims of exactness hold for it here, and why: for people who want to know what they can rely on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forkpoint.llm.engines.base import Exactness
from forkpoint.llm.engines.runtime import TransformersRuntime
from forkpoint.llm.kernels.native import find_native, instruction_set
from forkpoint.state.canonical import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """A loaded model on this machine.

    Attributes:
        exactness: the strongest claim that holds, with reasons.
        executor: ``program`` (one native call a pass) or ``transformers``.
        refusal: why it is not a program, or None.
        kernels: the instruction set of our kernels, or why there are none.
        replaced: how many modules of each kind run on our kernels.
        left: modules that stay the library's, and why.
        are_threads_alike: one and two threads give the same bits, so their number is no part of the execution identity.
        probe: digest of the bits of a fixed run.
        selftest_ms: how long measuring took.
        memory: bytes of weights as packed, of a page, and pages in all.
    """

    model: str
    exactness: Exactness
    executor: str
    refusal: str | None
    kernels: str
    replaced: dict[str, int]
    left: tuple[str, ...]
    lanes: int
    threads: int
    are_threads_alike: bool
    probe: str
    selftest_ms: float
    memory: dict[str, int]

    def to_record(self) -> Record:
        """The report for JSON output."""
        return {
            "are_threads_alike": self.are_threads_alike,
            "claim": self.exactness.claim,
            "executor": self.executor,
            "kernels": self.kernels,
            "lanes": self.lanes,
            "left": list(self.left),
            "memory": dict(self.memory),
            "model": self.model,
            "probe": self.probe,
            "reasons": list(self.exactness.reasons),
            "refusal": self.refusal,
            "replaced": dict(self.replaced),
            "selftest_us": round(self.selftest_ms * 1e3),
            "threads": self.threads,
        }


def describe(runtime: TransformersRuntime) -> EngineReport:
    """The report of a loaded model."""
    refusal, findings, strategy = runtime.plan.refusal, runtime.findings, runtime.strategy
    return EngineReport(
        model=runtime.name,
        exactness=runtime.exactness,
        executor=runtime.plan.executor,
        refusal=None if refusal is None else f"{refusal.why} [{refusal.code}]",
        kernels=instruction_set()
        if find_native()
        else "none: not built, or switched off; torch versions serve, slower",
        replaced=runtime.replacements.counts(),
        left=tuple(f"{name}: {why}" for name, why in runtime.replacements.left.items()),
        lanes=runtime.lanes,
        threads=torch.get_num_threads(),
        are_threads_alike=findings.are_threads_alike,
        probe=findings.probe,
        selftest_ms=findings.elapsed_ms,
        memory={
            "weight_bytes": runtime.weight_bytes,
            "page_bytes": strategy.ledger.pool.page_bytes,
            "pages": strategy.ledger.pool.num_pages,
            "page_tokens": strategy.page_size,
        },
    )
