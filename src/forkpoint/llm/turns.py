"""Turns of a conversation: what a newly rendered conversation shares with the history so far is kept, the rest is to be appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forkpoint.llm.generation import Cursor
from forkpoint.llm.history import History

Message = Mapping[str, str]
"""``{"role": ..., "content": ...}``"""


def keep_common(cursor: Cursor, rendered: Sequence[int]) -> tuple[Cursor, str | None]:
    """The boundary after what ``rendered`` (at least one token) begins with of the history, and a note where something was left behind."""
    # After rollover the history is a middle piece of the conversation: no token of it stands where the rendering has it.
    common = 0 if cursor.offset else _common_length(cursor.tokens, rendered)
    left = len(cursor.tokens) - common
    if not left:
        return cursor, None
    note = f"the rendered conversation differs from token {common} on; {left} tokens were left behind"
    return _shortened(cursor, max(common, 1), rendered), note


def _common_length(have: Sequence[int], want: Sequence[int]) -> int:
    length = 0
    for left, right in zip(have, want, strict=False):
        if left != right:
            break
        length += 1
    return length


def _shortened(cursor: Cursor, length: int, tokens: Sequence[int]) -> Cursor:
    """The boundary after the first ``length`` of ``tokens``, of which all but the last are the cursor's own."""
    return Cursor(
        state=cursor.state.prefix(length - 1),
        tokens=History(tokens[:length]),
        prompt_length=min(cursor.prompt_length, length),
        offset=0,
    )
