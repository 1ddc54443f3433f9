"""A pass said by tensors alone: which rows are whose, and which pages each lane's keys and values lie in.

The registered attention (``engines/attention.py``) is given it when a pass runs over pages: one operation for all lanes of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

import forkpoint.llm.kernels.attention  # noqa: F401 (defines the operation)
from forkpoint.llm.resident.base import AttentionCall, GroupSpec

STEP_KEYWORD: Final = "forkpoint_step"
"""The keyword argument in which a model's attention finds the routes of the pass it runs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedStep:
    """The routes of one forward pass (docs/design/0011).

    Attributes:
        groups: the state groups, in the order of ``pages`` and ``tables``.
        pages: one tensor a group, ``[pages layers elements]``, written in place.
        segments: ``int64 [segments 3]``: first row, number of rows, first position.
        tables: one tensor a group, ``int32 [segments pages]``: page numbers, -1 where there are no more.
    """

    groups: Sequence[GroupSpec]
    pages: Sequence[Tensor]
    segments: Tensor
    tables: Sequence[Tensor]

    def append_and_attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All lanes of one layer: ``query`` is ``[rows query_heads dim]``; returns ``[rows query_heads value_dim]``."""
        index = next(place for place, group in enumerate(self.groups) if call.layer in group.layers)
        out: Tensor = torch.ops.forkpoint.append_and_attend(
            query,
            key,
            value,
            self.pages[index],
            self.segments,
            self.tables[index],
            self.groups[index].layers.index(call.layer),
            call.scaling,
            call.window or 0,
            call.softcap or 0.0,
            call.sinks,
        )
        return out
