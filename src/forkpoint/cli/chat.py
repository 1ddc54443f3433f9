"""The command that holds a conversation: ``chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from forkpoint.cli.engine import (
    Branch,
    Dtype,
    Model,
    Opened,
    SamplingOptions,
    Seed,
    Temperature,
    Threads,
    TrustCode,
    checkout,
    load,
    opened_repository,
    starting_name,
)
from forkpoint.cli.location import RepositoryPath
from forkpoint.cli.output import AsJson, Screen, print_json, progress_bar, show_text
from forkpoint.cli.text import checked_text
from forkpoint.errors import InvalidInput

if TYPE_CHECKING:
    from forkpoint.llm import Continuation, TransformersEngine
    from forkpoint.repo.repository import Repository


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(chat)


def chat(
    model: Model = "bundled:smollm2",
    branch: Branch = None,
    system: Annotated[
        str | None, typer.Option(callback=checked_text, help="System message of a new conversation.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", callback=checked_text, help="Say this one thing instead of reading from the terminal."
        ),
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

    --system counts when a conversation begins. JSON, an object for each answer: id, messages, receipt (of opening the
    conversation), extended (of reading what was said after that). With --prompt that is one object; of several lines said, one
    object a line.
    """
    options = SamplingOptions(temperature=temperature, seed=seed)
    opening = [{"role": "system", "content": system}] if system else []
    with opened_repository(repo, is_needed=branch is not None) as repository:
        start = starting_name(repository, branch, None, "")
        engine = load(model, dtype, threads, trust_remote_code)
        opened = None if start is None else _resume(engine, repository, start)
        if opened is not None and not as_json:
            opened.say()
        for content in [prompt] if prompt is not None else _typed_lines():
            if opened is None:
                opened = _begin(engine, repository, [*opening, {"role": "user", "content": content}], options)
                if not as_json:
                    opened.say()
            else:
                opened = _say(opened, content, options)
            screen = Screen((lambda text: None) if as_json else show_text)
            opened = replace(opened, value=_answer(opened.value, max_tokens, screen))
            if repository is not None:
                opened.value.commit(repository, branch, message=content)
            screen.check()
            if as_json:
                print_json(_record(opened))


def _resume(engine: TransformersEngine, repository: Repository | None, name: str) -> Opened:
    value = checkout(engine, repository, name)
    if not value.messages:
        branch = name.removeprefix("refs/heads/")
        raise InvalidInput(f"{branch} is no conversation; go on with it by forkpoint run", code="chat", branch=branch)
    return Opened(value=value, receipt=value.receipt)


def _begin(
    engine: TransformersEngine,
    repository: Repository | None,
    messages: Sequence[dict[str, str]],
    options: SamplingOptions,
) -> Opened:
    with progress_bar("reading", "tokens") as progress:
        value = engine.chat(messages, sampling=options.sampling(), repository=repository, progress=progress)
    return Opened(value=value, receipt=value.receipt)


def _say(opened: Opened, content: str, options: SamplingOptions) -> Opened:
    with progress_bar("reading", "tokens") as progress:
        value = options.applied(opened.value).say(content, progress=progress)
    return replace(opened, value=value, extended=value.receipt)


def _answer(value: Continuation, max_tokens: int, screen: Screen) -> Continuation:
    """The answer is generated to its end also when it cannot be shown any more."""
    answered = value.answer(max_tokens, on_text=screen.show)
    screen.show("\n")
    return answered


def _record(opened: Opened) -> dict[str, object]:
    return {"id": opened.value.id, "messages": list(opened.value.messages), **opened.to_record()}


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise InvalidInput("a line that was said is no UTF-8", code="text") from None
        if line.strip():
            yield checked_text(line)
