from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.runner import command, run, run_json
from tests.llm.models import decoder_config, save_model

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


@pytest.mark.full
def test_the_demo_shows_the_main_job_on_the_bundled_model() -> None:
    check(run_json("demo"))
