"""Across processes: what one commits, another continues, bit for bit, however the first one ended."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.llm.models import decoder_config, load, save_model, some_tokens
from tests.llm.processes import run

from forkpoint.llm import Continuation, DecodeSession, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)
BUSY = Sampling(
    temperature=0.8, seed=11, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias=ENDLESS
)
DTYPES = ("float32", "bfloat16", "float16")
CASES = [(name, dtype, count) for name in ("llama", "gemma2", "gpt_oss") for dtype in DTYPES for count in (1, 3, 70)]
CUTS = 14


def digest(logits: Any) -> str:
    return hashlib.sha256(logits.tobytes()).hexdigest()


# -- append and decode elsewhere --------------------------------------------------------------------------------------

APPEND = """
out = []
with Repository.open(given["repository"]) as repository:
    engines = {}
    for name, dtype, count in given["cases"]:
        key = (name, dtype)
        if key not in engines:
            engines[key] = load(given["folders"][name], Path(given["cache"]), dtype=dtype)
        engine = engines[key]
        with counted_rows(engine) as rows:
            value = engine.checkout(repository, f"{name}-{dtype}")
            opened, id = list(rows), value.id
            longer = value.extend(some_tokens(count, seed=count))
            appended = rows[len(opened):]
        steps = [digest(item.logits) for item in longer.stream(5) if item.logits is not None]
        out.append({
            "opened": opened, "appended": appended,
            "least": min_rows(engine), "id": id, "after": longer.id, "logits": digest(longer.logits()), "steps": steps,
            "computed": longer.receipt.tokens_computed, "restored": value.receipt.tokens_restored,
        })
say(out)
"""


@pytest.fixture(scope="module")
def elsewhere(
    engines: Callable[..., TransformersEngine],
    folders: Callable[[str], Path],
    model_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str, int], tuple[Continuation, dict[str, Any]]]:
    """For each case the uninterrupted value, and what another process made of it."""
    root, values = tmp_path_factory.mktemp("elsewhere"), {}
    with Repository.create(root) as repository:
        for name, dtype, _ in CASES:
            if (name, dtype) not in values:
                values[name, dtype] = engines(name, dtype).start(some_tokens(300))
                values[name, dtype].commit(repository, f"{name}-{dtype}")
    given = {
        "repository": str(root),
        "cache": str(model_cache),
        "cases": CASES,
        "folders": {name: str(folders(name)) for name, _, _ in CASES},
    }
    found = run(APPEND, given, PYTHONHASHSEED="7")
    return {case: (values[case[:2]], result) for case, result in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_appending_k_tokens_in_another_process_forwards_k_and_equals_never_having_stopped(
    elsewhere: dict[tuple[str, str, int], tuple[Continuation, dict[str, Any]]], case: tuple[str, str, int]
) -> None:
    value, found = elsewhere[case]
    count = case[2]
    assert found["opened"] == []
    assert found["appended"] == [max(found["least"], count)]
    assert (found["computed"], found["restored"]) == (count, 299)
    longer = value.extend(some_tokens(count, seed=count))
    assert found["logits"] == digest(longer.logits())
    assert found["steps"] == [digest(item.logits) for item in longer.stream(5) if item.logits is not None]
    assert found["id"] == value.id


# -- killed in between ------------------------------------------------------------------------------------------------

COMMIT = """
engine = load(given["model"], Path(given["cache"]))
with Repository.open(given["repository"]) as repository:
    value = engine.start(some_tokens(600), sampling=Sampling(temperature=0.5, seed=3))
    value.commit(repository, "main")
    longer = value.generate(4)
    longer.commit(repository, "main")
    say([value.id, longer.id])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ids_and_objects_survive_sigkill_and_another_hash_seed(
    engine: TransformersEngine, folders: Callable[[str], Path], model_cache: Path, tmp_path: Path
) -> None:
    Repository.create(tmp_path).close()
    given = {"model": str(folders("llama")), "cache": str(model_cache), "repository": str(tmp_path)}
    ids = run(COMMIT, given, expect=-signal.SIGKILL, PYTHONHASHSEED="1")
    with Repository.open(tmp_path) as repo:
        assert [repo.resolve("main~1"), repo.resolve("main")] == ids
        assert [finding for finding in repo.check() if finding.severity == "error"] == []
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
        value = engine.start(some_tokens(600), sampling=Sampling(temperature=0.5, seed=3))
        assert value.id == ids[0]
        assert value.commit(repo, "again").chunks_written == 0
        assert value.generate(4).id == ids[1]
        assert engine.checkout(repo, "main").id == ids[1]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


