"""How long work over a repository says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of objects verified and the number of all."""


def no_progress(done: int, total: int) -> None:
    """Reports to nobody."""
