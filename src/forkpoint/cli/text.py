"""Texts that a command is given. What is no valid Unicode is refused here, before any work: no model and no record can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from forkpoint.errors import InvalidInput

Texts = TypeVar("Texts", str, Sequence[str], str | None, Sequence[str] | None)


def checked_text(given: Texts) -> Texts:
    """``given`` as it is. Raises InvalidInput ``invalid_input.text`` where bytes in it are no UTF-8."""
    for text in [given] if isinstance(given, str) else given or ():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"character {error.start + 1} of a text is no valid Unicode: {text[error.start]!a}; give the text as UTF-8",
                code="text", position=error.start,
            ) from None  # fmt: skip
    return given
