"""``forkpoint demo``: the main job on a real model, in public. Commit, fork, ``kill -9`` in mid-sentence, resume, compare bit for bit.

Three processes take part. This one reads a scene and commits it. A worker goes on from that commit and is killed while it
writes. A second worker goes on from whatever the first had committed. Then this process writes the same sentence without
interruption, and every token id and every bit of every logit is compared.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forkpoint.cli.output import AsJson, note, print_json, progress_bar
from forkpoint.errors import Error
from forkpoint.ids import digest_of, short

if TYPE_CHECKING:
    from forkpoint.llm import Continuation, Sampling, StreamedToken, TransformersEngine
    from forkpoint.repo.repository import Repository

_BUNDLED: Final = "bundled:smollm2"
_SENTENCE_TOKENS: Final = 64
_COMMIT_EVERY: Final = 4
_KILL_AFTER: Final = 26
_FORK_TOKENS: Final = 24
_FORK_NAMES: Final = ("ada", "ivo", "lena")


class DemoFailed(Error):
    """The demonstration did not show what it promises."""

    family = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A row of the closing table. ``num_bytes`` is the state that was read or written; 0 where none moved."""

    what: str
    elapsed_ms: float
    tokens: int
    num_bytes: int


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(demo)
    app.command("demo-worker", hidden=True)(worker)


