"""What the commands that run a model share: which model, with which sampling, from where, and what opening it took.

Models are loaded here and nowhere else in the command line, the demonstration apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from forkpoint.cli.location import open_repository
from forkpoint.cli.output import counted, note, printable, progress_bar
from forkpoint.cli.text import checked_text
from forkpoint.errors import Conflict, NotFound
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.llm import Continuation, Receipt, Sampling, TransformersEngine
    from forkpoint.repo.repository import Repository

Model: TypeAlias = Annotated[str, typer.Argument(help="bundled:smollm2, a folder, a .gguf file, or a hub id.")]
Branch: TypeAlias = Annotated[str | None, typer.Option("--branch", "-b", help="Branch to start or to go on with.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Threads: TypeAlias = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Threads of the model; default: torch's own choice.")
]
TrustCode: TypeAlias = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that ships with the model.")
]
Temperature: TypeAlias = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK: TypeAlias = Annotated[int | None, typer.Option(help="Keep only the k best tokens; 0 is off.")]
TopP: TypeAlias = Annotated[float | None, typer.Option(help="Keep the smallest set with this probability; 1 is off.")]
MinP: TypeAlias = Annotated[
    float | None, typer.Option(help="Keep tokens with this fraction of the best one's probability.")
]
RepetitionPenalty: TypeAlias = Annotated[float | None, typer.Option(help="Above 1 discourages tokens of the history.")]
Stop: TypeAlias = Annotated[
    list[str] | None, typer.Option(callback=checked_text, help="End before this text; may be given several times.")
]
Seed: TypeAlias = Annotated[int | None, typer.Option(help="Key of the random numbers.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Fields of ``Sampling`` as the command line gives them; None, and no stop text, is not given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """The fields that were given, as ``Sampling`` takes them."""
        return {field: option for field, option in asdict(self).items() if option not in (None, ())}

    def sampling(self) -> Sampling:
        """Of a new beginning. Raises InvalidInput ``invalid_input.sampling``."""
        from forkpoint.llm import Sampling

        return Sampling(**self.given())

    def applied(self, value: Continuation) -> Continuation:
        """``value`` going on with its own sampling, changed in what was given."""
        given = self.given()
        return value.with_sampling(replace(value.sampling, **given)) if given else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A value to go on from, and what it took to have it.

    Attributes:
        value: the continuation, its sampling set.
        receipt: of the start or the checkout.
        extended: of appending a prompt to what was checked out; None where nothing was appended.
    """

    value: Continuation
    receipt: Receipt
    extended: Receipt | None = None

    def to_record(self) -> dict[str, object]:
        """Both receipts for JSON."""
        extended = None if self.extended is None else self.extended.to_record()
        return {"extended": extended, "receipt": self.receipt.to_record()}

    def say(self) -> None:
        """Both receipts for people, a line each."""
        say_receipt(self.receipt)
        if self.extended is not None:
            say_receipt(self.extended)


def load(model: str, dtype: str, threads: int | None, trust_remote_code: bool) -> TransformersEngine:
    """Load a model, saying on stderr what takes long."""
    from forkpoint.llm import TransformersEngine

    return TransformersEngine.load(model, dtype=dtype, threads=threads, trust_remote_code=trust_remote_code, note=note)


@contextmanager
def opened_repository(path: Path | None, *, is_needed: bool) -> Iterator[Repository | None]:
    """The repository of a command that can do without one."""
    if not is_needed:
        yield None
        return
    with open_repository(path) as repository:
        yield repository


def starting_name(
    repository: Repository | None, branch: str | None, from_name: str | None, prompt: str | None
) -> str | None:
    """What to start from; None for a new beginning. All that can be refused is refused here, before a model is loaded.

    Raises:
        NotFound: ``not_found.name`` for an unknown --from, or an unknown branch and no prompt to begin it with.
        Conflict: ``conflict.ref`` when the branch holds something that does not lead to --from.
    """
    from forkpoint.repo.names import branch_ref

    if repository is None:
        return None
    ref = None if branch is None else branch_ref(branch)
    row = None if ref is None else repository.catalog.find_ref(ref)
    if from_name is not None:
        start = repository.resolve(from_name)
        if row is not None and row.target is not None and not repository.catalog.is_ancestor(row.target, start):
            raise Conflict(
                f"{branch} is at {short(row.target)}, which {from_name} does not continue; choose another --branch",
                code="ref", ref=ref, tip=row.target, new=start,
            )  # fmt: skip
        return start
    if row is None and prompt is None:
        raise NotFound(f"there is no {branch!r} to go on with; give --prompt to start it", code="name", name=branch)
    return None if row is None else ref


def open_text(
    engine: TransformersEngine,
    repository: Repository | None,
    name: str | None,
    prompt: str | None,
    options: SamplingOptions,
) -> Opened:
    """Start with a prompt, or check out a name and append the prompt, if there is one."""
    if name is None:
        with progress_bar("reading", "tokens") as progress:
            value = engine.start(prompt or "", sampling=options.sampling(), repository=repository, progress=progress)
        return Opened(value=value, receipt=value.receipt)
    found = checkout(engine, repository, name)
    if not prompt:
        return Opened(value=options.applied(found), receipt=found.receipt)
    with progress_bar("reading", "tokens") as progress:
        extended = found.extend(prompt, progress=progress)
    return Opened(value=options.applied(extended), receipt=found.receipt, extended=extended.receipt)


def checkout(engine: TransformersEngine, repository: Repository | None, name: str) -> Continuation:
    """Restore a committed value, with a progress bar."""
    assert repository is not None
    with progress_bar("restoring", "chunks") as progress:
        return engine.checkout(repository, name, progress=progress)


def say_receipt(receipt: Receipt) -> None:
    """What was restored, shared and computed, on stderr."""
    done = []
    if receipt.chunks_verified or receipt.operation == "checkout":
        chunks = f"{counted(receipt.chunks_verified, 'chunk')} verified by digest"
        done.append(f"{counted(receipt.tokens_restored, 'token')} restored, {chunks}")
    if receipt.tokens_reused:
        done.append(f"{counted(receipt.tokens_reused, 'token')} shared")
    if receipt.tokens_computed or not done:
        done.append(f"{counted(receipt.tokens_computed, 'token')} computed")
    note(f"{', '.join(done)} in {receipt.elapsed_ms:.0f} ms; claim: {receipt.claim}")
    for each in receipt.notes:
        note(printable(each))
