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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import Corrupt, InvalidInput

Logits: TypeAlias = NDArray[np.float32]
"""One row of model output: float32, shape ``(vocabulary,)``; ``-inf`` bans a token."""

Scores: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]
History: TypeAlias = Sequence[int] | NDArray[np.integer]

RecordValue: TypeAlias = "str | int | list[RecordValue]"
"""What a record holds: no floats, so that its canonical bytes have one form."""

_WORD: Final = 2**64
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Closed range of every float field (``top_p`` excludes 0). Bounds keep every float64 score finite for float32 logits."""

_BIAS_LIMIT: Final = 100.0
_BLOCK: Final = 16_384
"""Logits summed at once; part of the definition of a logprob's last bit."""

_FIRST_SORTED: Final = 256
"""Candidates that are sorted at first to find a nucleus."""

_COUNTS: Final[dict[str, int]] = {"top_k": 2**31, "seed": _WORD, "stream": _WORD}
"""Half-open upper bound of every integer field; the lower bound is 0."""


def _refuse(field: str, value: object, wanted: str) -> InvalidInput:
    return InvalidInput(
        f"sampling field {field} is {value!r}; give {wanted}", code="sampling", field=field, value=repr(value)
    )


def _check_float(field: str, value: object, low: float, high: float) -> float:
    """``value`` as a float without negative zero, so that equal samplings have equal records."""
    wanted = f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise _refuse(field, value, wanted)
    if not low <= value <= high:  # also refuses NaN
        raise _refuse(field, value, wanted)
    return float(value) + 0.0


def _check_count(field: str, value: object, stop: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < stop:
        raise _refuse(field, value, f"an integer from 0 to {stop - 1}")
    return value


def _check_bias(value: object) -> tuple[tuple[int, float], ...]:
    wanted = "a tuple of (token, bias) pairs with ascending tokens, none twice"
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        raise _refuse("logit_bias", value, wanted)
    pairs = tuple(
        (
            _check_count("logit_bias token", token, 2**31),
            _check_float("logit_bias", bias, -_BIAS_LIMIT, _BIAS_LIMIT),
        )
        for token, bias in value
    )
    if any(one[0] >= two[0] for one, two in pairwise(pairs)):
        raise _refuse("logit_bias", value, wanted)
    return pairs


def _check_stop(value: object) -> None:
    if not isinstance(value, tuple):
        raise _refuse("stop", value, "a tuple of strings")
    for text in value:
        if not isinstance(text, str) or not text or not _is_unicode(text):
            raise _refuse("stop", text, "non-empty strings without lone surrogates")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters of a choice; part of a continuation's boundary.

    Attributes:
        temperature: divisor of the scores; 0 is greedy. At most 1e6.
        top_k: how many of the best tokens stay; 0 is off.
        top_p: the smallest set of best tokens whose probability reaches this stays; in (0, 1], 1 is off.
        min_p: tokens with at least this fraction of the best token's probability stay; in [0, 1], 0 is off.
        repetition_penalty: divides positive and multiplies other scores of tokens in the history; 1 is off.
        presence_penalty: subtracted once for a token generated before; in [-2, 2].
        frequency_penalty: subtracted for every time a token was generated before; in [-2, 2].
        logit_bias: (token, bias) pairs in ascending token order; bias in [-100, 100].
        stop: texts before which generation ends.
        seed: key of the random numbers, ``0 <= seed < 2**64``.
        stream: which of the independent random sequences of that seed, ``0 <= stream < 2**64``.

    Raises:
        InvalidInput: ``invalid_input.sampling`` with ``field`` and ``value`` in ``data``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        for field, (low, high) in _RANGES.items():
            object.__setattr__(self, field, _check_float(field, getattr(self, field), low, high))
        if self.top_p == 0.0:
            raise _refuse("top_p", self.top_p, "a number above 0 and at most 1")
        for field, stop in _COUNTS.items():
            _check_count(field, getattr(self, field), stop)
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))
        _check_stop(self.stop)

    def to_record(self) -> dict[str, RecordValue]:
        """Every field by name; floats as ``float.hex()``, pairs and tuples as lists."""
        record: dict[str, RecordValue] = {field: getattr(self, field).hex() for field in _RANGES}
        record |= {field: getattr(self, field) for field in _COUNTS}
        record["logit_bias"] = [[token, bias.hex()] for token, bias in self.logit_bias]
        record["stop"] = list(self.stop)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Sampling:
        """The sampling whose ``to_record`` is ``record``.

        Raises:
            InvalidInput: ``invalid_input.sampling`` naming an unknown or missing field, or a value in another form.
        """
        names = {field.name for field in fields(cls)}
        for name in sorted(set(record) ^ names, key=str):
            raise _refuse(name, record.get(name), "exactly the fields " + ", ".join(sorted(names)))
        values = dict(record)
        values |= {field: _read_float(field, record[field]) for field in _RANGES}
        values["logit_bias"] = tuple(_read_pair(pair) for pair in _read_list("logit_bias", record["logit_bias"]))
        values["stop"] = tuple(_read_list("stop", record["stop"]))
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every field


def _read_float(field: str, value: object) -> float:
    """Parse the one spelling that ``float.hex`` writes."""
    wanted = "a float written by float.hex()"
    if not isinstance(value, str):
        raise _refuse(field, value, wanted)
    try:
        number = float.fromhex(value)
    except (ValueError, OverflowError) as error:
        raise _refuse(field, value, wanted) from error
    if number.hex() != value or value.startswith("-0x0.0p"):
        raise _refuse(field, value, wanted)
    return number


def _read_list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise _refuse(field, value, "a list")
    return value


def _read_pair(value: object) -> tuple[object, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise _refuse("logit_bias", value, "a list of [token, bias] pairs")
    return value[0], _read_float("logit_bias", value[1])


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
        _check_count(field, value, _WORD)
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
    _check_count("top_logprobs", k, 2**31)
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
    _check_count("position", position, _WORD)
    _check_count("prompt_length", prompt_length, len(history) + 1)
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
        _check_count("logit_bias token", token, scores.size)
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
        raise _refuse("history", int(token), f"token ids from 0 to {vocabulary - 1}")
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
