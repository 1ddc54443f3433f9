"""Commands that run a model: ``run``, ``chat``, ``score``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import AsJson, note, print_json, progress_bar
from forkpoint.errors import Conflict, InvalidInput, NotFound
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.llm import Continuation, Sampling, TransformersEngine
    from forkpoint.repo.repository import Repository

Model: TypeAlias = Annotated[str, typer.Argument(help="bundled:smollm2, a folder, a .gguf file, or a hub id.")]
Branch: TypeAlias = Annotated[str | None, typer.Option("--branch", "-b", help="Branch to start or to go on with.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Threads: TypeAlias = Annotated[int | None, typer.Option(help="Threads of the model; default: torch's own choice.")]
TrustCode: TypeAlias = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that ships with the model.")
]
Temperature: TypeAlias = Annotated[float | None, typer.Option(help="0 is greedy.")]
Seed: TypeAlias = Annotated[int | None, typer.Option(help="Key of the random numbers.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(run)
    app.command()(chat)
    app.command()(score)


def run(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to start with, or to append to the branch.")
    ] = None,
    branch: Branch = None,
    from_name: Annotated[str | None, typer.Option("--from", help="Start a new branch from this name instead.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")] = 128,
    temperature: Temperature = None,
    top_k: Annotated[int | None, typer.Option(help="Keep only the k best tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this probability; 1 is off.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens with this fraction of the best one's probability.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens of the history.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    seed: Seed = None,
    commit_every: Annotated[
        int, typer.Option(min=0, help="Commit after every so many tokens; 0 is at the end only.")
    ] = 0,
    message: Annotated[str, typer.Option("--message", "-m", help="Message of the commit.")] = "",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    trust_remote_code: TrustCode = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Start or continue a branch, streaming the text.

    Without --branch nothing is kept.

    A branch goes on with the sampling it was committed with; options given here override it. Ctrl-C ends the text, and
    commits what there is. JSON: branch, id, position, receipt, text, tokens (those generated).
    """
    if prompt is None and branch is None and from_name is None:
        prompt = _piped_prompt()
    options = _given(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        stop=tuple(stop) if stop else None, seed=seed,
    )  # fmt: skip
    with _opened(repo, is_needed=branch is not None or from_name is not None) as repository:
        start = _starting_name(repository, branch, from_name, prompt)
        engine = _load(model, dtype, threads, trust_remote_code)
        base = _base(engine, repository, start, prompt, options)
        _say_receipt(base, as_json)
        value, text = _generate(
            base,
            repository,
            branch,
            max_tokens,
            commit_every,
            message or (prompt or ""),
            sys.stdout if not as_json else None,
        )
        if as_json:
            print_json(_run_record(value, base, text, branch))


