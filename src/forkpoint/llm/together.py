"""Many boundaries at once: extended in shared passes, generated from in shared steps. Each gets what it would have got alone."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.llm.engines.base import PrefillProgress, Runtime, no_progress
from forkpoint.llm.generation import Cursor, Transcript, run_many
from forkpoint.llm.history import History
from forkpoint.llm.sampling import Sampling


def extend_many(
    runtime: Runtime, cursor: Cursor, suffixes: Sequence[Sequence[int]], progress: PrefillProgress = no_progress
) -> list[Cursor]:
    """The boundary after each of several suffixes, whose tokens count as prompt; ``cursor`` itself after an empty one.

    Raises:
        InvalidInput: ``invalid_input.token`` for an id outside the vocabulary. CapacityExceeded: ``capacity.context`` or
            ``capacity.pages``.
    """
    for added in suffixes:
        runtime.check_tokens(added)
    states = runtime.advance_many(
        [(cursor.state, [cursor.tokens[-1], *added[:-1]] if added else []) for added in suffixes], progress
    )
    grown = []
    for state, added in zip(states, suffixes, strict=True):
        tokens = History([*cursor.tokens, *added])
        after = Cursor(state=state, tokens=tokens, prompt_length=len(tokens), offset=cursor.offset)
        grown.append(after if added else cursor)
    return grown


def transcribe_many(
    runtime: Runtime, starts: Sequence[tuple[Cursor, Sampling]], max_tokens: int, top_logprobs: int
) -> list[Transcript]:
    """What generating from each of several boundaries gives, all to their ends."""
    transcripts = [Transcript(cursor, top_logprobs) for cursor, _ in starts]
    for index, item in run_many(runtime, starts, max_tokens):
        transcripts[index].add(item)
    return transcripts
