"""The command ``doctor``: what runs a model on this machine, and which claims of exactness hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from forkpoint.cli.engine import Dtype, Model, Threads, TrustCode, load
from forkpoint.cli.output import AsJson, counted, print_json, print_lines, printable, shown_bytes

if TYPE_CHECKING:
    from forkpoint.llm.engines.doctor import EngineReport


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(doctor)


def doctor(
    model: Model,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    trust_remote_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs a model here, and which claims of exactness hold.

    JSON: model, claim, reasons, executor, refusal, kernels, replaced, left, lanes, threads, are_threads_alike, probe, selftest_us,
    memory (weight_bytes, page_bytes, pages, page_tokens).
    """
    with load(model, dtype, threads, trust_remote_code) as engine:
        report = engine.report()
    if as_json:
        print_json(report.to_record())
        return
    print_lines(_lines(report))


def _lines(report: EngineReport) -> Iterator[str]:
    yield f"Model:     {printable(report.model)}"
    yield f"Claim:     {report.exactness.claim}"
    for reason in report.exactness.reasons:
        yield f"           {printable(reason)}"
    yield f"Runs as:   {_EXECUTORS[report.executor]}"
    if report.refusal is not None:
        yield f"           no native program: {printable(report.refusal)}"
    yield f"Kernels:   {report.kernels}"
    replaced = ", ".join(f"{count} {name}" for name, count in sorted(report.replaced.items()))
    yield f"Replaced:  {replaced or 'nothing'}"
    for why in report.left:
        yield f"Left:      {printable(why)}"
    alike = "one and two give the same bits" if report.are_threads_alike else "their number changes bits"
    yield f"Threads:   {report.threads}; {alike}"
    yield f"Lanes:     {report.lanes}"
    memory = report.memory
    pool = f"up to {counted(memory['pages'], 'page')} of {memory['page_tokens']} tokens, {shown_bytes(memory['page_bytes'])} each"
    yield f"Memory:    weights {shown_bytes(memory['weight_bytes'])}; {pool}"
    yield f"Self-test: {report.selftest_ms:.0f} ms, probe {report.probe[:15]}"


_EXECUTORS = {"program": "one native call a pass", "transformers": "transformers' own code, operation by operation"}
