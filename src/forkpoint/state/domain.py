"""The domain of a chunk: for each named axis, the half-open range of the whole array that it covers. Axes stand in order of name.

Written in two forms: as a list in manifests, and as one string (``layer:0:30,token:256:512``) in a chunk's header. Axis names
exclude ``:`` and ``,``, so that no two domains share a string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from forkpoint.errors import InvalidInput
from forkpoint.state.record import is_count
from forkpoint.state.slab import NAME

Range: TypeAlias = tuple[str, int, int]
"""(axis, start, stop) with 0 <= start <= stop."""

MAX_RANGES: Final = 8
_RANGE: Final = re.compile(r"([^:,]+):(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,18})", re.ASCII)


def check_domain(domain: Sequence[Range]) -> None:
    """Refuse a domain that has no written form.

    Raises:
        InvalidInput: ``invalid_input.domain`` for axes repeated, out of order or badly named, bounds that are no integers with
            ``0 <= start <= stop < 2**63``, or more than 8 ranges.
    """
    if len(domain) > MAX_RANGES:
        _refuse(domain, f"name at most {MAX_RANGES} axes")
    before = ""
    for axis, start, stop in domain:
        if not isinstance(axis, str) or not NAME.fullmatch(axis):
            _refuse(domain, "name axes with lower-case letters, digits, '_', '.' and '-'")
        if axis <= before:
            _refuse(domain, "name each axis once, in order")
        if not (is_count(start) and is_count(stop) and start <= stop):
            _refuse(domain, "give integers with 0 <= start <= stop < 2**63")
        before = axis


def domain_text(domain: Sequence[Range]) -> str:
    """The form in a chunk's header; empty for a chunk that is the whole."""
    return ",".join(f"{axis}:{start}:{stop}" for axis, start, stop in domain)


def parse_domain(text: str) -> tuple[Range, ...]:
    """Inverse of :func:`domain_text`. Raises InvalidInput ``invalid_input.domain`` for any other text."""
    if not text:
        return ()
    matches = [_RANGE.fullmatch(item) for item in text.split(",", MAX_RANGES)]
    domain = tuple((match[1], int(match[2]), int(match[3])) for match in matches if match)
    if len(domain) != len(matches):
        _refuse(text[:64], "write axis:start:stop, joined by commas")
    check_domain(domain)
    return domain


def _refuse(domain: object, rule: str) -> None:
    raise InvalidInput(f"the domain {domain!r:.256} is not allowed; {rule}", code="domain")
