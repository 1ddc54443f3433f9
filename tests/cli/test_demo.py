from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.cli.runner import command, run, run_json
from tests.llm.models import decoder_config, save_model

from forkpoint.cli.demo_worker import COMMIT_EVERY, Work, told

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def _source_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", command([])[1]["PYTHONPATH"])


def check(record: dict[str, object]) -> None:
    assert set(record) == {"same_logits", "same_tokens", "timings", "tokens_before_kill", "tokens_resumed"}
    assert record["same_tokens"] is True
    assert record["same_logits"] is True
    before, resumed = record["tokens_before_kill"], record["tokens_resumed"]
    assert isinstance(before, int)
    assert isinstance(resumed, int)
    assert before >= 24
    assert before + resumed == 64


def test_the_demo_shows_the_main_job_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_CACHE_DIR", str(tmp_path / "cache"))
    config = decoder_config("llama", eos_token_id=None, max_position_embeddings=16_384)
    model = save_model(tmp_path / "model", config)
    check(run_json("demo", "--model", model, "--dtype", "float32", "--keep", tmp_path / "kept"))
    assert [each["name"] for each in run_json("branch", "-C", tmp_path / "kept")["branches"]] == [
        "ada",
        "ivo",
        "lena",
        "main",
        "sentence",
    ]
    assert run("fsck", "-C", tmp_path / "kept").code == 0


def test_the_demo_shows_it_on_a_model_that_would_end_at_any_token(tmp_path: Path) -> None:
    every_second = list(range(1, 320, 2))
    config = decoder_config("llama", eos_token_id=every_second, max_position_embeddings=16_384)
    model = save_model(tmp_path / "model", config)
    check(run_json("demo", "--model", model, "--dtype", "float32"))


def test_a_worker_is_at_most_one_token_ahead_of_its_reader(tmp_path: Path) -> None:
    config = decoder_config("llama", eos_token_id=None)
    model = str(save_model(tmp_path / "model", config))
    run("init", tmp_path / "work")
    run("run", model, "--dtype", "float32", "-p", "the keeper", "-b", "main", "-n", "0", "-C", tmp_path / "work")
    work = Work(folder=tmp_path / "work", name="main", branch="side", count=40, model=model, dtype="float32")
    with work.start() as process:
        heard = told(process)
        assert heard is not None
        tokens = heard[1]
        for _ in range(2 * COMMIT_EVERY):
            next(tokens)
        time.sleep(1)  # time enough to write all, if it did not wait
        process.kill()
    at = {each: run_json("show", each, "-C", tmp_path / "work")["boundary"]["position"] for each in ("main", "side")}
    assert at["side"] - at["main"] == 2 * COMMIT_EVERY


def test_the_demo_says_when_a_worker_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder_config("llama", eos_token_id=None, max_position_embeddings=16_384)
    model = save_model(tmp_path / "model", config)
    monkeypatch.setattr("forkpoint.cli.demo_worker.sys.executable", "false")
    failed = run_json("demo", "--model", model, "--dtype", "float32", code=6)
    assert (failed["error"]["code"], failed["error"]["data"]) == ("corrupt.demo", {"status": 1})


@pytest.mark.full
def test_the_demo_shows_the_main_job_on_the_bundled_model() -> None:
    check(run_json("demo"))
