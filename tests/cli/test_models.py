"""``run``, ``chat`` and ``score`` on a tiny random model: real engine, real repository, real processes that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.runner import Outcome, run, run_json, run_process, start
from tests.llm.models import decoder_config, save_model

from forkpoint.cli import models as commands
from forkpoint.cli.main import main
from forkpoint.errors import Conflict
from forkpoint.llm import Continuation
from forkpoint.llm.engines.codec import TransformersCodec
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model
FLAGS = ("--dtype", "float32", "--threads", "1")
PROMPT = "the keeper opened the door"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama that never ends by itself: no token ends it."""
    folder = save_model(tmp_path_factory.mktemp("model"), decoder_config("llama", eos_token_id=None))
    return str(folder)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an empty repository."""
    monkeypatch.setenv("FORKPOINT_CACHE_DIR", str(tmp_path / "cache"))
    run("init", tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def go(model: str, *arguments: str, code: int = 0) -> Any:
    return run_json("run", model, *FLAGS, *arguments, code=code)


def sampling(name: str) -> dict[str, Any]:
    record: dict[str, Any] = run_json("show", name)["boundary"]["sampling"]
    return record


# ---- run ----


def test_run_streams_text_and_keeps_nothing_without_a_branch(model: str) -> None:
    told = run("run", model, *FLAGS, "-p", PROMPT, "-n", "5")
    assert told.code == 0
    assert len(told.out) > 1
    assert "computed in" in told.err
    assert run_json("status")["counts"]["manifests"] == 0


def test_run_starts_a_branch_and_goes_on_with_it(model: str) -> None:
    first = go(model, "-p", PROMPT, "-b", "main", "-n", "6", "-m", "begin")
    assert set(first) == {"branch", "extended", "id", "position", "receipt", "text", "tokens"}
    assert len(first["tokens"]) == 6
    second = go(model, "-b", "main", "-n", "6")
    assert second["receipt"]["tokens_computed"] == 0
    assert second["receipt"]["tokens_restored"] == first["position"]
    whole = go(model, "-p", PROMPT, "-n", "12")
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert [each["message"] for each in run_json("log", "main")["entries"]] == ["", "begin"]
    assert run_json("status")["head"]["manifest_id"] == second["id"]


def test_run_appends_a_prompt_to_a_branch(model: str) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "3")
    go(model, "-p", " and the light", "-b", "main", "-n", "3")
    assert " and the light" in run_json("show", "main")["text"]


@pytest.mark.parametrize("opening", [("-b", "main"), ("--from", "main", "-b", "side"), ("-b", "main", "--seed", "3")])
def test_run_with_a_prompt_shows_what_was_restored_and_what_was_computed(model: str, opening: Sequence[str]) -> None:
    position = go(model, "-p", PROMPT, "-b", "main", "-n", "3")["position"]
    told = run("run", model, *FLAGS, *opening, "-p", " and the light", "-n", "0")
    restored, computed = [line for line in told.err.splitlines() if "claim: " in line]
    assert f"{position} tokens restored, 1 chunk verified by digest in " in restored
    assert re.search(rf" {position} tokens shared, \d+ tokens? computed in ", computed)


def test_run_gives_both_receipts_as_json(model: str) -> None:
    first = go(model, "-p", PROMPT, "-b", "main", "-n", "3")
    assert (first["receipt"]["operation"], first["extended"]) == ("start", None)
    second = go(model, "-p", " and the light", "-b", "main", "-n", "3")
    assert (second["receipt"]["operation"], second["receipt"]["tokens_restored"]) == ("checkout", first["position"])
    assert (second["extended"]["operation"], second["extended"]["tokens_reused"]) == ("extend", first["position"])
    assert second["extended"]["tokens_computed"] > 0


def test_what_a_model_writes_does_nothing_to_a_terminal(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "\x1b[2J\tone\n"
    monkeypatch.setattr(TransformersCodec, "decode_visible", lambda self, tokens: written * len(tokens))
    assert go(model, "-p", PROMPT, "-n", "2")["text"] == written * 2
    for told in (run("run", model, *FLAGS, "-p", PROMPT, "-n", "2"), chat(model, "-p", "hello", "-n", "2")):
        assert told.out == "\\x1b[2J\tone\n" * 2 + "\n"


def test_run_from_a_name_begins_another_branch(model: str) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "4")
    side = go(model, "--from", "main", "-b", "side", "-n", "4")
    assert side["tokens"] == go(model, "-b", "main", "-n", "4")["tokens"]
    assert run_json("diff", "main", "side")["left_tokens"] == []


def test_run_takes_a_prompt_from_a_pipe(model: str) -> None:
    piped = run("run", model, *FLAGS, "-n", "4", "--json", stdin=PROMPT.encode()).json
    assert piped["tokens"] == go(model, "-p", PROMPT, "-n", "4")["tokens"]


def test_run_commits_as_it_goes(model: str) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "10", "--commit-every", "4")
    entries = run_json("log", "main")["entries"]
    last = entries[0]["position"]
    assert [last - each["position"] for each in entries] == [0, 2, 6, 10]


def test_a_branch_keeps_its_sampling_until_an_option_overrides_it(model: str) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "3", "--temperature", "0.7", "--seed", "5", "--stop", "zzz")
    before = sampling("main")
    assert (before["seed"], before["stop"]) == (5, ["zzz"])
    go(model, "-b", "main", "-n", "3")
    assert sampling("main") == before
    go(model, "-b", "main", "-n", "3", "--seed", "6")
    assert sampling("main") == before | {"seed": 6}
    go(model, "-b", "main", "-n", "3", "--temperature", "0")
    assert {key for key, item in sampling("main").items() if item != before[key]} == {"seed", "temperature"}


def test_the_seed_decides_what_is_sampled(model: str) -> None:
    def tokens(seed: str) -> list[int]:
        written: list[int] = go(model, "-p", PROMPT, "-n", "12", "--temperature", "1.5", "--seed", seed)["tokens"]
        return written

    assert tokens("1") == tokens("1") != tokens("2")


def test_a_stop_text_ends_the_run_and_is_not_printed(model: str) -> None:
    text = go(model, "-p", PROMPT, "-n", "16")["text"]
    stop = text[len(text) // 2 :][:2]
    assert go(model, "-p", PROMPT, "-n", "16", "--stop", stop)["text"] == text[: text.index(stop)]


def test_a_killed_run_goes_on_exactly_where_its_last_commit_was(model: str, work: Path) -> None:
    whole = go(model, "-p", PROMPT, "-n", "400")["tokens"]
    arguments = ("run", model, *FLAGS, "-p", PROMPT, "-b", "main", "-n", "400", "--commit-every", "3")
    with start(*arguments, cwd=work) as process:
        _wait_for_commits(work, 4)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    position = run_json("show", "main")["boundary"]["position"]
    done = position - (run_json("show", "main")["boundary"]["prompt_length"] - 1)
    assert 0 < done < 400
    rest = go(model, "-b", "main", "-n", str(400 - done))
    assert rest["tokens"] == whole[done:]
    assert rest["receipt"]["tokens_computed"] == 0
    assert run("fsck").code == 0


def test_an_interrupted_run_commits_what_there_is(model: str, work: Path) -> None:
    arguments = ("run", model, *FLAGS, "-p", PROMPT, "-b", "main", "-n", "100000")
    with start(*arguments, cwd=work) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "main is at " in said
    record = run_json("show", "main")
    done = record["boundary"]["position"] - (record["boundary"]["prompt_length"] - 1)
    assert record["tokens"][-done:] == go(model, "-p", PROMPT, "-n", str(done))["tokens"]


def test_a_run_whose_reader_goes_away_commits_what_there_is(model: str, work: Path) -> None:
    with start("run", model, *FLAGS, "-p", PROMPT, "-b", "main", "-n", "100000", cwd=work) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "main is at " in said
    record = run_json("show", "main")
    done = record["boundary"]["position"] - (record["boundary"]["prompt_length"] - 1)
    assert record["tokens"][-done:] == go(model, "-p", PROMPT, "-n", str(done))["tokens"]


def test_a_reader_that_goes_away_hides_no_failed_commit(
    model: str, work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Conflict("somebody was faster", code="ref")

    monkeypatch.setattr(Continuation, "commit", fail)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert main(["run", model, *FLAGS, "-p", PROMPT, "-b", "main", "-n", "4"]) == 4
    assert "[conflict.ref]" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [("run", "-n", "8"), ("run", "-n", "8", "--json"), ("chat", "-n", "8")])
def test_what_cannot_be_written_is_committed(model: str, work: Path, arguments: Sequence[str]) -> None:
    name, *rest = arguments
    with Path("/dev/full").open("w") as full:
        told = run_process(name, model, *FLAGS, "-p", PROMPT, "-b", "main", *rest, cwd=work, stdout=full)
    assert told.code == 8
    assert told.err.endswith("[unavailable.output]\n")
    assert "Traceback" not in told.err
    assert run_json("show", "main")["boundary"]["position"] > 0


def test_a_chat_whose_reader_goes_away_commits_the_answer(model: str, work: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    told = run_process("chat", model, *FLAGS, "-n", "8", "-p", "hello", "-b", "talk", cwd=work, stdout=writer)
    os.close(writer)
    assert told.code == 0, told
    roles = [each["role"] for each in run_json("show", "talk")["payload"]["messages"]]
    assert roles == ["user", "assistant"]


def test_a_run_without_a_reader_of_its_messages_goes_on(model: str, work: Path) -> None:
    with Path("/dev/full").open("w") as full:
        told = run_process("run", model, *FLAGS, "-p", PROMPT, "-b", "main", "-n", "4", cwd=work, stderr=full)
    assert told.code == 0
    assert len(told.out) > 1
    assert len(run_json("log", "main")["entries"]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ((), 2, "invalid_input.prompt"),
        (("-b", "nothing"), 3, "not_found.name"),
        (("-b", "a b", "-p", "x"), 2, "invalid_input.ref_name"),
        (("-b", "main~1", "-p", "x"), 2, "invalid_input.ref_name"),
        (("--from", "nothing", "-p", "x"), 3, "not_found.name"),
        (("-b", "side", "--from", "main"), 4, "conflict.ref"),
        (("-p", "x", "--commit-every", "-1"), 2, "invalid_input.usage"),
        (("-p", "x", "-n", "many"), 2, "invalid_input.usage"),
        (("-p", "x", "--threads", "0"), 2, "invalid_input.usage"),
        (("-p", "x", "--threads", "1000000"), 2, "invalid_input.usage"),
        (("-p", "a\udcff"), 2, "invalid_input.text"),
        (("-p", "x", "-m", "\udcff"), 2, "invalid_input.text"),
        (("-p", "x", "--stop", "b", "--stop", "\udcff"), 2, "invalid_input.text"),
    ],
)
def test_run_refuses_before_a_model_is_loaded(
    model: str, arguments: Sequence[str], code: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "side" in arguments:
        go(model, "-p", PROMPT, "-b", "main", "-n", "2")
        go(model, "-p", "the light", "-b", "side", "-n", "2")

    def load(*_: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(commands, "load", load)
    assert go(model, *arguments, code=code)["error"]["code"] == error


@pytest.mark.parametrize(
    "arguments", [("score", "-p", "x", "a", "\udcff"), ("score", "-p", "\udcff", "a"), ("chat", "-p", "\udcff")]
)
def test_texts_that_are_no_unicode_are_refused_before_a_model_is_loaded(work: Path, arguments: Sequence[str]) -> None:
    name, *rest = arguments
    record = run_json(name, str(work / "no.gguf"), *rest, code=2)
    assert record["error"]["code"] == "invalid_input.text"


def test_what_is_piped_in_is_refused_where_it_is_no_unicode(model: str) -> None:
    refused = chat(model, "-b", "talk", stdin=b"hello\n\xff\n")
    assert (refused.code, refused.err.count("[invalid_input.text]")) == (2, 1)
    piped = run("run", model, "--json", stdin=b"\xff")
    assert (piped.code, piped.json["error"]["code"]) == (2, "invalid_input.text")


def test_run_names_a_model_that_is_not_there(work: Path) -> None:
    told = run("run", str(work / "no.gguf"), "-p", "x")
    assert told.code in (2, 3), told
    assert told.err.splitlines()[-1].startswith("forkpoint: ")


def test_another_model_is_refused_and_the_field_is_named(model: str, tmp_path: Path) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "2")
    other = save_model(tmp_path / "other", decoder_config("llama", eos_token_id=None), seed=1)
    record = go(str(other), "-b", "main", code=5)
    assert record["error"]["code"] == "incompatible.state_identity"
    assert record["error"]["data"]["field"]


# ---- chat ----


def chat(model: str, *arguments: str, stdin: bytes = b"") -> Outcome:
    return run("chat", model, *FLAGS, "-n", "6", *arguments, stdin=stdin)


def test_chat_goes_on_with_the_conversation_of_its_branch(model: str) -> None:
    first = chat(model, "-b", "talk", "-p", "hello", "--system", "be brief", "--json").json
    assert set(first) == {"extended", "id", "messages", "receipt"}
    assert [each["role"] for each in first["messages"]] == ["system", "user", "assistant"]
    second = chat(model, "-b", "talk", "-p", "and then?", "--system", "be brief", "--json").json
    assert second["messages"][:3] == first["messages"]
    assert [each["role"] for each in second["messages"][3:]] == ["user", "assistant"]
    assert [each["message"] for each in run_json("log", "talk")["entries"]] == ["and then?", "hello"]
    assert run_json("show", "talk")["payload"]["messages"] == second["messages"]


def test_chat_reads_one_turn_a_line_and_answers_each(model: str) -> None:
    told = chat(model, "-b", "talk", "--json", stdin=b"hello\n\nand then?\n")
    assert told.code == 0
    answers = [json.loads(line) for line in told.lines]
    assert [len(each["messages"]) for each in answers] == [2, 4]
    assert len(run_json("log", "talk")["entries"]) == 2


def test_chat_begins_from_a_prefix_that_is_stored(model: str) -> None:
    system = "the keeper opened the door and the light went out. " * 60
    first = chat(model, "-b", "one", "-p", "hello", "--system", system, "--json").json
    assert first["receipt"]["tokens_restored"] == 0
    second = chat(model, "-b", "two", "-p", "hullo", "--system", system, "--json").json
    assert second["receipt"]["tokens_restored"] >= 256
    third = chat(model, "-b", "two", "-p", "and then?", "--json").json
    assert third["receipt"]["operation"] == "checkout"
    assert third["extended"]["tokens_computed"] < third["receipt"]["tokens_restored"]
    told = chat(model, "-b", "three", "-p", "hey", "--system", system)
    assert " tokens restored, " in told.err


def test_chat_prints_answers_as_text(model: str) -> None:
    told = chat(model, "-p", "hello")
    assert told.code == 0
    assert told.out.endswith("\n")
    assert run_json("status")["counts"]["manifests"] == 0


def test_chat_refuses_a_branch_that_is_no_conversation(model: str) -> None:
    go(model, "-p", PROMPT, "-b", "main", "-n", "2")
    refused = chat(model, "-b", "main", "-p", "hello")
    assert (refused.code, refused.out) == (2, "")
    assert "[invalid_input.chat]" in refused.err
    assert len(run_json("log", "main")["entries"]) == 1


# ---- score ----


def score(model: str, *arguments: str, code: int = 0) -> Any:
    return run_json("score", model, *FLAGS, *arguments, code=code)


def test_score_ranks_texts_from_a_prompt_or_from_a_name(model: str) -> None:
    candidates = (" the light", " x", "日本")
    by_prompt = score(model, *candidates, "-p", PROMPT)["scores"]
    assert {each["text"] for each in by_prompt} == set(candidates)
    logprobs = [each["logprob"] for each in by_prompt]
    assert logprobs == sorted(logprobs, reverse=True)
    assert all(set(each) == {"logprob", "text", "tokens"} and each["logprob"] < 0 for each in by_prompt)
    go(model, "-p", PROMPT, "-b", "main", "-n", "0")
    before = run_json("log", "--all")
    assert score(model, *candidates, "--name", "main")["scores"] == by_prompt
    assert run_json("log", "--all") == before


def test_score_counts_tokens_if_asked(model: str) -> None:
    (plain,) = score(model, " the light went", "-p", PROMPT)["scores"]
    (average,) = score(model, " the light went", "-p", PROMPT, "--per-token")["scores"]
    assert average["logprob"] == pytest.approx(plain["logprob"] / len(plain["tokens"]))


def test_score_prints_a_line_each(model: str) -> None:
    told = run("score", model, " a", " b", "-p", PROMPT, *FLAGS)
    assert len(told.lines) == 2
    assert all(" tokens  " in line for line in told.lines)


def test_score_wants_a_prompt_or_a_name(model: str) -> None:
    for arguments in ((), ("-p", "x", "--name", "main")):
        assert score(model, "y", *arguments, code=2)["error"]["code"] == "invalid_input.prompt"
    assert score(model, "y", "--name", "nothing", code=3)["error"]["code"] == "not_found.name"


def _wait_for_commits(work: Path, count: int) -> None:
    for _ in range(1200):
        with Repository.open(work) as repository:
            if any(each.name == "main" for each in repository.branches()) and len(repository.log("main")) >= count:
                return
        time.sleep(0.05)
    pytest.fail("the run never committed")
