"""The generation loop: step, choose, stream. A pure function of (boundary, state): stopping anywhere and resuming changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from forkpoint.errors import InvalidInput
from forkpoint.llm.engines.base import Logits, Runtime
from forkpoint.llm.history import History
from forkpoint.llm.resident.base import State
from forkpoint.llm.sampling import Choice, Sampling, choose, top_logprobs
from forkpoint.llm.text import TextStream

FinishReason = Literal["stop", "length"]
_CONTEXT_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one call of ``generate`` produced.

    Attributes:
        text: generated text, special tokens and what follows a stop string left out. A limit never ends it inside a character: going on
            brings the character whole, and texts of calls that go on from one another join to the text of one call.
        choices: one for each generated token: id and logprob.
        top_logprobs: for each token the best alternatives, if they were asked for.
        finish_reason: ``stop`` (end token or stop string) or ``length`` (token limit or end of context).
        dropped: tokens dropped from the front of the history by rollover.
    """

    text: str
    choices: tuple[Choice, ...]
    top_logprobs: tuple[tuple[Choice, ...], ...]
    finish_reason: FinishReason
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A boundary in the course of generation, with its state. ``tokens`` includes the pending one.

    ``num_unshown`` counts characters that the stream which made this cursor had not given out yet. It is not part of the boundary: what
    was restored counts as shown.
    """

    state: State
    tokens: History
    prompt_length: int
    offset: int
    num_unshown: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """One token: the choice, the text that may be shown with it, the logits it came from, and the boundary after it."""

    choice: Choice
    text: str
    logits: Logits
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end: why, what text was held back, and the boundary."""

    reason: FinishReason
    text: str
    cursor: Cursor


def run(runtime: Runtime, start: Cursor, sampling: Sampling, max_tokens: int) -> Iterator[GeneratedToken | Finish]:
    """Generate token by token; the last item is a :class:`Finish`.

    A boundary in mid-generation is picked up where it stands: its generated tokens are fed to the text stream again, silently, so that
    a stop string may begin before the boundary and end after it. Text that was given out before is not repeated.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise InvalidInput(f"max_tokens is {max_tokens}; use 0 or more", code="max_tokens", max_tokens=str(max_tokens))
    cursor = start
    stream = _resumed_stream(runtime, cursor, sampling)
    fresh = _FreshText(num_old=len(stream.held) - start.num_unshown)
    for _ in range(max_tokens):
        if stream.stopped or _has_ended(runtime, cursor):
            break
        if cursor.state.length >= runtime.max_context:
            if not runtime.rolls_over:
                break
            cursor = roll_over(runtime, cursor)
        state, logits = runtime.step(cursor.state, cursor.tokens[-1])
        choice = choose(
            logits,
            history=cursor.tokens,
            prompt_length=cursor.prompt_length,
            position=cursor.offset + len(cursor.tokens),
            sampling=sampling,
        )
        text = fresh.of("" if choice.token in runtime.codec.end_tokens else stream.push(choice.token))
        cursor = Cursor(
            state=state,
            tokens=cursor.tokens.append(choice.token),
            prompt_length=cursor.prompt_length,
            offset=cursor.offset,
            num_unshown=max(0, len(stream.held) - fresh.num_old),
        )
        yield GeneratedToken(choice=choice, text=text, logits=logits, cursor=cursor)
    has_ended = stream.stopped or _has_ended(runtime, cursor)
    rest = stream.finish() if has_ended and cursor is not start else stream.held
    yield Finish(reason="stop" if has_ended else "length", text=fresh.of(rest), cursor=replace(cursor, num_unshown=0))


@final
class _FreshText:
    """Leaves out the first ``num_old`` characters of a text that comes in pieces."""

    def __init__(self, *, num_old: int) -> None:
        self.num_old = max(0, num_old)

    def of(self, piece: str) -> str:
        """What of a piece is new."""
        old = min(self.num_old, len(piece))
        self.num_old -= old
        return piece[old:]


def best_alternatives(logits: Logits, count: int) -> tuple[Choice, ...]:
    """The ``count`` most probable tokens of a step, or nothing for 0."""
    return top_logprobs(logits, count) if count else ()


def roll_over(runtime: Runtime, cursor: Cursor) -> Cursor:
    """Keep the newest half of the context and replay it from position zero.

    Right for learned absolute positions, where keeping the old state under new positions would not equal a fresh pass over the suffix.
    """
    keep = max(runtime.max_context // 2, 1)
    dropped = len(cursor.tokens) - keep
    tokens = History(cursor.tokens[dropped:])
    state = runtime.advance(runtime.strategy.empty(), tokens[:-1])
    return Cursor(
        state=state, tokens=tokens, prompt_length=max(0, cursor.prompt_length - dropped), offset=cursor.offset + dropped
    )


def _resumed_stream(runtime: Runtime, cursor: Cursor, sampling: Sampling) -> TextStream:
    given = cursor.tokens[max(0, cursor.prompt_length - _CONTEXT_TOKENS) : cursor.prompt_length]
    stream = TextStream(runtime.codec.decode_visible, stop=sampling.stop, context=given)
    for token in cursor.tokens[cursor.prompt_length :]:
        if not stream.stopped and token not in runtime.codec.end_tokens:
            stream.push(token)
    return stream


def _has_ended(runtime: Runtime, cursor: Cursor) -> bool:
    is_generated = len(cursor.tokens) > cursor.prompt_length
    return is_generated and cursor.tokens[-1] in runtime.codec.end_tokens
