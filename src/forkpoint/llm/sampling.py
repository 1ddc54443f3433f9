"""The parameters of a choice, checked where they are made, and their canonical record. What they mean is ``choosing``'s business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final, TypeAlias, final

from forkpoint.errors import InvalidInput

RecordValue: TypeAlias = "str | int | list[RecordValue]"
"""What a record holds: no floats, so that its canonical bytes have one form."""

WORD: Final = 2**64
"""Half-open upper bound of a seed, a stream and a position."""

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
_COUNTS: Final[dict[str, int]] = {"top_k": 2**31, "seed": WORD, "stream": WORD}
"""Half-open upper bound of every integer field; the lower bound is 0."""


def refuse(field: str, value: object, wanted: str) -> InvalidInput:
    """The error for a value that a field cannot have."""
    return InvalidInput(
        f"sampling field {field} is {value!r}; give {wanted}", code="sampling", field=field, value=repr(value)
    )


def _check_float(field: str, value: object, low: float, high: float) -> float:
    """``value`` as a float without negative zero, so that equal samplings have equal records."""
    wanted = f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise refuse(field, value, wanted)
    if not low <= value <= high:  # also refuses NaN
        raise refuse(field, value, wanted)
    return float(value) + 0.0


def check_count(field: str, value: object, stop: int) -> int:
    """``value``, an integer of ``[0, stop)``. Raises InvalidInput ``invalid_input.sampling``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < stop:
        raise refuse(field, value, f"an integer from 0 to {stop - 1}")
    return value


def _check_bias(value: object) -> tuple[tuple[int, float], ...]:
    wanted = "a tuple of (token, bias) pairs with ascending tokens, none twice"
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        raise refuse("logit_bias", value, wanted)
    pairs = tuple(
        (
            check_count("logit_bias token", token, 2**31),
            _check_float("logit_bias", bias, -_BIAS_LIMIT, _BIAS_LIMIT),
        )
        for token, bias in value
    )
    if any(one[0] >= two[0] for one, two in pairwise(pairs)):
        raise refuse("logit_bias", value, wanted)
    return pairs


def _check_stop(value: object) -> None:
    if not isinstance(value, tuple):
        raise refuse("stop", value, "a tuple of strings")
    for text in value:
        if not isinstance(text, str) or not text or not _is_unicode(text):
            raise refuse("stop", text, "non-empty strings without lone surrogates")


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
            raise refuse("top_p", self.top_p, "a number above 0 and at most 1")
        for field, stop in _COUNTS.items():
            check_count(field, getattr(self, field), stop)
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
            raise refuse(name, record.get(name), "exactly the fields " + ", ".join(sorted(names)))
        values = dict(record)
        values |= {field: _read_float(field, record[field]) for field in _RANGES}
        values["logit_bias"] = tuple(_read_pair(pair) for pair in _read_list("logit_bias", record["logit_bias"]))
        values["stop"] = tuple(_read_list("stop", record["stop"]))
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every field


def _read_float(field: str, value: object) -> float:
    """Parse the one spelling that ``float.hex`` writes."""
    wanted = "a float written by float.hex()"
    if not isinstance(value, str):
        raise refuse(field, value, wanted)
    try:
        number = float.fromhex(value)
    except (ValueError, OverflowError) as error:
        raise refuse(field, value, wanted) from error
    if number.hex() != value or value.startswith("-0x0.0p"):
        raise refuse(field, value, wanted)
    return number


def _read_list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise refuse(field, value, "a list")
    return value


def _read_pair(value: object) -> tuple[object, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise refuse("logit_bias", value, "a list of [token, bias] pairs")
    return value[0], _read_float("logit_bias", value[1])
