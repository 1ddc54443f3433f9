"""``doctor``: what runs a model here, which claims hold, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.runner import run, run_json, run_process
from tests.llm.models import ARCHITECTURES, decoder_config, save_model

from forkpoint.llm.engines import runtime, selftest
from forkpoint.llm.engines.selftest import Findings, Passes
from forkpoint.llm.kernels.native import instruction_set

pytestmark = pytest.mark.model
FLAGS = ("--dtype", "float32", "--threads", "1")
FIELDS = {
    "are_threads_alike", "claim", "executor", "kernels", "lanes", "left", "memory", "model", "probe", "reasons", "refusal",
    "replaced", "selftest_us", "threads",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), decoder_config("llama")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_CACHE_DIR", str(tmp_path / "cache"))


def test_it_tells_claim_executor_kernels_and_memory(model: str) -> None:
    record = run_json("doctor", model, *FLAGS)
    assert set(record) == FIELDS
    assert (record["model"], record["claim"], record["executor"], record["refusal"]) == (
        model,
        "invariance",
        "program",
        None,
    )
    assert (record["kernels"], record["lanes"], record["threads"]) == (instruction_set(), 8, 1)
    assert record["replaced"] == {"PackedLinear": 22, "RowActivation": 3, "RowRMSNorm": 7}
    assert record["left"] == []
    assert record["memory"]["page_bytes"] == 16 * 3 * 2 * 32 * 4
    assert record["memory"]["weight_bytes"] > 4 * 320 * 64
    assert record["memory"]["page_tokens"] == 16
    assert record["probe"].startswith("b3:")


def test_what_was_measured_is_kept_for_the_next_time(model: str) -> None:
    first, second = run_json("doctor", model, *FLAGS), run_json("doctor", model, *FLAGS)
    assert first["selftest_us"] > 0
    first["memory"]["pages"] = second["memory"]["pages"]  # a share of what is free
    assert second == first | {"selftest_us": 0}


def test_it_prints_the_same_for_people(model: str) -> None:
    told = run("doctor", model, *FLAGS)
    assert told.code == 0
    lines = told.out.splitlines()
    assert lines[1] == "Claim:     invariance"
    assert "at once, in pieces, one by one, beside others" in lines[2]
    assert "Runs as:   one native call a pass" in lines
    assert any(line.startswith("Kernels:   ") for line in lines)
    assert any("one and two give the same bits" in line for line in lines)
    assert lines[-1].startswith("Self-test: ")


def test_it_says_why_a_model_is_no_native_program(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "mixtral", ARCHITECTURES["mixtral"]())
    record = run_json("doctor", str(folder), *FLAGS)
    assert record["executor"] == "transformers"
    assert record["refusal"].endswith("]")
    assert record["replaced"]["experts"] == 3
    assert any("gate" in why for why in record["left"])
    told = run("doctor", str(folder), *FLAGS).out
    assert "Runs as:   transformers' own code, operation by operation\n" in told
    assert f"no native program: {record['refusal']}\n" in told


def test_it_says_what_does_not_hold_and_by_what(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(passes: Passes, max_tokens: int) -> Findings:
        found = selftest.measure(passes, max_tokens)
        return replace(found, differing=("beside other lanes",), are_threads_alike=False)

    monkeypatch.setattr(runtime, "measure", find)
    record = run_json("doctor", model, *FLAGS)
    assert (record["claim"], record["lanes"], record["are_threads_alike"]) == ("continuation", 1, False)
    assert "other bits beside other lanes" in record["reasons"][1]
    told = run("doctor", model, *FLAGS).out
    assert "Claim:     continuation\n" in told
    assert "their number changes bits" in told


def test_without_compiled_kernels_it_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_KERNELS", "torch")
    told = run_process("doctor", model, *FLAGS)
    assert told.code == 0, told
    assert "Kernels:   none: not built, or switched off" in told.out
    assert "no native program: " in told.out


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("nowhere",), 3, "not_found.model"),
        (("MODEL", "--dtype", "int8"), 2, "invalid_input.dtype"),
        (("MODEL", "--threads", "0"), 2, "invalid_input.usage"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_with_a_code(
    model: str, arguments: tuple[Any, ...], code: int, error: str
) -> None:
    given = [
        str(Path.cwd() / "nowhere") if each == "nowhere" else model if each == "MODEL" else each for each in arguments
    ]
    assert run_json("doctor", *given, code=code)["error"]["code"] == error