def chat(
    model: Model = "bundled:smollm2",
    branch: Branch = None,
    system: Annotated[str | None, typer.Option(help="System message of a new conversation.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Say this one thing instead of reading from the terminal.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of an answer at most.")] = 512,
    temperature: Temperature = None,
    seed: Seed = None,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    trust_remote_code: TrustCode = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a model.

    With --branch every turn is committed, and the conversation goes on where it stood, after any crash.

    --system counts when a conversation begins. JSON, an object for each answer: id, messages, receipt.
    """
    options = _given(temperature=temperature, seed=seed)
    with _opened(repo, is_needed=branch is not None) as repository:
        start = _starting_name(repository, branch, None, "")
        engine = _load(model, dtype, threads, trust_remote_code)
        value = None if start is None else _checkout(engine, repository, start)
        if value is not None and not value.messages:
            raise InvalidInput(
                f"{branch} is no conversation; go on with it by forkpoint run", code="chat", branch=branch
            )
        opening = [{"role": "system", "content": system}] if system and value is None else []
        for content in [prompt] if prompt is not None else _typed_lines():
            value = _ask(engine, value, opening, content, options)
            value = value.answer(
                max_tokens, on_text=lambda text: print(text, end="", flush=True) if not as_json else None
            )
            if not as_json:
                print()
            if repository is not None:
                value.commit(repository, branch, message=content)
            if as_json:
                print_json({"id": value.id, "messages": list(value.messages), "receipt": value.receipt.to_record()})


def score(
    model: Model,
    candidates: Annotated[list[str], typer.Argument(help="Texts to score as what comes next.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text before them.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Score from this committed continuation instead.")] = None,
    count_end: Annotated[bool, typer.Option("--count-end", help="Count the end token after each text.")] = False,
    per_token: Annotated[bool, typer.Option("--per-token", help="Divide by the number of tokens.")] = False,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    trust_remote_code: TrustCode = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Rank whole texts by their log-probability.

    The state that they are scored from is not touched. JSON: scores (text, logprob, tokens), best first."""
    if (prompt is None) == (name is None):
        raise InvalidInput("give exactly one of --prompt and --name", code="prompt")
    with _opened(repo, is_needed=name is not None) as repository:
        engine = _load(model, dtype, threads, trust_remote_code)
        base = _base(engine, repository, name, prompt, {})
        scores = base.score(
            candidates, end="count" if count_end else "ignore", normalise="tokens" if per_token else "none"
        )
    ranked = sorted(zip(candidates, scores, strict=True), key=lambda pair: -pair[1].total)
    if as_json:
        print_json(
            {"scores": [{"logprob": item.total, "text": text, "tokens": list(item.tokens)} for text, item in ranked]}
        )
        return
    for text, item in ranked:
        print(f"{item.total:10.4f}  {len(item.tokens):3d} tokens  {text}")


SamplingOptions: TypeAlias = dict[str, Any]
"""Fields of ``Sampling`` that were given on the command line."""


def _given(**options: object) -> SamplingOptions:
    return {field: option for field, option in options.items() if option is not None}


def _sampling(options: SamplingOptions) -> Sampling:
    from forkpoint.llm import Sampling

    return Sampling(**options)


@contextmanager
def _opened(path: Path | None, *, is_needed: bool) -> Iterator[Repository | None]:
    if not is_needed:
        yield None
        return
    with open_repository(path) as repository:
        yield repository


def _load(model: str, dtype: str, threads: int | None, trust_remote_code: bool) -> TransformersEngine:
    from forkpoint.llm import TransformersEngine

    return TransformersEngine.load(model, dtype=dtype, threads=threads, trust_remote_code=trust_remote_code, note=note)


def _piped_prompt() -> str:
    """What is piped in. Raises InvalidInput ``invalid_input.prompt`` when that is nothing, or a person at a terminal."""
    prompt = "" if sys.stdin.isatty() else sys.stdin.read()
    if not prompt:
        raise InvalidInput(
            "there is nothing to run: give --prompt, --branch or --from, or pipe a text in", code="prompt"
        )
    return prompt


def _starting_name(
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


def _checkout(engine: TransformersEngine, repository: Repository | None, name: str) -> Continuation:
    assert repository is not None
    with progress_bar("restoring", "chunks") as progress:
        return engine.checkout(repository, name, progress=progress)


def _base(
    engine: TransformersEngine,
    repository: Repository | None,
    name: str | None,
    prompt: str | None,
    options: SamplingOptions,
) -> Continuation:
    found = None if name is None else _checkout(engine, repository, name)
    with progress_bar("reading", "tokens") as progress:
        if found is None:
            return engine.start(prompt or "", sampling=_sampling(options), repository=repository, progress=progress)
        value = found.extend(prompt, progress=progress) if prompt else found
    return value.with_sampling(replace(value.sampling, **options)) if options else value


def _generate(
    base: Continuation,
    repository: Repository | None,
    branch: str | None,
    max_tokens: int,
    commit_every: int,
    message: str,
    out: TextIO | None,
) -> tuple[Continuation, str]:
    value, pieces = base, []
    if repository is not None and branch is not None and commit_every:
        value.commit(repository, branch, message=message)
    interrupted: KeyboardInterrupt | None = None
    try:
        for number, item in enumerate(base.stream(max_tokens), start=1):
            value = item.continuation
            pieces.append(item.text)
            if out is not None:
                print(item.text, end="", flush=True, file=out)
            if commit_every and number % commit_every == 0 and repository is not None and branch is not None:
                value.commit(repository, branch, message=message)
    except KeyboardInterrupt as error:
        interrupted = error
    if out is not None:
        print(file=out)
    if repository is not None and branch is not None:
        published = value.commit(repository, branch, message=message)
        if out is not None:
            note(f"{branch} is at {short(published.manifest_id)}, position {value.position}")
    if interrupted is not None:
        raise interrupted
    return value, "".join(pieces)


def _ask(
    engine: TransformersEngine,
    value: Continuation | None,
    opening: list[dict[str, str]],
    content: str,
    options: SamplingOptions,
) -> Continuation:
    with progress_bar("reading", "tokens") as progress:
        if value is None:
            return engine.chat(
                [*opening, {"role": "user", "content": content}], sampling=_sampling(options), progress=progress
            )
        changed = value.with_sampling(replace(value.sampling, **options)) if options else value
        return changed.say(content, progress=progress)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _say_receipt(value: Continuation, as_json: bool) -> None:
    receipt = value.receipt
    if not as_json:
        note(
            f"{receipt.tokens_restored} tokens restored, {receipt.tokens_reused} shared, {receipt.tokens_computed} computed "
            f"in {receipt.elapsed_ms:.0f} ms; claim: {receipt.claim}"
        )


def _run_record(value: Continuation, base: Continuation, text: str, branch: str | None) -> dict[str, object]:
    return {
        "branch": branch,
        "id": value.id,
        "position": value.position,
        "receipt": base.receipt.to_record(),
        "text": text,
        "tokens": list(value.tokens[base.position + 1 :]),
    }
