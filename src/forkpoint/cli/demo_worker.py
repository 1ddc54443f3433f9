"""The process that ``forkpoint demo`` kills, and how the two speak.

The worker tells one JSON object a line on standard output: what it restored, then every token as it comes. After each it waits
for a byte on standard input. So it is never more than one token ahead of its reader, however fast it is, and a kill finds it at
work. Nothing here shows anything to a person.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from forkpoint.ids import digest_of

if TYPE_CHECKING:
    from forkpoint.llm import StreamedToken

COMMIT_EVERY: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """How the worker came to its state, as it tells it; fields as in ``forkpoint.llm.Receipt``."""

    claim: str
    tokens_restored: int
    tokens_computed: int
    chunks_verified: int
    bytes_restored: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as the worker tells it. ``token`` and ``logits`` are None for text that was held back until the end.

    Attributes:
        text: what to show with it.
        token: its id.
        logits: digest of the float32 logits that it was chosen from.
    """

    text: str
    token: int | None
    logits: str | None

    @classmethod
    def of(cls, item: StreamedToken) -> Token:
        """What is told of an item of a stream."""
        token = None if item.choice is None else item.choice.token
        logits = None if item.logits is None else digest_of([item.logits.tobytes()])
        return cls(text=item.text, token=token, logits=logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker is to do: write ``count`` tokens on from ``name``, committing to ``branch`` as it goes."""

    folder: Path
    name: str
    branch: str
    count: int
    model: str
    dtype: str

    def start(self) -> subprocess.Popen[str]:
        """A worker at it, its streams piped. Leaving the ``with`` of it waits for it."""
        command = [sys.executable, "-m", "forkpoint.cli.main", "demo-worker"]
        arguments = [str(self.folder), self.name, self.branch, str(self.count), self.model, self.dtype]
        return subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("demo-worker", hidden=True)(worker)


def worker(folder: Path, name: str, branch: str, count: int, model: str, dtype: str) -> None:
    """The process that is killed, and the one that goes on."""
    from forkpoint.llm import TransformersEngine
    from forkpoint.repo.repository import Repository

    with Repository.open(folder) as repository:
        value = TransformersEngine.load(model, dtype=dtype).checkout(repository, name)
        receipt = value.receipt
        _tell(
            Restored(
                claim=receipt.claim,
                tokens_restored=receipt.tokens_restored,
                tokens_computed=receipt.tokens_computed,
                chunks_verified=receipt.chunks_verified,
                bytes_restored=receipt.bytes_restored,
                elapsed_ms=receipt.elapsed_ms,
            )
        )
        for number, item in enumerate(value.stream(count), start=1):
            value = item.continuation
            _tell(Token.of(item))
            if number % COMMIT_EVERY == 0:
                value.commit(repository, branch, message=f"after {number} tokens")
        value.commit(repository, branch, message="the end")


def told(process: subprocess.Popen[str]) -> tuple[Restored, Iterator[Token]] | None:
    """What a worker restored, and its tokens as they come; None from one that ended before it could tell.

    The byte that a worker waits for is sent before its word is given out here, so that it is at work meanwhile.
    """
    lines = _answered(process)
    first = next(lines, None)
    return None if first is None else (Restored(**json.loads(first)), (Token(**json.loads(line)) for line in lines))


def _answered(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        with suppress(BrokenPipeError):  # a worker that has ended since; its status says why
            os.write(process.stdin.fileno(), b"\n")
        yield line


def _tell(word: Restored | Token) -> None:
    print(json.dumps(asdict(word)), flush=True)
    sys.stdin.buffer.read(1)
