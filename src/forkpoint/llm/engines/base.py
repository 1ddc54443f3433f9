"""What a continuation needs of whatever runs the model. Logits cross this seam as float32 numpy, so callers need no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forkpoint.ids import ObjectId
from forkpoint.llm.resident.base import GroupSpec, State, Strategy
from forkpoint.state.fingerprint import Fingerprint

Logits = NDArray[np.float32]
"""``[vocabulary]``, or ``[rows vocabulary]`` where several rows are returned."""

PrefillProgress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


def no_progress(_done: int, _total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Which claims of exactness hold here, and why not where they do not.

    ``claim`` is the strongest: ``bytes`` (1), ``continuation`` (2) or ``invariance`` (3).
    """

    claim: str
    reasons: tuple[str, ...]


class TextCodec(Protocol):
    """The tokenizer and chat template of a model."""

    tokenizer_id: ObjectId
    end_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of this string alone, without special tokens."""
        ...

    def encode_start(self, text: str) -> list[int]:
        """Token ids of a string that begins a sequence: with the tokenizer's own beginning tokens, if it has any."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens written out."""
        ...

    def decode_visible(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the model is to answer. InvalidInput ``invalid_input.chat`` without template."""
        ...

    def serialised(self) -> bytes:
        """The tokenizer as one JSON object, the bytes that ``tokenizer_id`` names."""
        ...


class Runtime(Protocol):
    """A loaded model that advances states. One forward pass at a time; every method may be called from any thread."""

    name: str
    fingerprint: Fingerprint
    groups: tuple[GroupSpec, ...]
    codec: TextCodec
    vocabulary: int
    max_context: int
    rolls_over: bool
    exactness: Exactness

    @property
    def strategy(self) -> Strategy:
        """How states lie in memory."""
        ...

    @property
    def lanes(self) -> int:
        """Continuations that one decode step serves at most."""
        ...

    def check_weights(self) -> None:
        """Raises Incompatible ``incompatible.weights`` when parameters changed since load (version counters)."""
        ...

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InvalidInput ``invalid_input.token`` for an id outside the vocabulary."""
        ...

    def verify_weights(self) -> None:
        """Recompute the digest of the parameters; raises Incompatible ``incompatible.weights`` when it differs."""
        ...

    def advance(self, state: State, tokens: Sequence[int], progress: PrefillProgress = no_progress) -> State:
        """Process tokens in pieces cut at absolute multiples of 256; a failure leaves ``state`` as it was."""
        ...

    def advance_many(
        self, appends: Sequence[tuple[State, Sequence[int]]], progress: PrefillProgress = no_progress
    ) -> list[State]:
        """Process tokens after each of several states, in shared passes where that changes no bits."""
        ...

    def step(self, state: State, token: int) -> tuple[State, Logits]:
        """Process one token; logits ``[vocabulary]`` predict the one after it."""
        ...

    def step_many(self, steps: Sequence[tuple[State, int]]) -> list[tuple[State, Logits]]:
        """Process one token of each of several states in one pass (``lanes`` at a time); nothing is kept of any if one cannot be served.

        The same state may come several times: each is a fork.
        """
        ...

    def evaluate(self, state: State, alternatives: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits ``[tokens vocabulary]`` after each token of each alternative, none of which is kept."""
        ...
