"""Commands that run a model on text: ``run``, ``score``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from forkpoint.cli.engine import (
    Branch,
    Dtype,
    MinP,
    Model,
    Opened,
    RepetitionPenalty,
    SamplingOptions,
    Seed,
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrustCode,
    load,
    open_text,
    opened_repository,
    starting_name,
)
from forkpoint.cli.location import RepositoryPath
from forkpoint.cli.output import AsJson, Screen, note, print_json, printable, show_text
from forkpoint.cli.text import checked_text
from forkpoint.errors import InvalidInput
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.llm import Continuation
    from forkpoint.repo.publication import Publication
    from forkpoint.repo.repository import Repository


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(run)
    app.command()(score)


def run(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", callback=checked_text, help="Text to start with, or to append to the branch."),
    ] = None,
    branch: Branch = None,
    from_name: Annotated[str | None, typer.Option("--from", help="Start a new branch from this name instead.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")] = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Seed = None,
    commit_every: Annotated[
        int, typer.Option(min=0, help="Commit after every so many tokens; 0 is at the end only.")
    ] = 0,
    message: Annotated[str, typer.Option("--message", "-m", callback=checked_text, help="Message of the commit.")] = "",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    trust_remote_code: TrustCode = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Start or continue a branch, streaming the text.

    Without --branch nothing is kept.

    A branch goes on with the sampling it was committed with; options given here override it. Ctrl-C ends the text, as
    does a reader of it that goes away, and what there is is committed. JSON: branch, id, position, receipt (of the start
    or the checkout), extended (of appending --prompt to what was checked out), text, tokens (those generated).
    """
    if prompt is None and branch is None and from_name is None:
        prompt = _piped_prompt()
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()), seed=seed,
    )  # fmt: skip
    with opened_repository(repo, is_needed=branch is not None or from_name is not None) as repository:
        start = starting_name(repository, branch, from_name, prompt)
        engine = load(model, dtype, threads, trust_remote_code)
        opened = open_text(engine, repository, start, prompt, options)
        commits = Commits(repository=repository, branch=branch, every=commit_every, message=message or prompt or "")
        if as_json:
            print_json(_record(opened, _write(opened.value, max_tokens, commits, Screen(lambda text: None)), branch))
        else:
            opened.say()
            _write(opened.value, max_tokens, commits, Screen(show_text))


def score(
    model: Model,
    candidates: Annotated[list[str], typer.Argument(callback=checked_text, help="Texts to score as what comes next.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", callback=checked_text, help="Text before them.")
    ] = None,
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
    with opened_repository(repo, is_needed=name is not None) as repository:
        engine = load(model, dtype, threads, trust_remote_code)
        base = open_text(engine, repository, name, prompt, SamplingOptions()).value
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
        print(f"{item.total:10.4f}  {len(item.tokens):3d} tokens  {printable(text)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Where a run commits, and how often: after ``every`` tokens, 0 for the end only. Without a branch nothing is kept."""

    repository: Repository | None
    branch: str | None
    every: int
    message: str

    def is_due(self, num_tokens: int) -> bool:
        """Whether to commit when so many tokens are written."""
        return self.every > 0 and num_tokens % self.every == 0

    def commit(self, value: Continuation) -> Publication | None:
        """Move the branch to ``value``; None where there is none."""
        if self.repository is None or self.branch is None:
            return None
        return value.commit(self.repository, self.branch, message=self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a run wrote, and the value after it."""

    value: Continuation
    text: str


def _write(base: Continuation, max_tokens: int, commits: Commits, screen: Screen) -> Written:
    """Generate, showing and committing as it goes.

    An interrupt, and an output that cannot be written, end the text, and are raised when all is committed.
    """
    value, pieces = base, []
    interrupted: KeyboardInterrupt | None = None
    if commits.is_due(0):
        commits.commit(base)
    try:
        for number, item in enumerate(base.stream(max_tokens), start=1):
            value = item.continuation
            pieces.append(item.text)
            screen.show(item.text)
            if commits.is_due(number):
                commits.commit(value)
            if screen.failure is not None:
                break
    except KeyboardInterrupt as error:
        interrupted = error
    screen.show("\n")
    published = commits.commit(value)
    if published is not None:
        note(f"{commits.branch} is at {short(published.manifest_id)}, position {value.position}")
    if interrupted is not None:
        raise interrupted
    screen.check()
    return Written(value=value, text="".join(pieces))


def _piped_prompt() -> str:
    """What is piped in.

    Raises InvalidInput ``invalid_input.prompt`` when that is nothing, or a person at a terminal, and ``invalid_input.text``.
    """
    try:
        prompt = "" if sys.stdin.isatty() else checked_text(sys.stdin.read())
    except UnicodeDecodeError:
        raise InvalidInput("what is piped in is no UTF-8", code="text") from None
    if not prompt:
        raise InvalidInput(
            "there is nothing to run: give --prompt, --branch or --from, or pipe a text in", code="prompt"
        )
    return prompt


def _record(opened: Opened, written: Written, branch: str | None) -> dict[str, object]:
    return {
        "branch": branch,
        "id": written.value.id,
        "position": written.value.position,
        "text": written.text,
        "tokens": list(written.value.tokens[opened.value.position + 1 :]),
        **opened.to_record(),
    }
