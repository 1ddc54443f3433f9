"""How the next token is chosen: a pure function of (logits, history, prompt length, sampling, position).

Nothing is remembered between two choices. Random numbers are counter-based (Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3"), so a restored, forked or moved continuation draws exactly what an uninterrupted one draws.

The order, for one vector of logits (all arithmetic in float64):

    1. add ``logit_bias``
    2. repetition penalty over every token of the history (Keskar et al. 2019, "CTRL"; the transformers rule)
    3. subtract frequency and presence penalties over the tokens generated since the prompt (the OpenAI rule)
    4. temperature 0: the largest score, the lowest id on ties. Otherwise divide by the temperature, then
    5. keep the ``top_k`` best, then of these the ``top_p`` nucleus (Holtzman et al. 2019), then of these every token with at
       least ``min_p`` times the probability of the best (Nguyen et al. 2024): the order of the transformers warpers
    6. invert the cumulative distribution of the kept tokens, in ascending id, at one uniform number

Rank means descending score, lowest id first on ties; exactly ``top_k`` tokens stay even where scores tie.

This module knows numpy and nothing of torch, tokenizers or models. The invariant it keeps: equal arguments give equal
tokens, and the fast paths give exactly what a full sort would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.llm.sampling import WORD, Sampling, check_count, refuse

Logits: TypeAlias = NDArray[np.float32]
"""One row of model output: float32, shape ``(vocabulary,)``; ``-inf`` bans a token."""

Scores: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]
History: TypeAlias = Sequence[int] | NDArray[np.integer]

_BLOCK: Final = 16_384
"""Logits summed at once; part of the definition of a logprob's last bit."""

_FIRST_SORTED: Final = 256
"""Candidates that are sorted at first to find a nucleus."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One chosen token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the *unmodified* model distribution: log-softmax of the raw
            logits in float64, before bias, penalties, temperature and filters.
    """

    token: int
    logprob: float


def uniform(seed: int, stream: int, position: int) -> float:
    """The random number of one absolute position, in [0, 1) with 53 bits.

    Philox4x64-10 with key words ``(seed, 0)`` and counter words ``(1, position, stream, 0)``, lowest word first; the first
    of the four output words, shifted right by 11, times 2**-53. (numpy starts at counter word 0 and counts up before its
    first block, hence the 1.) This never changes: stored continuations depend on it.

    Args:
        seed: ``0 <= seed < 2**64``.
        stream: ``0 <= stream < 2**64``.
        position: absolute position that the chosen token will occupy, ``0 <= position < 2**64``.

    Raises:
        InvalidInput: ``invalid_input.sampling`` if one of them is outside its range.
    """
    for field, value in (("seed", seed), ("stream", stream), ("position", position)):
        check_count(field, value, WORD)
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def log_softmax64(logits: Logits) -> Scores:
    """Natural log-probabilities of the raw logits, float64, same shape.

    Raises:
        InvalidInput: ``invalid_input.logits`` if not a float32 vector.
        Corrupt: ``corrupt.logits`` if any logit is NaN or +inf, or all are -inf.
    """
    largest = np.float64(logits[_argmax(logits)])
    logprobs = logits.astype(np.float64)
    logprobs -= largest
    logprobs -= _log_mass(logits, largest)
    return logprobs


def top_logprobs(logits: Logits, k: int) -> tuple[Choice, ...]:
    """The ``k`` most likely tokens of the raw logits, best first, the lowest id first on ties.

    Args:
        logits: float32, shape ``(vocabulary,)``.
        k: how many; more than the vocabulary gives the whole vocabulary.

    Raises:
        InvalidInput: ``invalid_input.sampling`` if ``k`` is negative; as ``log_softmax64`` otherwise.
        Corrupt: as ``log_softmax64``.
    """
    check_count("top_logprobs", k, 2**31)
    logprobs = log_softmax64(logits)
    best = _best(logprobs, k)
    ranked = best[np.argsort(-logprobs[best], kind="stable")]
    return tuple(Choice(token=int(token), logprob=float(logprobs[token])) for token in ranked)


def choose(logits: Logits, *, history: History, prompt_length: int, position: int, sampling: Sampling) -> Choice:
    """Choose the token for ``position``; the module docstring gives the rule.

    Args:
        logits: float32, shape ``(vocabulary,)``; only read.
        history: every token before ``position``, prompt and generated.
        prompt_length: how many tokens of ``history`` are prompt, ``0 <= prompt_length <= len(history)``.
        position: absolute position that the chosen token will occupy; with a complete history, its length.
        sampling: the parameters.

    Raises:
        InvalidInput: ``invalid_input.logits`` if not a float32 vector; ``invalid_input.sampling`` if a bias or history token
            is outside the vocabulary, or a position or length outside its range.
        Corrupt: ``corrupt.logits`` if any logit is NaN or +inf, or all are -inf; ``data`` has ``position``.
    """
    check_count("position", position, WORD)
    check_count("prompt_length", prompt_length, len(history) + 1)
    likeliest = _argmax(logits, position)
    token = _select(logits, likeliest, history, prompt_length, position, sampling)
    largest = np.float64(logits[likeliest])
    return Choice(token=token, logprob=float(np.float64(logits[token]) - largest - _log_mass(logits, largest)))


