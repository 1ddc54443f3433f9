"""The arguments of routed attention by name, and what follows from them; ``attention.append_and_attend`` says what each is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.geometry import PageGeometry
from forkpoint.llm.kernels.variant import Variant


class Call(NamedTuple):
    """One call, in the order of the op's arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    segments: Tensor
    tables: Tensor
    layer: int
    scaling: float
    window: int
    softcap: float
    sinks: Tensor | None

    @property
    def variant(self) -> Variant:
        """What the model asks of attention."""
        return Variant(scaling=self.scaling, window=self.window, softcap=self.softcap, sinks=self.sinks)

    def geometry(self) -> PageGeometry:
        """The pages' geometry, as the shapes imply.

        Raises:
            InvalidInput: ``invalid_input.attention`` where they do not fit together.
        """
        query, key, value, pages = self.query, self.key, self.value, self.pages
        if not self._fits():
            shapes = " ".join(f"{tuple(part.shape)} {part.dtype}" for part in (query, key, value, pages))
            raise InvalidInput(f"query, key, value and pages do not fit together: {shapes}", code="attention")
        heads, dims = key.shape[1], key.shape[2] + value.shape[2]
        return PageGeometry(
            page_tokens=pages.shape[2] // (heads * dims),
            num_layers=pages.shape[1],
            heads=heads,
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            dtype=pages.dtype,
        )

    def check(self) -> None:
        """Raises InvalidInput ``invalid_input.attention`` or ``invalid_input.routes`` where what is beside the rows has not its shape."""
        segments, tables, sinks = self.segments, self.tables, self.sinks
        if not 0 <= self.layer < self.pages.shape[1] or self.window < 0 or not self.softcap >= 0:
            raise InvalidInput(
                f"layer {self.layer} of {self.pages.shape[1]}, window {self.window}, softcap {self.softcap}: not in range",
                code="attention",
            )
        if sinks is not None and sinks.shape != self.query.shape[1:2]:
            raise InvalidInput(f"sinks {tuple(sinks.shape)} are not one a query head", code="attention")
        is_routed = segments.dtype == torch.int64 and tables.dtype == torch.int32 and tables.dim() == 2
        if not is_routed or segments.shape != (len(tables), 3):
            parts = " ".join(f"{tuple(part.shape)} {part.dtype}" for part in (segments, tables))
            raise InvalidInput(
                f"segments and tables are not int64 [lanes 3] and int32 [lanes n]: {parts}", code="routes"
            )

    def _fits(self) -> bool:
        query, key, value, pages = self.query, self.key, self.value, self.pages
        if not query.dim() == key.dim() == value.dim() == pages.dim() == 3:
            return False
        heads, dims = key.shape[1], key.shape[2] + value.shape[2]
        return (
            min(query.shape[1], heads, key.shape[2], value.shape[2]) > 0
            and query.shape[2] == key.shape[2]
            and value.shape[1] == heads
            and query.shape[1] % heads == 0
            and len(query) == len(key) == len(value)
            and pages.shape[2] % (heads * dims) == 0
            and query.dtype == key.dtype == value.dtype == pages.dtype
        )