def demo(
    model: Annotated[str, typer.Option(help="A model to show it with.")] = _BUNDLED,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    keep: Annotated[Path | None, typer.Option(help="Keep the repository in this new folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the main job on a real model.

    Commit, fork, kill -9 in mid-sentence, resume, compare bit for bit. JSON: same_logits, same_tokens, timings,
    tokens_before_kill, tokens_resumed.
    """
    with tempfile.TemporaryDirectory(prefix="forkpoint-demo-") as scratch:
        folder = keep or Path(scratch) / "demo"
        folder.mkdir(parents=True, exist_ok=True)
        record = _Demonstration(model, dtype, folder, is_silent=as_json).show()
    if as_json:
        print_json(record)


def worker(
    folder: Path,
    name: str,
    branch: str,
    count: int,
    model: str = _BUNDLED,
    dtype: str = "bfloat16",
    commit_every: int = _COMMIT_EVERY,
) -> None:
    """The process that is killed, and the one that goes on: writes tokens from ``name``, committing to ``branch`` as it goes."""
    from forkpoint.llm import TransformersEngine
    from forkpoint.repo.repository import Repository

    with Repository.open(folder) as repository:
        engine = TransformersEngine.load(model, dtype=dtype)
        value = engine.checkout(repository, name)
        _tell({"id": value.id, "position": value.position, "receipt": value.receipt.to_record()})
        for number, item in enumerate(value.stream(count), start=1):
            value = item.continuation
            _tell(_token_record(item))
            if number % commit_every == 0:
                value.commit(repository, branch, message=f"after {number} tokens")
        value.commit(repository, branch, message="the end")


class _Demonstration:
    """One run of the demonstration, act by act."""

    def __init__(self, model: str, dtype: str, folder: Path, *, is_silent: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._folder = folder
        self._is_silent = is_silent
        self._timings: list[Timing] = []

    def show(self) -> dict[str, Any]:
        from forkpoint.llm import TransformersEngine
        from forkpoint.repo.repository import Repository

        with Repository.create(self._folder) as repository:
            self._say(f"\n1. A model and a scene ({self._model}, {self._dtype})")
            engine = TransformersEngine.load(self._model, dtype=self._dtype, note=note)
            scene = self._read_scene(engine, repository)
            self._fork(scene, repository)
            cut = self._kill_in_mid_sentence(repository)
            resumed = self._resume(cut)
            record = self._compare(engine, repository, cut, resumed)
            self._show_table()
        return record

    # ---- the acts ----

    def _read_scene(self, engine: TransformersEngine, repository: Repository) -> Continuation:
        text = files("forkpoint.cli").joinpath("scene.txt").read_text()
        with progress_bar("reading the scene", "tokens") as progress:
            scene = engine.start(text, sampling=_narrator(), progress=progress)
        self._time("cold: the model reads it", scene.receipt.elapsed_ms, scene.position, 0)
        started = time.perf_counter()
        published = scene.commit(repository, "main", message="the scene")
        self._time("commit, durable", _ms_since(started), scene.position, published.bytes_written)
        self._say(
            f"   {scene.position} tokens read; committed as main = {short(published.manifest_id)}, {published.chunks_written} chunks"
        )
        return scene

    def _fork(self, scene: Continuation, repository: Repository) -> None:
        self._say("\n2. Three forks of that one state: nothing is read again, nothing is copied until they differ")
        started = time.perf_counter()
        forks = scene.fork(len(_FORK_NAMES))
        assert isinstance(forks, list)
        self._time("forked: three values", _ms_since(started), scene.position, 0)
        for name, fork in zip(_FORK_NAMES, forks, strict=True):
            told = fork.generate(_FORK_TOKENS)
            published = told.commit(repository, name, message=f"{name} speaks")
            assert told.completion is not None
            self._say(f"   {name:5s} {_in_one_line(told.completion.text).strip()}")
            self._say(
                f"         {published.bytes_written:,} bytes written, {published.bytes_shared:,} shared with main"
            )

    def _kill_in_mid_sentence(self, repository: Repository) -> int:
        self._say(
            f"\n3. Another process goes on from main, committing every {_COMMIT_EVERY} tokens, and gets SIGKILL in mid-sentence"
        )
        shown = 0
        self._say("  ", end="")
        with self._worker("main", _SENTENCE_TOKENS) as process:
            for record in _records(process):
                shown += "token" in record
                self._say(_in_one_line(record.get("text", "")), end="")
                if shown >= _KILL_AFTER:
                    process.send_signal(signal.SIGKILL)
                    break
            status = process.wait()
        if status != -signal.SIGKILL:
            raise DemoFailed(
                f"the worker ended with status {status} instead of being killed", code="demo", status=status
            )
        committed = _committed_tokens(repository)
        self._say(f" [killed]\n   {shown} tokens were written, {committed} of them committed")
        return committed

    def _resume(self, cut: int) -> list[dict[str, Any]]:
        self._say("\n4. A new process resumes the branch")
        resumed: list[dict[str, Any]] = []
        with self._worker("sentence", _SENTENCE_TOKENS - cut) as process:
            for record in _records(process):
                if "receipt" in record:
                    self._show_receipt(record["receipt"])
                    self._say("   ...", end="")
                else:
                    resumed.append(record)
                    self._say(_in_one_line(record["text"]), end="")
            if process.wait() != 0:
                raise DemoFailed("the second worker failed; its message is above", code="demo")
        self._say("")
        return resumed

    def _compare(
        self, engine: TransformersEngine, repository: Repository, cut: int, resumed: list[dict[str, Any]]
    ) -> dict[str, Any]:
        self._say("\n5. The same sentence without any interruption, in this process")
        whole = [_token_record(item) for item in engine.checkout(repository, "main").stream(_SENTENCE_TOKENS)]
        expected = whole[cut:]
        num_tokens = sum("token" in item for item in resumed)
        same_tokens = [item.get("token") for item in expected] == [item.get("token") for item in resumed]
        same_logits = [item.get("logits") for item in expected] == [item.get("logits") for item in resumed]
        self._say(f"   token ids after the kill: {_verdict(same_tokens)} ({num_tokens} tokens)")
        self._say(
            f"   logits after the kill:    {_verdict(same_logits)} (every bit of {num_tokens} x {engine.vocabulary:,} float32)"
        )
        record = {
            "same_logits": same_logits,
            "same_tokens": same_tokens,
            "timings": [
                {"bytes": t.num_bytes, "ms": round(t.elapsed_ms, 3), "tokens": t.tokens, "what": t.what}
                for t in self._timings
            ],
            "tokens_before_kill": cut,
            "tokens_resumed": num_tokens,
        }
        if not (same_tokens and same_logits and num_tokens):
            raise DemoFailed(
                "the resumed run differs from the uninterrupted one",
                code="demo",
                same_tokens=same_tokens,
                same_logits=same_logits,
            )
        started = time.perf_counter()
        first = next(iter(engine.checkout(repository, "main").stream(1)))
        self._time("restore and first token", _ms_since(started), first.continuation.position, 0)
        return record

    # ---- showing ----

    def _show_receipt(self, receipt: dict[str, Any]) -> None:
        milliseconds = receipt["elapsed_us"] / 1000
        self._time("restored after kill -9", milliseconds, receipt["tokens_restored"], receipt["bytes_restored"])
        self._say(
            f"   receipt: {receipt['tokens_restored']} tokens restored, {receipt['tokens_computed']} computed, "
            f"{receipt['chunks_verified']} chunks verified by digest, {milliseconds:.1f} ms, claim: {receipt['claim']}"
        )

    def _show_table(self) -> None:
        cold = self._timings[0].elapsed_ms
        self._say(f"\n{'':28s}{'ms':>10s}{'tokens':>9s}{'bytes':>14s}{'GB/s':>8s}{'against cold':>15s}")
        for row in self._timings:
            rate = f"{row.num_bytes / row.elapsed_ms / 1e6:8.2f}" if row.num_bytes else " " * 8
            moved = f"{row.num_bytes:14,}" if row.num_bytes else " " * 14
            self._say(f"{row.what:28s}{row.elapsed_ms:10.2f}{row.tokens:9d}{moved}{rate}{cold / row.elapsed_ms:14.1f}x")
        self._say("\nResumed bit for bit.")

    def _time(self, what: str, elapsed_ms: float, tokens: int, num_bytes: int) -> None:
        self._timings.append(Timing(what=what, elapsed_ms=elapsed_ms, tokens=tokens, num_bytes=num_bytes))

    def _say(self, text: str, *, end: str = "\n") -> None:
        if not self._is_silent:
            print(text, end=end, flush=True)

    def _worker(self, name: str, count: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "forkpoint.cli.main",
            "demo-worker",
            str(self._folder),
            name,
            "sentence",
            str(count),
        ]
        return subprocess.Popen(
            [*command, "--model", self._model, "--dtype", self._dtype], stdout=subprocess.PIPE, text=True
        )


def _narrator() -> Sampling:
    from forkpoint.llm import Sampling

    return Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=20)


def _token_record(item: StreamedToken) -> dict[str, Any]:
    if item.choice is None or item.logits is None:
        return {"text": item.text}
    return {"logits": digest_of([item.logits.tobytes()]), "text": item.text, "token": item.choice.token}


def _committed_tokens(repository: Repository) -> int:
    """How many tokens of the sentence are durable: the distance from ``main`` to ``sentence``."""
    positions = [repository.row(repository.resolve(name)).position for name in ("main", "sentence")]
    return (positions[1] or 0) - (positions[0] or 0)


def _tell(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _records(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _in_one_line(text: str) -> str:
    return text.replace("\n", " ")


def _verdict(is_equal: bool) -> str:
    return "identical" if is_equal else "DIFFERENT"
