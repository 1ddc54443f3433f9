"""Routed append and attention in torch, for any device: the same blocks of 256 absolute positions as the native kernel, merged in order.

Query rows are computed sixteen at a time, padded, so that every product has one shape whatever runs beside a row: the library then
adds up in one order. Slower than the native kernel by far. Keys past the end of a lane are never seen, whatever lies there.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.call import Call
from forkpoint.llm.kernels.geometry import TILE_TOKENS, PageGeometry
from forkpoint.llm.kernels.variant import BLOCK_TOKENS, Variant

_ROWS: Final = 16
"""Query rows of one product."""


def append_and_attend_with_torch(call: Call) -> Tensor:
    """See ``kernels.attention.append_and_attend``."""
    query, geometry, variant = call.query, call.geometry(), call.variant
    call.check()
    out = query.new_zeros(len(query), query.shape[1], geometry.value_dim)
    lanes = [
        _Lane(call.pages, table, call.layer, geometry, *segment)
        for segment, table in zip(call.segments.tolist(), call.tables, strict=True)
    ]
    for lane in lanes:
        lane.check(len(query))
    for lane in lanes:
        lane.append(call.key, call.value)
    for lane in lanes:
        for first in range(lane.first_row, lane.first_row + lane.rows, _ROWS):
            count = min(_ROWS, lane.first_row + lane.rows - first)
            out[first : first + count] = lane.attend(query[first : first + count], first, variant)
    return out


class _Lane:
    """One segment of a pass."""

    def __init__(
        self, pages: Tensor, table: Tensor, layer: int, geometry: PageGeometry, first_row: int, rows: int, position: int
    ) -> None:
        self.first_row = first_row
        self.rows = rows
        self._position = position
        self._stop = position + rows
        self._pages = pages
        self._table = table.to(pages.device, torch.int64)
        self._keys = geometry.keys(pages)[:, layer]
        self._values = geometry.values(pages)[:, layer]
        self._geometry = geometry

    def check(self, num_rows: int) -> None:
        """Raises InvalidInput ``invalid_input.routes`` where the lane leads outside rows or pages."""
        used = self._table[: -(-self._stop // self._geometry.page_tokens)]
        fits = self.first_row >= 0 and self.rows >= 0 and self._position >= 0 and self.first_row + self.rows <= num_rows
        reaches = len(self._table) * self._geometry.page_tokens >= self._stop
        if not fits or not reaches or bool(((used < 0) | (used >= len(self._pages))).any()):
            raise InvalidInput("a segment or its page table leads outside rows or pages", code="routes")

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write the rows of the segment to their places."""
        page, tile, place = self._places(torch.arange(self._position, self._stop, device=self._pages.device))
        rows = slice(self.first_row, self.first_row + self.rows)
        self._keys[page, tile, :, :, place] = key[rows]
        self._values[page, tile, :, place] = value[rows]

    def attend(self, query: Tensor, first_row: int, variant: Variant) -> Tensor:
        """Up to sixteen rows from ``first_row`` on: ``[rows query_heads value_dim]``."""
        position = self._position + first_row - self.first_row
        positions = torch.arange(position, position + _ROWS, device=query.device)
        folded = self._fold(query)
        running: _Partial | None = None
        first = variant.first_seen(position) // BLOCK_TOKENS
        for block in range(first, (position + len(query) - 1) // BLOCK_TOKENS + 1):
            partial = self._attend_block(folded, positions, block, variant)
            running = partial if running is None else running.merge(partial)
        assert running is not None
        return self._unfold(running.finish(self._sinks(variant)))[: len(query)].to(query.dtype)

    def _attend_block(self, query: Tensor, positions: Tensor, block: int, variant: Variant) -> _Partial:
        keys, values, tokens = self._read(block)
        logits = torch.matmul(query, keys) * variant.scaling
        if variant.softcap:
            logits = torch.tanh(logits / variant.softcap) * variant.softcap
        seen = (tokens <= positions[:, None]) & (tokens < self._stop)
        if variant.window:
            seen = seen & (tokens > positions[:, None] - variant.window)
        group = query.shape[1] // _ROWS
        logits = logits.masked_fill(~seen.repeat_interleave(group, dim=0), -torch.inf)
        maximum = logits.amax(dim=-1, keepdim=True)
        weights = torch.exp(logits - maximum.masked_fill(maximum == -torch.inf, 0))
        return _Partial(maximum, weights.sum(dim=-1, keepdim=True), torch.matmul(weights, values))

    def _read(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys ``[heads key_dim 256]`` and values ``[heads 256 value_dim]`` in float32, zeros past the lane's end; their positions."""
        tokens = torch.arange(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS, device=self._pages.device)
        page, tile, place = self._places(tokens.clamp(max=self._stop - 1))
        past = (tokens >= self._stop)[:, None, None]
        keys = self._keys[page, tile, :, :, place].float().masked_fill(past, 0)
        values = self._values[page, tile, :, place].float().masked_fill(past, 0)
        return keys.permute(1, 2, 0).contiguous(), values.permute(1, 0, 2).contiguous(), tokens

    def _places(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = positions % self._geometry.page_tokens
        page = self._table[positions // self._geometry.page_tokens]
        return page, inside // TILE_TOKENS, inside % TILE_TOKENS

    def _fold(self, query: Tensor) -> Tensor:
        """Rows and the query heads of one key head as ``[heads, 16 * group, key_dim]`` in float32, padded with zero rows."""
        rows = query.new_zeros(_ROWS, *query.shape[1:], dtype=torch.float32)
        rows[: len(query)] = query
        heads = self._geometry.heads
        return rows.view(_ROWS, heads, -1, query.shape[2]).transpose(0, 1).reshape(heads, -1, query.shape[2])

    def _unfold(self, out: Tensor) -> Tensor:
        heads, _, dim = out.shape
        return out.view(heads, _ROWS, -1, dim).transpose(0, 1).reshape(_ROWS, -1, dim)

    def _sinks(self, variant: Variant) -> Tensor | None:
        if variant.sinks is None:
            return None
        return variant.sinks.float().view(self._geometry.heads, -1).repeat(1, _ROWS)[..., None]


class _Partial:
    """Maximum, sum of weights and weighted values over some leading blocks; a maximum of minus infinity where nothing was seen yet."""

    def __init__(self, maximum: Tensor, total: Tensor, values: Tensor) -> None:
        self._maximum = maximum
        self._total = total
        self._values = values

    def merge(self, then: _Partial) -> _Partial:
        maximum = torch.maximum(self._maximum, then._maximum)
        base = maximum.masked_fill(maximum == -torch.inf, 0)
        keep, add = torch.exp(self._maximum - base), torch.exp(then._maximum - base)
        return _Partial(maximum, self._total * keep + then._total * add, self._values * keep + then._values * add)

    def finish(self, sinks: Tensor | None) -> Tensor:
        if sinks is None:
            return self._values / self._total
        maximum = torch.maximum(self._maximum, sinks)
        keep = torch.exp(self._maximum - maximum)
        return self._values * keep / (self._total * keep + torch.exp(sinks - maximum))