def _select(
    logits: Logits, likeliest: int, history: History, prompt_length: int, position: int, sampling: Sampling
) -> int:
    greedy = sampling.temperature == 0.0
    if not _changes_scores(sampling):
        return likeliest if greedy else _draw(logits.astype(np.float64), sampling, position)
    scores = _adjusted(logits, history, prompt_length, sampling)
    return int(np.argmax(scores)) if greedy else _draw(scores, sampling, position)


def _argmax(logits: Logits, position: int | None = None) -> int:
    """Id of the largest logit, the lowest on ties. NaN and +inf win every argmax, so one look finds them."""
    if logits.dtype != np.float32 or logits.ndim != 1 or logits.size == 0:
        raise InvalidInput(
            f"logits are {logits.dtype} of shape {logits.shape}; give a float32 vector of the vocabulary",
            code="logits",
            dtype=str(logits.dtype),
            shape=str(logits.shape),
        )
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):
        raise Corrupt(
            f"the largest logit for position {position} is {logits[best]} (token {best}); the model's output is broken, "
            "check its weights and state",
            code="logits",
            position=position,
            token=best,
            value=str(logits[best]),
        )
    return best


def _log_mass(logits: Logits, largest: np.float64) -> float:
    """Logarithm of the summed exponentials of ``logits - largest``.

    Summed block by block in id order: one small scratch array costs a third of two vectors fresh from the system.
    """
    scratch = np.empty(min(_BLOCK, logits.size))
    mass = 0.0
    for start in range(0, logits.size, _BLOCK):
        block = logits[start : start + _BLOCK]
        terms = scratch[: block.size]
        terms[:] = block
        terms -= largest
        np.exp(terms, out=terms)
        mass += float(terms.sum())
    return math.log(mass)


def _changes_scores(sampling: Sampling) -> bool:
    penalties = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return bool(sampling.logit_bias) or sampling.repetition_penalty != 1.0 or penalties


def _adjusted(logits: Logits, history: History, prompt_length: int, sampling: Sampling) -> Scores:
    """Scores after bias and penalties, float64, shape ``(vocabulary,)``."""
    scores = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        check_count("logit_bias token", token, scores.size)
        scores[token] += bias
    if sampling.repetition_penalty != 1.0:
        seen = np.flatnonzero(_counts(history, scores.size))
        old = scores[seen]
        scores[seen] = np.where(old > 0.0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        counts = _counts(history[prompt_length:], scores.size)
        seen = np.flatnonzero(counts)
        scores[seen] -= counts[seen] * sampling.frequency_penalty + sampling.presence_penalty
    return scores


def _counts(tokens: History, vocabulary: int) -> Ids:
    """How often every token of the vocabulary occurs."""
    array = np.asarray(tokens, dtype=np.int64)
    for token in array[(array < 0) | (array >= vocabulary)]:
        raise refuse("history", int(token), f"token ids from 0 to {vocabulary - 1}")
    return np.bincount(array, minlength=vocabulary)


def _draw(scores: Scores, sampling: Sampling, position: int) -> int:
    """Sample from ``scores`` (largest one finite); only tokens that may be drawn are ever sorted."""
    kept, pool = np.arange(scores.size), scores
    if 0 < sampling.top_k < scores.size:
        kept = _best(scores, sampling.top_k)
        pool = scores[kept]
    best = pool.max()
    if sampling.top_p < 1.0:
        nucleus = _best(pool, _nucleus_size(pool, best, sampling))
        kept, pool = kept[nucleus], pool[nucleus]
    weights = _weights(pool, best, sampling.temperature)
    if sampling.min_p > 0.0:
        likely = np.flatnonzero(weights >= sampling.min_p)
        kept, weights = kept[likely], weights[likely]
    cumulative = np.cumsum(weights)
    target = uniform(sampling.seed, sampling.stream, position) * cumulative[-1]
    return int(kept[np.searchsorted(cumulative, target, side="right")])


def _nucleus_size(scores: Scores, best: np.float64, sampling: Sampling) -> int:
    """How many of the best tokens it takes to reach ``top_p`` of the probability of ``scores``.

    Only as many of them are sorted as are needed: the sum of all is taken in the order of ids.
    """
    wanted = sampling.top_p * float(_weights(scores, best, sampling.temperature).sum())
    count = _FIRST_SORTED
    while count < scores.size:
        largest = np.sort(np.partition(scores, scores.size - count)[scores.size - count :])[::-1]
        cumulative = np.cumsum(_weights(largest, best, sampling.temperature))
        if cumulative[-1] >= wanted:
            return int(np.searchsorted(cumulative, wanted, side="left")) + 1
        count *= 16
    cumulative = np.cumsum(_weights(np.sort(scores)[::-1], best, sampling.temperature))
    return min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, scores.size)


def _weights(scores: Scores, best: np.float64, temperature: float) -> Scores:
    """Probabilities relative to the best token's, which is exactly 1; a tiny temperature cannot overflow."""
    weights = scores - best
    with np.errstate(over="ignore"):
        weights /= temperature
    return np.exp(weights, out=weights)


def _best(scores: Scores, count: int) -> Ids:
    """Indices of the ``count`` best scores in ascending order; of equal scores at the edge the lowest indices stay."""
    if count >= scores.size:
        return np.arange(scores.size)
    if count == 0:
        return np.arange(0)
    edge = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > edge)
    equal = np.flatnonzero(scores == edge)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))
