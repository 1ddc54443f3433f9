"""A continuation: an immutable value that is a language model in mid-thought.

``extend``, ``generate``, ``score`` and ``fork`` return new values and leave the old one usable; two uses of one value are a fork.
State covers every token but the last: the *pending* one is evaluated by the next step. Nothing here knows torch or SQL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final, overload

import numpy as np

from forkpoint.errors import InvalidInput
from forkpoint.ids import ManifestId
from forkpoint.llm.boundary import Boundary
from forkpoint.llm.capture import capture
from forkpoint.llm.choosing import Choice
from forkpoint.llm.engines.base import Logits, PrefillProgress, Runtime, no_progress
from forkpoint.llm.generation import Completion, Cursor, GeneratedToken, Transcript, run
from forkpoint.llm.lineage import Lineage
from forkpoint.llm.receipt import Receipt
from forkpoint.llm.resident.base import Fetch
from forkpoint.llm.sampling import Sampling
from forkpoint.llm.scoring import Score, score_alternatives
from forkpoint.llm.snapshot import snapshot_parts, snapshot_size
from forkpoint.llm.together import extend_many, transcribe_many
from forkpoint.llm.turns import Message, keep_common
from forkpoint.repo.publication import Publication
from forkpoint.repo.repository import Repository
from forkpoint.state.canonical import Value
from forkpoint.state.draft import Draft
from forkpoint.state.manifest import Manifest
from forkpoint.state.prefix import CHUNK_TOKENS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedToken:
    """One item of :meth:`Continuation.stream`: a token, the text to show with it, its logits, and the continuation after it.

    ``choice`` and ``logits`` are None for text that was held back until the end.
    """

    choice: Choice | None
    text: str
    logits: Logits | None
    continuation: Continuation


@final
class Continuation:
    """See the module. Made by an engine's ``start``, ``chat``, ``checkout`` or ``restore``, never directly."""

    __slots__ = (
        "_caveats",
        "_cursor",
        "_is_trusted",
        "_lineage",
        "_runtime",
        "completion",
        "messages",
        "receipt",
        "sampling",
    )

    def __init__(
        self,
        runtime: Runtime,
        cursor: Cursor,
        *,
        sampling: Sampling,
        receipt: Receipt,
        lineage: Lineage,
        is_trusted: bool = True,
        messages: tuple[Message, ...] = (),
        completion: Completion | None = None,
        caveats: tuple[str, ...] = (),
    ) -> None:
        assert len(cursor.tokens) == cursor.state.length + 1
        self._runtime = runtime
        self._cursor = cursor
        self._lineage = lineage
        self._is_trusted = is_trusted
        # What weakens the claim of everything made from this value, such as a restore across an execution difference.
        self._caveats = caveats
        self.sampling = sampling
        """Parameters, seed and stream with which it goes on."""
        self.receipt = receipt
        """How this value came to be."""
        self.messages: tuple[Message, ...] = tuple(dict(message) for message in messages)
        """The conversation, if it is one; the value's own copy."""
        self.completion = completion
        """What ``generate`` produced, if this value came from it."""

    # ---- what it is ----

    @property
    def tokens(self) -> tuple[int, ...]:
        """The history, pending token included: ``position + 1`` ids."""
        return tuple(self._cursor.tokens)

    @property
    def position(self) -> int:
        """Processed tokens: the position at which the pending token is evaluated."""
        return self._cursor.state.length

    @property
    def pending(self) -> int:
        """The token that the next step evaluates."""
        return self._cursor.tokens[-1]

    @property
    def text(self) -> str:
        """The history as text, special tokens written out."""
        return self._runtime.codec.decode(self.tokens)

    @property
    def id(self) -> ManifestId:
        """Digest of the manifest that a commit of this value writes; hashes the state on first use."""
        return self._lineage.identify(self._draft)

    @property
    def state_bytes(self) -> int:
        """Bytes of state behind this value, shared or not."""
        return self.position * sum(group.token_bytes for group in self._runtime.groups)

    def __repr__(self) -> str:
        return f"<Continuation of {self._runtime.name} at {self.position}, pending {self.pending}>"

    def belongs_to(self, runtime: Runtime) -> bool:
        """Whether this is a continuation of that loaded model."""
        return self._runtime is runtime

    # ---- going on ----

    def extend(self, text: str | Sequence[int], *, progress: PrefillProgress = no_progress) -> Continuation:
        """Append given tokens; text is tokenised alone, without special tokens.

        Raises:
            InvalidInput: ``invalid_input.empty`` for nothing to append, ``invalid_input.token`` for an id outside the vocabulary.
            CapacityExceeded: ``capacity.context``.
            Incompatible: ``incompatible.weights`` when the model's weights changed since it was loaded.
        """
        added = self._runtime.codec.encode(text) if isinstance(text, str) else list(text)
        if not added:
            raise InvalidInput("there is nothing to extend with; give at least one token", code="empty")
        return self._extended(self._cursor, added, progress=progress)

    def generate(
        self,
        max_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        top_logprobs: int = 0,
    ) -> Continuation:
        """Generate until an end token, a stop string, ``max_tokens`` or the end of the context.

        Returns:
            A value whose ``completion`` says what was generated and why it ended. An end token, and the tokens that held a stop string,
            are part of its history.
        """
        started = time.perf_counter()
        sampling = sampling or self.sampling
        transcript = Transcript(self._cursor, top_logprobs)
        for item in run(self._runtime, self._cursor, sampling, max_tokens):
            transcript.add(item)
            if item.text:
                on_text(item.text)
        return self._generated(transcript, sampling, started)

    def generate_many(
        self,
        suffixes: Sequence[str | Sequence[int]],
        max_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        top_logprobs: int = 0,
    ) -> list[Continuation]:
        """Go on from this one value in several ways at once: with each suffix (text or token ids; empty for none), in shared steps.

        What they have in common is held in memory once, and read once a step for all. Returns one value a suffix, as ``generate`` would
        have given it alone.
        """
        _check_list(suffixes)
        values = self._extended_by(suffixes)
        return generate_together(values, max_tokens, sampling=sampling, top_logprobs=top_logprobs)

    def best_of(
        self,
        count: int,
        max_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        score: Callable[[Continuation], float] | None = None,
    ) -> Continuation:
        """Generate on streams 0 .. count-1 in shared steps; the value of the highest ``score``, the lowest stream on ties.

        Args:
            score: of a generated value; the mean log-probability of its tokens unless told otherwise.
        """
        start = self if sampling is None else self.with_sampling(sampling)
        _check_count("best_of", count)
        if count != 1 and start.sampling.temperature == 0.0:
            raise InvalidInput(
                "at temperature 0 every stream gives the same; give a sampling with a temperature", code="temperature"
            )
        return max(generate_together(start.fork(count), max_tokens), key=score or mean_logprob)

    def stream(self, max_tokens: int = 128, *, sampling: Sampling | None = None) -> Iterator[StreamedToken]:
        """Generate, yielding each token as soon as it is chosen; text held back to the end comes last, with no token.

        Stopping the iteration anywhere and going on from an item's ``continuation`` gives what an uninterrupted run gives.
        """
        sampling, value = sampling or self.sampling, self
        for item in run(self._runtime, self._cursor, sampling, max_tokens):
            if isinstance(item, GeneratedToken) or item.text:
                choice, logits = (item.choice, item.logits) if isinstance(item, GeneratedToken) else (None, None)
                computed = 0 if choice is None else 1
                value = value._after(item.cursor, "generate", None, computed=computed, sampling=sampling)
                yield StreamedToken(choice=choice, text=item.text, logits=logits, continuation=value)

    def logits(self) -> Logits:
        """What the next step will see: float32 ``[vocabulary]``. Nothing is changed or kept."""
        (rows,) = self._runtime.evaluate(self._cursor.state, [[self.pending]])
        return np.asarray(rows[0])

    def score(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        end: Literal["ignore", "count"] = "ignore",
        normalise: Literal["none", "tokens"] = "none",
    ) -> list[Score]:
        """Log-probability of each whole text as what comes next, from this one state, which is not touched.

        Args:
            texts: strings, each tokenised alone without special tokens, or token ids.
            end: ``count`` adds the log-probability of the model's first end token after the text.
            normalise: ``tokens`` divides by the number of tokens counted.
        """
        _check_list(texts)
        candidates = [self._runtime.codec.encode(text) if isinstance(text, str) else list(text) for text in texts]
        return score_alternatives(self._runtime, self._cursor, candidates, end=end, normalise=normalise)

    @overload
    def fork(self) -> Continuation: ...
    @overload
    def fork(self, count: int) -> list[Continuation]: ...
    def fork(self, count: int | None = None) -> Continuation | list[Continuation]:
        """A plain fork keeps the random stream and so repeats exactly; ``fork(n)`` gives n values on streams 0 .. n-1. Copies nothing."""
        if count is None:
            return self._forked(self.sampling)
        _check_count("fork", count)
        return [self.with_sampling(replace(self.sampling, stream=stream)) for stream in range(count)]

    def with_sampling(self, sampling: Sampling) -> Continuation:
        """The same state, going on with other parameters, seed or stream."""
        return self._forked(sampling)

    def say(self, content: str, *, role: str = "user", progress: PrefillProgress = no_progress) -> Continuation:
        """Add a chat turn: the whole conversation is rendered again, and what it shares with this history is kept.

        The receipt says how many tokens matched, and what did not.
        """
        messages = (*self.messages, {"role": role, "content": content})
        rendered = self._runtime.codec.render_chat([dict(message) for message in messages])
        if not rendered:
            raise InvalidInput("the chat template renders this conversation as nothing", code="chat")
        cursor, note = keep_common(self._cursor, rendered)
        notes = () if note is None else (note,)
        value = self._extended(cursor, rendered[len(cursor.tokens) :], progress=progress, notes=notes)
        return value._with_messages(messages)

    def answer(
        self,
        max_tokens: int = 512,
        *,
        sampling: Sampling | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Continuation:
        """Generate the model's turn of a conversation and record it in ``messages``."""
        value = self.generate(max_tokens, sampling=sampling, on_text=on_text)
        assert value.completion is not None
        return value._with_messages((*self.messages, {"role": "assistant", "content": value.completion.text}))

    # ---- making it last ----

    def commit(
        self,
        repository: Repository,
        branch: str | None = None,
        *,
        message: str = "",
        expect: ManifestId | Literal["fast-forward", "anything"] = "fast-forward",
    ) -> Publication:
        """Make this value durable and move ``branch`` to it. When it returns, ``kill -9`` loses nothing.

        Raises:
            Conflict: ``conflict.ref`` when the branch is not where ``expect`` says.
            Incompatible: ``incompatible.weights`` when the model's weights changed; nothing is advertised then.
        """
        publication = repository.publish(self._draft(), branch=branch, expect=expect, message=message)
        self._lineage.mark_committed(publication.manifest_id)
        self._remember(publication.manifest, lambda ref: repository.chunk(ref.chunk_id))
        return publication

    def snapshot(self) -> bytes:
        """This value as one byte string (a bundle), for another process on the same model."""
        self._runtime.check_weights()
        return b"".join(snapshot_parts(self._draft()))

    def snapshot_size(self) -> int:
        """Size of :meth:`snapshot` in bytes."""
        return snapshot_size(self._draft())

    # ---- inside ----

    def _draft(self) -> Draft:
        payload: dict[str, Value] = {}
        if self.messages:
            payload["messages"] = [dict(turn) for turn in self.messages]
        if self._caveats:
            payload["caveats"] = list(self._caveats)
        return capture(
            self._runtime,
            self._cursor.state,
            self._cursor.tokens[:-1],
            self._boundary(),
            parents=self._lineage.parents(),
            payload=payload,
            is_trusted=self._is_trusted,
        )

    def _boundary(self) -> Boundary:
        cursor = self._cursor
        return Boundary(
            position=cursor.state.length,
            pending=self.pending,
            prompt_length=cursor.prompt_length,
            offset=cursor.offset,
            sampling=self.sampling,
            prefilled=cursor.state.prefilled,
        )

    def _remember(self, manifest: Manifest, fetch: Fetch) -> None:
        for index, group in enumerate(manifest.groups):
            for number, ref in enumerate(group.chunks[: self.position // CHUNK_TOKENS]):
                self._cursor.state.remember_chunk(index, number, ref, fetch)

    def _extended(
        self, cursor: Cursor, added: Sequence[int], *, progress: PrefillProgress, notes: tuple[str, ...] = ()
    ) -> Continuation:
        started = time.perf_counter()
        (grown,) = extend_many(self._runtime, cursor, [added], progress)
        if not added:  # whatever was generated is given now
            grown = replace(cursor, prompt_length=len(cursor.tokens), num_unshown=0)
        return self._after(grown, "extend", started, computed=len(added), sampling=self.sampling, notes=notes)

    def _extended_by(self, suffixes: Sequence[str | Sequence[int]]) -> list[Continuation]:
        """One value a suffix, computed in shared passes."""
        started, encode = time.perf_counter(), self._runtime.codec.encode
        added = [encode(suffix) if isinstance(suffix, str) else list(suffix) for suffix in suffixes]
        return [
            self._after(grown, "extend" if tokens else "fork", started, computed=len(tokens), sampling=self.sampling)
            for grown, tokens in zip(extend_many(self._runtime, self._cursor, added), added, strict=True)
        ]

    def _generated(self, transcript: Transcript, sampling: Sampling, started: float) -> Continuation:
        assert transcript.end is not None
        return self._after(
            transcript.end.cursor, "generate", started,
            computed=len(transcript.choices), sampling=sampling, completion=transcript.completion(),
        )  # fmt: skip

    def _after(
        self,
        cursor: Cursor,
        operation: str,
        started: float | None,
        *,
        computed: int,
        sampling: Sampling,
        completion: Completion | None = None,
        notes: tuple[str, ...] = (),
    ) -> Continuation:
        receipt = Receipt(
            operation=operation,
            claim=self.receipt.claim,
            tokens_reused=max(0, cursor.state.length - computed),
            tokens_computed=computed,
            elapsed_ms=0.0 if started is None else (time.perf_counter() - started) * 1e3,
            notes=(*self._caveats, *notes),
        )
        return Continuation(
            self._runtime,
            cursor,
            sampling=sampling,
            receipt=receipt,
            lineage=self._lineage.child(),
            is_trusted=self._is_trusted,
            messages=self.messages,
            completion=completion,
            caveats=self._caveats,
        )

    def _forked(self, sampling: Sampling) -> Continuation:
        return self._after(self._cursor, "fork", None, computed=0, sampling=sampling)

    def _with_messages(self, messages: tuple[Message, ...]) -> Continuation:
        return Continuation(
            self._runtime,
            self._cursor,
            sampling=self.sampling,
            receipt=self.receipt,
            lineage=self._lineage.child(),
            is_trusted=self._is_trusted,
            messages=messages,
            completion=self.completion,
            caveats=self._caveats,
        )


def generate_together(
    values: Sequence[Continuation], max_tokens: int, *, sampling: Sampling | None = None, top_logprobs: int = 0
) -> list[Continuation]:
    """Generate from several values of one engine in shared steps; each as its own ``generate`` would have given it.

    Args:
        sampling: for all of them; None leaves each its own.

    Raises:
        InvalidInput: ``invalid_input.engine`` when they are of different engines.
    """
    if not values:
        return []
    runtime, started = values[0]._runtime, time.perf_counter()
    if any(value._runtime is not runtime for value in values):
        raise InvalidInput(
            "these continuations are of different engines; generate from those of one at a time", code="engine"
        )
    samplings = [sampling or value.sampling for value in values]
    starts = [(value._cursor, each) for value, each in zip(values, samplings, strict=True)]
    transcripts = transcribe_many(runtime, starts, max_tokens, top_logprobs)
    return [
        value._generated(transcript, each, started)
        for value, transcript, each in zip(values, transcripts, samplings, strict=True)
    ]


def _check_count(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidInput(f"{what}({count}): give 1 or more", code="count", count=str(count))


def _check_list(texts: Sequence[str | Sequence[int]]) -> None:
    """A text alone is a sequence too, of its characters; nobody means that."""
    if isinstance(texts, str | bytes):
        raise InvalidInput(f"give a list of texts, not one: [{texts!r}]", code="list")


def mean_logprob(value: Continuation) -> float:
    """Mean natural log-probability of what was generated; minus infinity for nothing."""
    choices = () if value.completion is None else value.completion.choices
    return sum(choice.logprob for choice in choices) / len(choices) if choices else float("-inf")
