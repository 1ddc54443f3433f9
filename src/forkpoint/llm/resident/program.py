"""A model as one native call: built once for (model, page size), run for every pass.

``build_program`` traces the model, lowers the trace and binds it to weights and pages. ``Program.run`` then takes what changes from pass
to pass: token ids, positions, segments, page tables, and which rows' logits are wanted. Knows nothing of lanes, states or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.tracing import Refusal

DEFAULT_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a pass gives.

    Attributes:
        logits: ``float32 [output_rows vocabulary]``.
        has_nan: whether any of the logits is not a number.
    """

    logits: NDArray[np.float32]
    has_nan: bool


@final
class Program:
    """A lowered model, bound to weights and pages. One run at a time; the caller sees to that."""

    vocabulary: int
    max_rows: int

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        segments: NDArray[np.int64],
        tables: Sequence[NDArray[np.int32]],
        output_rows: NDArray[np.int64],
        *,
        threads: int,
        out: NDArray[np.float32] | None = None,
    ) -> Output:
        """Run all layers over ``rows`` rows, appending keys and values to the bound pages. The GIL is released.

        Args:
            token_ids, positions: ``[rows]``, at most ``max_rows``.
            segments: ``[segments 3]`` as docs/design/0011 says.
            tables: one ``[segments pages]`` a state group.
            output_rows: rows whose logits are wanted, ``[n]``; none for a pass that only appends.
            threads: OpenMP threads.
            out: where to put the logits, ``[at least n, vocabulary]``; a new array where None.
        """
        raise NotImplementedError

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """Use other page tensors from now on, or say why not (``pages``); a refusal changes nothing."""
        raise NotImplementedError


def build_program(
    model: Any,
    groups: Sequence[GroupSpec],
    pages: Sequence[Tensor],
    *,
    page_tokens: int,
    max_context: int,
    max_rows: int = DEFAULT_ROWS,
) -> Program | Refusal:
    """Trace, lower and bind a model whose modules were replaced. A refusal says why it has to run eagerly."""
    raise NotImplementedError
