"""``forkpoint demo``: the main job on a real model, in public. Commit, fork, ``kill -9`` in mid-sentence, resume, compare bit for bit.

Three processes take part. This one reads a scene and commits it. A worker goes on from that commit and is killed while it
writes. A second worker goes on from whatever the first had committed. Then this process writes the same sentence without
interruption, and every token id and every bit of every logit is compared.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forkpoint.cli.demo_worker import COMMIT_EVERY, Restored, Token, Work, told
from forkpoint.cli.location import check_path
from forkpoint.cli.output import AsJson, note, print_json, printable, progress_bar
from forkpoint.errors import Corrupt
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.llm import Continuation, Sampling, TransformersEngine
    from forkpoint.repo.repository import Repository

_BUNDLED: Final = "bundled:smollm2"
_SENTENCE_TOKENS: Final = 64
_KILL_AFTER: Final = 26
_FORK_TOKENS: Final = 24
_FORK_NAMES: Final = ("ada", "ivo", "lena")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A row of the closing table. ``num_bytes`` is the state that was read or written; 0 where none moved."""

    what: str
    elapsed_ms: float
    tokens: int
    num_bytes: int

    def to_record(self) -> dict[str, object]:
        """The row for JSON."""
        return {"bytes": self.num_bytes, "ms": round(self.elapsed_ms, 3), "tokens": self.tokens, "what": self.what}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The resumed run beside the uninterrupted one, from the last commit before the kill on."""

    tokens_before_kill: int
    tokens_resumed: int
    same_tokens: bool
    same_logits: bool

    @classmethod
    def of(cls, whole: Sequence[Token], resumed: Sequence[Token], cut: int) -> Comparison:
        """Compare what was resumed after ``cut`` tokens with that part of the whole."""
        expected = whole[cut:]
        return cls(
            tokens_before_kill=cut,
            tokens_resumed=sum(each.token is not None for each in resumed),
            same_tokens=[each.token for each in expected] == [each.token for each in resumed],
            same_logits=[each.logits for each in expected] == [each.logits for each in resumed],
        )


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(demo)


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
    if keep is not None:
        check_path(keep)
    with tempfile.TemporaryDirectory(prefix="forkpoint-demo-") as scratch:
        folder = keep or Path(scratch) / "demo"
        folder.mkdir(parents=True, exist_ok=True)
        demonstration = _Demonstration(model, dtype, folder, is_silent=as_json)
        comparison = demonstration.show()
    if as_json:
        timings = [each.to_record() for each in demonstration.timings]
        print_json({**asdict(comparison), "timings": timings})


class _Demonstration:
    """One run of the demonstration, act by act."""

    def __init__(self, model: str, dtype: str, folder: Path, *, is_silent: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._folder = folder
        self._is_silent = is_silent
        self.timings: list[Timing] = []

    def show(self) -> Comparison:
        """All acts. Raises Corrupt ``corrupt.demo`` when they do not show what they promise."""
        from forkpoint.llm import TransformersEngine
        from forkpoint.repo.repository import Repository

        with Repository.create(self._folder) as repository:
            self._say(f"\n1. A model and a scene ({self._model}, {self._dtype})")
            engine = TransformersEngine.load(self._model, dtype=self._dtype, note=note)
            scene = self._read_scene(engine, repository)
            self._fork(scene, repository)
            cut = self._kill_in_mid_sentence(repository)
            resumed = self._resume(cut)
            comparison = self._compare(engine, repository, cut, resumed)
            self._restore_once_more(engine, repository)
            self._show_table()
        return comparison

    # ---- the acts ----

    def _read_scene(self, engine: TransformersEngine, repository: Repository) -> Continuation:
        text = files("forkpoint.cli").joinpath("scene.txt").read_text()
        with progress_bar("reading the scene", "tokens") as progress:
            scene = engine.start(text, sampling=_narrator(engine.end_tokens), progress=progress)
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
            f"\n3. Another process goes on from main, committing every {COMMIT_EVERY} tokens, and gets SIGKILL in mid-sentence"
        )
        shown = 0
        self._say("  ", end="")
        with self._work("main", _SENTENCE_TOKENS).start() as process:
            _, tokens = told(process) or (None, ())
            for token in tokens:
                shown += token.token is not None
                self._say(_in_one_line(token.text), end="")
                if shown >= _KILL_AFTER:
                    process.send_signal(signal.SIGKILL)
                    break
            status = process.wait()
        if status != -signal.SIGKILL:
            raise Corrupt(f"the worker ended with status {status} instead of being killed", code="demo", status=status)
        committed = _committed_tokens(repository)
        self._say(f" [killed]\n   {shown} tokens were written, {committed} of them committed")
        return committed

    def _resume(self, cut: int) -> list[Token]:
        self._say("\n4. A new process resumes the branch")
        resumed: list[Token] = []
        with self._work("sentence", _SENTENCE_TOKENS - cut).start() as process:
            restored, tokens = told(process) or (None, ())
            if restored is not None:
                self._show_receipt(restored)
                self._say("   ...", end="")
            for token in tokens:
                resumed.append(token)
                self._say(_in_one_line(token.text), end="")
            if process.wait() != 0:
                raise Corrupt("the second worker failed; its message is above", code="demo")
        self._say("")
        return resumed

    def _compare(
        self, engine: TransformersEngine, repository: Repository, cut: int, resumed: Sequence[Token]
    ) -> Comparison:
        self._say("\n5. The same sentence without any interruption, in this process")
        whole = [Token.of(item) for item in engine.checkout(repository, "main").stream(_SENTENCE_TOKENS)]
        found = Comparison.of(whole, resumed, cut)
        num_tokens = found.tokens_resumed
        self._say(f"   token ids after the kill: {_verdict(found.same_tokens)} ({num_tokens} tokens)")
        self._say(
            f"   logits after the kill:    {_verdict(found.same_logits)} (every bit of {num_tokens} x {engine.vocabulary:,} float32)"
        )
        if not (found.same_tokens and found.same_logits and num_tokens):
            raise Corrupt("the resumed run differs from the uninterrupted one", code="demo", **asdict(found))
        return found

    def _restore_once_more(self, engine: TransformersEngine, repository: Repository) -> None:
        started = time.perf_counter()
        first = next(iter(engine.checkout(repository, "main").stream(1)))
        self._time("restore and first token", _ms_since(started), first.continuation.position, 0)

    # ---- showing ----

    def _show_receipt(self, restored: Restored) -> None:
        self._time("restored after kill -9", restored.elapsed_ms, restored.tokens_restored, restored.bytes_restored)
        self._say(
            f"   receipt: {restored.tokens_restored} tokens restored, {restored.tokens_computed} computed, "
            f"{restored.chunks_verified} chunks verified by digest, {restored.elapsed_ms:.1f} ms, claim: {restored.claim}"
        )

    def _show_table(self) -> None:
        cold = self.timings[0].elapsed_ms
        self._say(f"\n{'':28s}{'ms':>10s}{'tokens':>9s}{'bytes':>14s}{'GB/s':>8s}{'against cold':>15s}")
        for row in self.timings:
            rate = f"{row.num_bytes / row.elapsed_ms / 1e6:8.2f}" if row.num_bytes else " " * 8
            moved = f"{row.num_bytes:14,}" if row.num_bytes else " " * 14
            self._say(f"{row.what:28s}{row.elapsed_ms:10.2f}{row.tokens:9d}{moved}{rate}{cold / row.elapsed_ms:14.1f}x")
        self._say("\nResumed bit for bit.")

    def _time(self, what: str, elapsed_ms: float, tokens: int, num_bytes: int) -> None:
        self.timings.append(Timing(what=what, elapsed_ms=elapsed_ms, tokens=tokens, num_bytes=num_bytes))

    def _say(self, text: str, *, end: str = "\n") -> None:
        if not self._is_silent:
            print(text, end=end, flush=True)

    def _work(self, name: str, count: int) -> Work:
        return Work(
            folder=self._folder, name=name, branch="sentence", count=count, model=self._model, dtype=self._dtype
        )


def _narrator(end_tokens: Iterable[int]) -> Sampling:
    """A storyteller who does not come to an end: the kill is to find the worker in mid-sentence with any model."""
    from forkpoint.llm import Sampling

    never = tuple((token, -100.0) for token in sorted(end_tokens))
    return Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, logit_bias=never, seed=20)


def _committed_tokens(repository: Repository) -> int:
    """How many tokens of the sentence are durable: the distance from ``main`` to ``sentence``."""
    positions = [repository.row(repository.resolve(name)).position for name in ("main", "sentence")]
    return (positions[1] or 0) - (positions[0] or 0)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _in_one_line(text: str) -> str:
    return printable(text.replace("\n", " "))


def _verdict(is_equal: bool) -> str:
    return "identical" if is_equal else "DIFFERENT"