# -- stopped in mid-generation ----------------------------------------------------------------------------------------

RESUME = """
engine = load(given["model"], Path(given["cache"]), dtype=given["dtype"])
out = []
with Repository.open(given["repository"]) as repository:
    for cut in range(given["cuts"] + 1):
        done = engine.checkout(repository, f"cut{cut}").generate(given["cuts"] - cut)
        whole = engine.restore(Path(given["snapshots"], str(cut)).read_bytes()).generate(40)
        out.append([done.tokens, done.completion.text, whole.tokens, whole.completion.finish_reason])
say(out)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_generation_stopped_anywhere_and_resumed_elsewhere_equals_an_uninterrupted_one(
    engines: Callable[..., TransformersEngine],
    folders: Callable[[str], Path],
    model_cache: Path,
    tmp_path: Path,
    dtype: str,
) -> None:
    engine = engines("llama", dtype)
    prompt = engine.start(some_tokens(250))
    free = prompt.generate(40, sampling=BUSY)
    stop = _straddling_text(engine, free, CUTS - 2, CUTS + 3)
    sampling = Sampling(**{**_fields(BUSY), "stop": (stop,)})
    value = prompt.with_sampling(sampling)
    limited, whole = value.generate(CUTS), value.generate(40)
    assert limited.completion is not None
    assert whole.completion is not None
    assert whole.completion.finish_reason == "stop"
    assert len(whole.completion.choices) > CUTS
    parts = [value.generate(cut) for cut in range(CUTS + 1)]
    with Repository.create(tmp_path) as repo:
        for cut, part in enumerate(parts):
            part.commit(repo, f"cut{cut}")
            (tmp_path / str(cut)).write_bytes(part.snapshot())
    given = {
        "model": str(folders("llama")),
        "cache": str(model_cache),
        "dtype": dtype,
        "repository": str(tmp_path),
        "snapshots": str(tmp_path),
        "cuts": CUTS,
    }
    for part, (tokens, text, to_stop, reason) in zip(parts, run(RESUME, given), strict=True):
        assert tuple(tokens) == limited.tokens
        assert part.completion is not None
        assert part.completion.text + text == limited.completion.text
        assert (tuple(to_stop), reason) == (whole.tokens, "stop")


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}


def _straddling_text(engine: TransformersEngine, value: Continuation, first: int, last: int) -> str:
    """Text of the generated tokens from the first to the last given, of which no part may come earlier."""
    assert value.completion is not None
    tokens = [choice.token for choice in value.completion.choices]
    before, upto = engine.decode(tokens[:first]), engine.decode(tokens[:last])
    text = upto[len(before.rstrip("\ufffd")) :].strip("\ufffd")
    assert len(text) >= 2
    assert text not in before
    return text


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import gc, resource
engine = load(given["model"], Path(given["cache"]))
with Repository.open(given["repository"]) as repository:
    engine.checkout(repository, "small")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    def field(name):
        return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
    before = field("VmRSS")
    value = engine.checkout(repository, "large")
    say([before, field("VmHWM"), value.state_bytes])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's peak of resident memory")  # noqa: PTH110
def test_a_restore_peaks_at_its_state_and_little_more(tmp_path: Path, model_cache: Path) -> None:
    folder = save_model(
        tmp_path / "wide", decoder_config("llama", num_key_value_heads=4, head_dim=96, max_position_embeddings=8192)
    )
    engine = load(folder, model_cache)
    runtime = engine._open()
    tokens = some_tokens(5632)
    reservation = runtime.strategy.empty().reserve(len(tokens))
    for tensor in runtime.strategy.pages:
        tensor[torch.from_numpy(reservation.tables[0]).long()] = torch.randn(
            len(reservation.tables[0]), *tensor.shape[1:]
        )
    session = DecodeSession(runtime, reservation.commit(), tokens)
    with Repository.create(tmp_path) as repo:
        engine.start(some_tokens(300)).commit(repo, "small")
        session.continuation(5).commit(repo, "large")
    given = {"model": str(folder), "cache": str(model_cache), "repository": str(tmp_path)}
    before, peak, state = run(MEASURE, given)
    assert state > 50e6
    assert peak - before < 1.6 * state
    assert peak - before > 0.9 * state  # so that it is the state that was measured
