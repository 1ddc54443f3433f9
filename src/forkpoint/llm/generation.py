"""The generation loop: step, choose, stream. A pure function of (boundary, state): stopping anywhere and resuming changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from forkpoint.errors import InvalidInput
from forkpoint.llm.choosing import Choice, choose, top_logprobs
from forkpoint.llm.engines.base import Logits, Runtime
from forkpoint.llm.history import History
from forkpoint.llm.resident.base import State
from forkpoint.llm.sampling import Sampling
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
    for _, item in run_many(runtime, [(start, sampling)], max_tokens):
        yield item


def run_many(
    runtime: Runtime, starts: Sequence[tuple[Cursor, Sampling]], max_tokens: int
) -> Iterator[tuple[int, GeneratedToken | Finish]]:
    """Generate from several boundaries in shared steps; yields (index in ``starts``, item), the last of each a :class:`Finish`.

    At most ``runtime.lanes`` run at once. When one ends, the next waiting takes its place. What each gets does not depend on the others
    as far as the runtime's claim of exactness says.
    """
    _check_max_tokens(max_tokens)
    waiting = deque(
        (index, Decoding(runtime, cursor, sampling, max_tokens)) for index, (cursor, sampling) in enumerate(starts)
    )
    running: list[tuple[int, Decoding]] = []
    while waiting or running:
        while waiting and len(running) < runtime.lanes:
            running.append(waiting.popleft())
        due: list[tuple[int, Decoding, tuple[State, int]]] = []
        for index, decoding in running:
            step = decoding.prepare()
            if step is None:
                yield index, decoding.finish()
            else:
                due.append((index, decoding, step))
        for (index, decoding, _), (state, logits) in zip(
            due, runtime.step_many([step for _, _, step in due]), strict=True
        ):
            yield index, decoding.take(state, logits)
        running = [(index, decoding) for index, decoding, _ in due]


@final
class Decoding:
    """One boundary in the course of generation: what it evaluates next, and what comes of it. Belongs to one loop."""

    def __init__(self, runtime: Runtime, start: Cursor, sampling: Sampling, max_tokens: int) -> None:
        self._runtime = runtime
        self._start = self._cursor = start
        self._sampling = sampling
        self._num_left = max_tokens
        self._stream = _resumed_stream(runtime, start, sampling)
        self._fresh = _FreshText(num_old=len(self._stream.held) - start.num_unshown)

    def prepare(self) -> tuple[State, int] | None:
        """The state and the pending token to evaluate next, None at the end. Rolls over where the context is full and the model can."""
        if not self._num_left or self._has_ended():
            return None
        if self._cursor.state.length >= self._runtime.max_context:
            if not self._runtime.rolls_over:
                return None
            self._cursor = roll_over(self._runtime, self._cursor)
        return self._cursor.state, self._cursor.tokens[-1]

    def take(self, state: State, logits: Logits) -> GeneratedToken:
        """Choose a token from the logits of what was prepared; ``state`` is the one after it."""
        cursor, runtime, stream = self._cursor, self._runtime, self._stream
        choice = choose(
            logits,
            history=cursor.tokens,
            prompt_length=cursor.prompt_length,
            position=cursor.offset + len(cursor.tokens),
            sampling=self._sampling,
        )
        text = self._fresh.of("" if choice.token in runtime.codec.end_tokens else stream.push(choice.token))
        self._num_left -= 1
        self._cursor = Cursor(
            state=state,
            tokens=cursor.tokens.append(choice.token),
            prompt_length=cursor.prompt_length,
            offset=cursor.offset,
            num_unshown=max(0, len(stream.held) - self._fresh.num_old),
        )
        return GeneratedToken(choice=choice, text=text, logits=logits, cursor=self._cursor)

    def finish(self) -> Finish:
        """Why it ended, and the text held back until now."""
        has_ended = self._has_ended()
        rest = self._stream.finish() if has_ended and self._cursor is not self._start else self._stream.held
        text = self._fresh.of(rest)
        return Finish(reason="stop" if has_ended else "length", text=text, cursor=replace(self._cursor, num_unshown=0))

    def _has_ended(self) -> bool:
        return self._stream.stopped or _has_ended(self._runtime, self._cursor)


@final
class Transcript:
    """Collects what one run yields into a :class:`Completion`."""

    def __init__(self, start: Cursor, top_logprobs: int) -> None:
        self._start = start
        self._num_top = top_logprobs
        self._pieces: list[str] = []
        self._tops: list[tuple[Choice, ...]] = []
        self.choices: list[Choice] = []
        self.end: Finish | None = None

    def add(self, item: GeneratedToken | Finish) -> None:
        """Note one item."""
        self._pieces.append(item.text)
        if isinstance(item, Finish):
            self.end = item
            return
        self.choices.append(item.choice)
        if self._num_top:
            self._tops.append(top_logprobs(item.logits, self._num_top))

    def completion(self) -> Completion:
        """The whole, once the run has ended."""
        assert self.end is not None
        return Completion(
            text="".join(self._pieces),
            choices=tuple(self.choices),
            top_logprobs=tuple(self._tops),
            finish_reason=self.end.reason,
            dropped=self.end.cursor.offset - self._start.offset,
        )


def _check_max_tokens(max_tokens: int) -> None:
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise InvalidInput(f"max_tokens is {max_tokens}; use 0 or more", code="max_tokens", max_tokens=str(max_tokens))


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
