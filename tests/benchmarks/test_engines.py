"""Engines in processes of their own: asked in turn, stopped otherwise, dropped when they fail."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers import process
from peers.contention import Contention, session_seconds
from peers.engines import Engines
from peers.process import EngineFailed, EngineProcess, EngineSpec

PEERS = Path(process.__file__).parent

WORKER = """
    import os
    import sys
    import time

    sys.path.insert(0, {peers!r})
    from protocol import serve

    def load(options):
        print("this is not an answer")
        if options.get("refuses"):
            raise ValueError("no such model")
        calls = []

        def prefill(context, salt):
            calls.append(salt)
            if options.get("fails_after") == len(calls):
                raise RuntimeError("out of memory")
            return {{"seconds": options["seconds"][len(calls) - 1]}}

        def spin():
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass

        return {{
            "describe": lambda: {{"pid": os.getpid()}}, "prefill": prefill, "salts": lambda: calls, "spin": spin,
            "die": lambda: os._exit(3), "sleep": lambda: time.sleep(60),
        }}

    serve(load)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER.format(peers=str(PEERS))))
    return path


def spec(script: Path, name: str = "fake", **options: object) -> EngineSpec:
    return EngineSpec(name=name, command=[sys.executable, str(script)], options={"seconds": [1.0] * 9, **options})


@pytest.fixture
def engine(script: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    started = EngineProcess(spec(script), tmp_path / "log")
    yield started
    started.close()


def is_stopped(process_id: int) -> bool:
    """Whether it comes to a stop; a signal takes a moment."""
    for _ in range(200):
        if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_an_engine_is_stopped_whenever_it_is_not_asked(engine: EngineProcess) -> None:
    assert engine.started() == {"pid": engine.process_id}
    assert is_stopped(engine.process_id)
    assert engine.call("prefill", context=4, salt=1) == {"seconds": 1.0}
    assert is_stopped(engine.process_id)


def test_what_an_engine_prints_is_in_its_log_and_not_among_the_answers(engine: EngineProcess, tmp_path: Path) -> None:
    engine.started()
    assert engine.call("salts") == []
    engine.close()
    assert "this is not an answer" in (tmp_path / "log").read_text()


def test_an_engine_that_dies_is_said_to_have_ended(engine: EngineProcess) -> None:
    engine.started()
    with pytest.raises(EngineFailed, match="ended with 3"):
        engine.call("die")


def test_an_engine_that_does_not_answer_is_given_up(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.started()
    monkeypatch.setattr(process, "CALL_SECONDS", 0.2)
    with pytest.raises(EngineFailed, match="no answer"):
        engine.call("sleep")


def test_closing_ends_a_stopped_process(engine: EngineProcess) -> None:
    engine.started()
    engine.close()
    engine.close()
    assert not Path(f"/proc/{engine.process_id}").exists()
    with pytest.raises(EngineFailed, match="closed"):
        engine.call("salts")


def test_rates_are_medians_and_every_round_has_a_prompt_of_its_own(script: Path) -> None:
    notes: list[tuple[str, str]] = []
    with Engines(lambda name, why: notes.append((name, why))) as engines:
        engines.start([spec(script, "a", seconds=[1.0, 4.0, 2.0]), spec(script, "b")])
        rates = engines.rates(["a", "b", "not there"], 3, "prefill", context=8)
        assert rates == {"a": 4.0, "b": 8.0}
        assert len(set(engines.ask("a", "salts"))) == 3
    assert notes == []


def test_an_engine_that_fails_is_noted_once_and_asked_no_more(script: Path) -> None:
    notes: list[tuple[str, str]] = []
    with Engines(lambda name, why: notes.append((name, why))) as engines:
        engines.start([spec(script, "a", fails_after=2), spec(script, "b")])
        assert engines.rates(["a", "b"], 3, "prefill", context=8) == {"b": 8.0}
        assert engines.running(["a", "b"]) == ["b"]
        assert engines.ask("a", "salts") is None
    assert notes == [("a", "RuntimeError: out of memory")]


def test_what_cannot_be_started_is_noted_and_never_measured(script: Path) -> None:
    notes: list[tuple[str, str]] = []
    absent = EngineSpec(name="absent", command=[], missing="not installed")
    with Engines(lambda name, why: notes.append((name, why))) as engines:
        assert set(engines.start([absent, spec(script, "refusing", refuses=True), spec(script, "good")])) == {"good"}
        assert set(engines.rates(["absent", "refusing", "good"], 1, "prefill", context=8)) == {"good"}
    assert notes == [("absent", "not installed"), ("refusing", "ValueError: no such model")]


def test_the_work_of_the_engine_itself_is_no_contention_and_other_work_is(engine: EngineProcess) -> None:
    engine.started()
    before = session_seconds(engine.process_id)
    engine.call("spin")
    assert session_seconds(engine.process_id) - before >= 0.25
    contention = Contention()
    with contention.watched(engine.process_id):
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    assert contention.seconds >= 0.2
