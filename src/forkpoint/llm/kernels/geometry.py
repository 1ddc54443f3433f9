"""How keys and values of one state group lie in a page: the one place that knows, on the Python side.

A group's pages are one tensor ``[pages, layers, page_tokens * heads * (key_dim + value_dim)]``. Inside, for each layer: keys as tiles
``[page_tokens / 16, heads, key_dim, 16]``, then values as ``[page_tokens / 16, heads, 16, value_dim]``. Sixteen tokens lie side by side in
a tile of keys, so that one vector holds the scores of sixteen keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.errors import InvalidInput

TILE_TOKENS: Final = 16
"""Tokens that lie side by side in a tile."""

DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The native code of each dtype that state can have (``forkpoint::Dtype``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """The shape of one group's pages.

    Attributes:
        page_tokens: tokens of a page, a multiple of 16.
        num_layers: layers of the group.
        heads: key/value heads of a layer.
        key_dim, value_dim: elements of one key and of one value.
        dtype: of keys and values.

    Raises:
        InvalidInput: ``invalid_input.page_tokens`` or ``invalid_input.dtype`` for what no kernel serves.
    """

    page_tokens: int
    num_layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.page_tokens < TILE_TOKENS or self.page_tokens % TILE_TOKENS:
            message = f"a page of {self.page_tokens} tokens is no multiple of {TILE_TOKENS}; choose one that is"
            raise InvalidInput(message, code="page_tokens", have=self.page_tokens)
        if self.dtype not in DTYPE_CODES:
            message = f"no kernel keeps state in {self.dtype}; use float32, bfloat16 or float16"
            raise InvalidInput(message, code="dtype", have=str(self.dtype))

    @property
    def layer_elements(self) -> int:
        """Elements of one layer of one page."""
        return self.page_tokens * self.heads * (self.key_dim + self.value_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.num_layers * self.layer_elements * self.dtype.itemsize

    @property
    def native_shape(self) -> tuple[int, int, int, int, int, int]:
        """The geometry as native functions take it."""
        sizes = (self.page_tokens, self.num_layers, self.heads, self.key_dim, self.value_dim)
        return (*sizes, DTYPE_CODES[self.dtype])

    def keys(self, pages: Tensor) -> Tensor:
        """Keys as a view ``[pages, layers, page_tokens / 16, heads, key_dim, 16]``."""
        shape = (self.page_tokens // TILE_TOKENS, self.heads, self.key_dim, TILE_TOKENS)
        return pages[..., : self.page_tokens * self.heads * self.key_dim].view(*pages.shape[:-1], *shape)

    def values(self, pages: Tensor) -> Tensor:
        """Values as a view ``[pages, layers, page_tokens / 16, heads, 16, value_dim]``."""
        shape = (self.page_tokens // TILE_TOKENS, self.heads, TILE_TOKENS, self.value_dim)
        return pages[..., self.page_tokens * self.heads * self.key_dim :].view(*pages.shape[:-1], *shape)
