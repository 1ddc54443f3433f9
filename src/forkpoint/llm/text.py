"""Tokens to text that is safe to show: no split character, no split glyph, nothing from a stop string on.

    tokens -> TokenDecoder -> certain characters -> StopMatcher -> characters to keep -> whole glyphs -> shown

A piece of text is held back while more tokens could still change it: a character whose UTF-8 bytes are spread over tokens, a
text that may become a stop string, the last grapheme cluster (Unicode Standard Annex 29: an emoji with skin tone or joiner,
a flag, a letter with combining marks), because the next character may extend it.

What is shown depends on the tokens alone, and the concatenation of what is shown on the text alone. A stream that is fed the
same tokens again after a restore is in the same state; there is nothing else to store.

This module knows a ``decode`` function and nothing of models or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

import regex

from forkpoint.errors import InvalidInput

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Text of a list of token ids, undecodable bytes as U+FFFD (``tokenizers.Tokenizer.decode``). Clean-up of spaces must be off:
with it a later token changes earlier text."""

REPLACEMENT: Final = "\ufffd"
_MAX_UNFINISHED: Final = 3
"""Bytes of an unfinished UTF-8 character; a byte-fallback decoder writes one U+FFFD for each."""

_WINDOW: Final = 16
_TAIL: Final = 8
"""Tokens decoded per push, and tokens kept when the window moves: more than an unfinished character can span."""

_CONTEXT: Final = 64
"""Tokens of a context that are used: enough that a run of byte tokens, which must be met from its start, begins within."""

_MAX_CLUSTER: Final = 128
"""A longer grapheme cluster (endless combining marks) is shown in parts; UAX 15 calls 30 marks the limit of real text."""

_CLUSTER: Final = regex.compile(r"\X")


