"""Lanes of random queries, keys and values on pages full of garbage, for tests of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forkpoint.llm.kernels.attention import append_and_attend
from forkpoint.llm.kernels.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's attention, and the pages it runs on."""

    query_heads: int = 6
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    page_tokens: int = 16
    variant: Variant = field(default_factory=lambda: Variant(scaling=0.2))

    def arena(self, num_pages: int, *, garbage: float = float("nan")) -> Tensor:
        """Pages of two layers, full of ``garbage``."""
        elements = self.page_tokens * self.heads * (self.key_dim + self.value_dim)
        return torch.full((num_pages, 2, elements), garbage, dtype=self.dtype)

    def num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Query, key and value of consecutive tokens of a lane."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(query=self.query[part], key=self.key[part], value=self.value[part])

    def __len__(self) -> int:
        return len(self.query)


def random_tokens(shape: Shape, count: int, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, heads, dim, generator=generator).to(shape.dtype)
        for heads, dim in (
            (shape.query_heads, shape.key_dim),
            (shape.heads, shape.key_dim),
            (shape.heads, shape.value_dim),
        )
    )
    return Tokens(query=query, key=key, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens that one pass appends to a lane at ``position``; ``table`` names the lane's pages."""

    tokens: Tokens
    position: int
    table: Sequence[int]


def run(shape: Shape, pages: Tensor, pieces: Sequence[Piece], *, padding: int = 0) -> list[Tensor]:
    """One pass over pieces of many lanes; their results. ``padding`` rows come first."""
    width = max(len(piece.table) for piece in pieces)
    segments, tables, row = [], [], padding
    for piece in pieces:
        segments.append([row, len(piece.tokens), piece.position])
        tables.append([*piece.table, *[-1] * (width - len(piece.table))])
        row += len(piece.tokens)
    blank = random_tokens(shape, padding, seed=999)
    query, key, value = (
        torch.cat([getattr(blank, name), *(getattr(piece.tokens, name) for piece in pieces)])
        for name in ("query", "key", "value")
    )
    out = append_and_attend(
        query, key, value, pages, torch.tensor(segments), torch.tensor(tables, dtype=torch.int32), 1,
        shape.variant.scaling, shape.variant.window, shape.variant.softcap, shape.variant.sinks,
    )  # fmt: skip
    assert not out[:padding].any()
    return list(out[padding:].split([len(piece.tokens) for piece in pieces]))


def alone(shape: Shape, tokens: Tokens, *, pieces: int | None = None, order: Sequence[int] | None = None) -> Tensor:
    """A lane alone on fresh pages, ``pieces`` tokens a pass (all at once where None), on pages in ``order``."""
    count = shape.num_pages(len(tokens))
    table = list(order) if order is not None else list(range(count))
    pages, size = shape.arena(max(table) + 1), pieces or len(tokens)
    return torch.cat(
        [
            run(shape, pages, [Piece(tokens=tokens[start : start + size], position=start, table=table)])[0]
            for start in range(0, len(tokens), size)
        ]
    )


def with_pages(shape: Shape, page_tokens: int) -> Shape:
    return replace(shape, page_tokens=page_tokens)
