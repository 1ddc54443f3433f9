"""Whole-text scoring from one state: the log-probability of each candidate as what comes next. The state is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.llm.choosing import log_softmax64
from forkpoint.llm.engines.base import Runtime
from forkpoint.llm.generation import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one candidate.

    Attributes:
        tokens: its token ids, with the end token where that was counted.
        logprobs: natural log-probability of each token given everything before it, under the unmodified model.
        total: their sum, or their mean where scores are normalised by tokens.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float


def score_alternatives(
    runtime: Runtime,
    cursor: Cursor,
    candidates: Sequence[Sequence[int]],
    *,
    end: Literal["ignore", "count"],
    normalise: Literal["none", "tokens"],
) -> list[Score]:
    """Score candidates in shared forward passes; a candidate's score does not depend on the others.

    Raises:
        InvalidInput: ``invalid_input.empty`` for a candidate without tokens, ``invalid_input.token`` for an id outside the vocabulary,
            ``invalid_input.option`` for an unknown option.
        CapacityExceeded: ``capacity.context`` when a candidate does not fit the context.
    """
    if end not in ("ignore", "count") or normalise not in ("none", "tokens"):
        raise InvalidInput(f"end={end!r}, normalise={normalise!r}: use ignore|count and none|tokens", code="option")
    if not candidates:
        return []
    wanted = [(*tokens, *_end_token(runtime, end)) for tokens in candidates]
    if not all(candidates):
        raise InvalidInput(f"candidate {[bool(item) for item in candidates].index(False)} has no tokens", code="empty")
    runtime.check_tokens([token for tokens in wanted for token in tokens])
    longest = cursor.state.length + max(map(len, wanted))
    if longest > runtime.max_context:
        raise CapacityExceeded(
            f"the longest candidate ends at {longest}, past the context of {runtime.max_context}; shorten it",
            code="context", have=runtime.max_context, want=longest,
        )  # fmt: skip
    rows = runtime.evaluate(cursor.state, [(cursor.tokens[-1], *tokens[:-1]) for tokens in wanted])
    scores = []
    for tokens, logits in zip(wanted, rows, strict=True):
        logprobs = tuple(float(log_softmax64(row)[token]) for row, token in zip(logits, tokens, strict=True))
        total = sum(logprobs)
        scores.append(
            Score(tokens=tokens, logprobs=logprobs, total=total / len(tokens) if normalise == "tokens" else total)
        )
    return scores


def _end_token(runtime: Runtime, end: Literal["ignore", "count"]) -> tuple[int, ...]:
    if end == "ignore":
        return ()
    if not runtime.codec.end_tokens:
        raise InvalidInput("this model names no end token; score with end='ignore'", code="option", option="end")
    return runtime.codec.end_tokens[:1]