@final
class TokenDecoder:
    """Decodes token by token; the concatenated text equals ``decode`` of all tokens at once.

    The technique is the prefix and read offset of text-generation-inference: a recent window is decoded whole and what it
    adds is new, so that a decoder that treats the first token apart (SentencePiece strips its space) adds the same text. The
    window has at most 16 tokens, whatever the length of the text.

    One exception to the equality: a byte-fallback decoder turns a whole run of byte tokens into U+FFFD if any part of the run
    is not UTF-8. Characters of such a run that were complete stay as shown, and the undecodable rest follows as U+FFFD. (Nor
    can a U+FFFD that a model spells in three byte tokens be told from undecodable ones.)

    Args:
        decode: see ``Decode``.
        context: tokens before the generated ones, of which the last 64 are pushed here and their certain text dropped: the
            first generated token keeps its leading space, and a character begun in the prompt is completed.
    """

    def __init__(self, decode: Decode, *, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._text = ""
        self._shown = ""
        self._clean = [0]
        for token in context[-_CONTEXT:]:
            self.push(token)

    def push(self, token: int) -> str:
        """Characters that no later token can change, after one more token."""
        window = [*self._window, token]
        text = self._decode(window)
        if text == self._text and not self._decode([token, token]):
            return ""  # a skipped special token: never enters the window, so that it cannot crowd out the others
        self._window, self._text = window, text
        if not text.startswith(self._shown):
            self._restart()
        return self._advance()

    def finish(self) -> str:
        """The characters still held back; an unfinished one is U+FFFD. Nothing may be pushed afterwards."""
        return self._text[len(self._shown) :]

    def _advance(self) -> str:
        """Give out what is certain and not yet given."""
        certain = _certain(self._text)
        piece = certain[len(self._shown) :]
        self._shown += piece
        if self._shown == self._text:
            self._clean.append(len(self._window))
        if len(self._window) >= _WINDOW:
            self._slide()
        return piece

    def _restart(self) -> None:
        """Decode what follows the last complete text on its own: what was given out cannot change.

        A byte run with an unfinished character at its end decodes to U+FFFD throughout, its complete characters too.
        """
        self._cut(self._clean[-1])
        self._shown = ""

    def _slide(self) -> None:
        """Drop the oldest tokens. All certain text has been given out, before and after, so the new window's is known.

        A cut where the text was complete is preferred (a byte run cut inside a character would not decode); where tokens
        straddle characters throughout, the cut character becomes U+FFFD at the start of the window, given out long ago.
        """
        last = len(self._window) - _TAIL
        self._cut(max((cut for cut in self._clean if 0 < cut <= last), default=last))
        self._shown = _certain(self._text)

    def _cut(self, start: int) -> None:
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._clean = [cut - start for cut in self._clean if cut >= start] or [0]


def _certain(text: str) -> str:
    """``text`` without the U+FFFD at its end that may stand for an unfinished character."""
    end = len(text)
    while end > max(0, len(text) - _MAX_UNFINISHED) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


@final
class StopMatcher:
    """Passes text on up to the first completed stop string.

    The text ends before the occurrence whose *last* character comes first, for then generation stops; of several that end
    there, before the longest. How the text is divided over calls makes no difference.

    Args:
        stop: non-empty strings, compared by code point.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or not all(stop):
            raise InvalidInput(f"stop is {stop!r}; give a sequence of non-empty strings", code="stop", value=repr(stop))
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=1)
        self._held = ""
        self.stopped = False

    @property
    def held(self) -> str:
        """The end of the text so far that may start a stop string."""
        return self._held

    def push(self, text: str) -> str:
        """Text that is surely not the start of a stop string; after a match, only what comes before it."""
        buffer = self._held + text
        ends = [(start + len(stop), start) for stop in self._stop if (start := buffer.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return buffer[: min(ends)[1]]
        keep = len(buffer) - self._partial(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The text held back as a possible start of a stop string."""
        held, self._held = self._held, ""
        return held

    def _partial(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that starts a stop string."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-size:]) for stop in self._stop):
                return size
        return 0


@final
class TextStream:
    """Turns generated tokens into pieces of text that can be shown at once and are never taken back.

    At a stop string everything before it is given out, last glyph included, and everything from its first character on
    is dropped, with whatever else the same token brought. ``finish`` gives out all that was held back.

    Args:
        decode: see ``Decode``.
        stop: non-empty strings; the text ends before the first completed one (see ``StopMatcher``).
        context: tokens before the generated ones (see ``TokenDecoder``); their text is neither shown nor searched.

    Attributes:
        stopped: whether a stop string was reached.
    """

    def __init__(self, decode: Decode, *, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._decoder = TokenDecoder(decode, context=context)
        self._matcher = StopMatcher(stop)
        self._glyphs = ""
        self._pieces: list[str] = []
        self._finished = False

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    @property
    def held(self) -> str:
        """Whole characters that are held back, because they may belong to a longer glyph or to a stop string."""
        return self._glyphs + self._matcher.held

    def push(self, token: int) -> str:
        """Text that is safe to show after one more token.

        Raises:
            InvalidInput: ``invalid_input.stream`` after a stop or ``finish``.
        """
        if self.stopped or self._finished:
            raise InvalidInput("this text stream has ended; make another for more tokens", code="stream", token=token)
        return self._give(self._matcher.push(self._decoder.push(token)))

    def finish(self) -> str:
        """The rest of the text when no token follows; empty after a stop or a second time."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        rest = self._matcher.push(self._decoder.finish())
        return self._give(rest + self._matcher.finish())

    def _give(self, text: str) -> str:
        """Whole glyphs of the held back ones and ``text``; all of it when nothing can follow."""
        glyphs = self._glyphs + text
        ended = self.stopped or self._finished
        end = len(glyphs) if ended else _boundary(glyphs + self._matcher.held, len(glyphs))
        piece, self._glyphs = glyphs[:end], glyphs[end:]
        self._pieces.append(piece)
        return piece


def _boundary(text: str, limit: int) -> int:
    """The last place in ``text`` up to ``limit`` where a grapheme cluster ends whatever follows ``text``."""
    starts = [cluster.start() for cluster in _CLUSTER.finditer(text)]
    last = max((start for start in starts if start <= limit), default=0)
    complete = limit == len(text) and text.endswith("\n")
    return limit if complete or limit - last > _MAX_CLUSTER else last
