"""What a model asks of attention beside keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

BLOCK_TOKENS: Final = 256
"""Keys of one partial sum of attention, at absolute positions ``[256 b, 256 (b + 1))``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a model asks of attention; zeros and None where it does not.

    Attributes:
        scaling: factor of the dot products.
        window: positions a row looks back, itself included; 0 to the start.
        softcap: bound of the logits, ``softcap * tanh(logit / softcap)``.
        sinks: a further logit in the denominator, ``[query_heads]``.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def first_seen(self, position: int) -> int:
        """The first position that a row at ``position`` sees."""
        return max(0, position - self.window + 1) if self.window else 0
