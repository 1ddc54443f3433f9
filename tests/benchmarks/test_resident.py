"""From rates to rows: what is compared with what, what is a target, what is missed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.model import ModelFacts
from reporting import Report, Row
from resident import LANES, LONG, OURS, PREFIX, QUICK, WIDE, Measurement

TOKEN_BYTES = 2 * 2 * 4 * 2 * 2


class SimulatedEngines:
    """Answers from tables instead of processes."""

    def __init__(self, speeds: Mapping[str, float], *, startable: Sequence[str] = (WIDE,)) -> None:
        self.speeds = dict(speeds)
        self.startable = startable
        self.fork_bytes = 1000.0
        self.sizes = [5 << 20] * QUICK.growth_rounds
        self.late_cost = 1.0

    def start(self, specs: Sequence[Any]) -> dict[str, Any]:
        for spec in specs:
            if spec.name in self.startable:
                self.speeds[spec.name] = self.speeds[OURS]
        return {}

    def end(self, name: str) -> None:
        self.speeds.pop(name, None)

    def ask(self, name: str, do: str, **_arguments: Any) -> Any:
        if do in ("read", "multiply"):
            return {"rate": {"read": 1e9, "multiply": 1e10}[do]}
        if do == "dense":
            return {"invariant": 1.05, "library": 1.0}
        if do == "fork":
            return {"seconds": 5e-6, "bytes": self.fork_bytes, "stats": [{"pages_held": 10}, {"pages_held": 10}]}
        return {"bytes": self.sizes}

    def rates(self, names: Sequence[str], _rounds: int, do: str, **arguments: Any) -> dict[str, float]:
        context, lanes = arguments["context"], arguments.get("lanes", 1)
        slowness = 1.0 if do == "prefill" else 1 + context / 100_000
        if context == LONG:
            slowness += (self.late_cost - 1) * (LONG - 512) / 2 / 100_000
        return {name: self.speeds[name] * lanes / slowness for name in names if name in self.speeds}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 10}
    tensors = {
        "model.embed_tokens.weight": [10, 8],
        "model.layers.0.q": [8, 8],
        "model.layers.1.q": [8, 8],
        "model.layers.1.norm": [8],
    }
    head, offset = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps({"__metadata__": {"format": "pt"}, **head}).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(offset))
    return tmp_path


def measured(folder: Path, engines: SimulatedEngines) -> dict[str, Row]:
    report = Report()
    described = {"folder": str(folder), "token_bytes": TOKEN_BYTES, "load_bytes": 450, "own_bytes": 1 << 20}
    Measurement(report, engines, described, QUICK, 2).run()  # type: ignore[arg-type]
    return {row.name: row for row in report.rows}


def test_a_step_reads_the_weights_once_and_a_prompt_multiplies_every_layer(folder: Path) -> None:
    facts = ModelFacts.read(str(folder), TOKEN_BYTES)
    assert facts.weight_bytes == 2 * (80 + 64 + 64 + 8)
    assert facts.step_bytes(3) == facts.weight_bytes + 3 * TOKEN_BYTES
    assert facts.prefill_operations(2) == 2 * 128 * 2 + 4 * 16 * 3 + 2 * 80


def test_the_best_peer_is_what_we_are_compared_with(folder: Path) -> None:
    rows = measured(folder, SimulatedEngines({OURS: 30.0, "vllm": 10.0, "openvino": 20.0, "transformers": 2.0}))
    assert rows[f"{LANES} forks of {PREFIX:,} against the best peer (openvino)"].value == pytest.approx(1.5)
    assert rows[f"{LANES} forks of {PREFIX:,} against the best peer (openvino)"].holds
    assert rows[f"{LANES} forks of {PREFIX:,} against transformers"].value == pytest.approx(15)
    assert rows["prefill of 512: vllm"].value == 10.0
    assert rows["prefill of 512: vllm"].holds is None


def test_a_rate_below_its_target_is_missed(folder: Path) -> None:
    rows = measured(folder, SimulatedEngines({OURS: 10.0, "vllm": 10.1}))
    assert rows["one lane at 512 against the best peer (vllm)"].holds is False
    assert rows[f"{LANES} unrelated lanes at 512 against the best peer (vllm)"].holds is False


def test_without_peers_nothing_is_compared_with_them(folder: Path) -> None:
    rows = measured(folder, SimulatedEngines({OURS: 10.0}))
    assert not [name for name in rows if "peer" in name or "transformers" in name]
    assert rows[f"{LANES} forks of {PREFIX:,} against a prefix of 16"].holds


def test_forks_that_take_memory_and_steps_that_leave_some_are_missed(folder: Path) -> None:
    engines = SimulatedEngines({OURS: 10.0})
    engines.fork_bytes = 3000.0
    engines.sizes[-1] += 2 << 20
    missed = {name for name, row in measured(folder, engines).items() if row.holds is False}
    assert "1,000 unwritten forks: memory of each" in missed
    assert any(name.startswith("growth over") for name in missed)


@pytest.mark.parametrize(("late_cost", "holds"), [(1.0, True), (1.5, False)])
def test_a_step_whose_cost_grows_faster_than_its_context_is_missed(folder: Path, late_cost: float, holds: bool) -> None:
    engines = SimulatedEngines({OURS: 10.0})
    engines.late_cost = late_cost
    (row,) = (row for name, row in measured(folder, engines).items() if name.startswith("a token's cost beyond"))
    assert row.holds is holds


def test_a_figure_that_could_not_be_measured_is_null_and_misses_its_target(tmp_path: Path) -> None:
    report = Report()
    report.unmeasured("vllm", "not installed")
    report.write(tmp_path / "fine.json")
    report.unmeasured("forkpoint", "ended", target="is measured")
    with pytest.raises(SystemExit) as exit_of:
        report.write(tmp_path / "rows.json")
    assert exit_of.value.code == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["value"], row["holds"]) for row in rows] == [(None, None), (None, False)]
