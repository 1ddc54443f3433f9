"""Attention of one lane, written to be read: the order of every sum that the native kernel keeps, and the float64 oracle of both.

``attend_in_order`` computes what ``native/attention_block.h`` and ``native/attention_weights.h`` compute, in the same order and with the
same roundings; a fused multiply-add is taken in float64 and rounded to float32, which differs from a truly fused one about once in 10^8
operations. Neither function is fast, and neither is used to serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.llm.kernels.variant import BLOCK_TOKENS, Variant

_LOG2_E: Final = torch.tensor(1.44269504, dtype=torch.float32)
_POWER: Final = (0.00132647271, 0.00967151268, 0.0555073374, 0.240222421, 0.693146978, 1.0)


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, positions: Sequence[int], variant: Variant) -> Tensor:
    """Float64 attention.

    Args:
        query: ``[rows query_heads key_dim]``.
        keys, values: ``[tokens heads dim]``; query heads are grouped over them in order.
        positions: of each row; a row sees keys up to its own.

    Returns:
        ``[rows query_heads value_dim]`` in float64.
    """
    group = query.shape[1] // keys.shape[1]
    rows = []
    for row, position in enumerate(positions):
        seen = slice(variant.first_seen(position), position + 1)
        key, value = (part[seen].double().repeat_interleave(group, dim=1) for part in (keys, values))
        logits = torch.einsum("hd,thd->ht", query[row].double(), key) * variant.scaling
        if variant.softcap:
            logits = torch.tanh(logits / variant.softcap) * variant.softcap
        if variant.sinks is not None:
            logits = torch.cat([logits, variant.sinks.double()[:, None]], dim=1)
        weights = torch.softmax(logits, dim=1)[:, : len(key)]
        rows.append(torch.einsum("ht,thd->hd", weights, value))
    return torch.stack(rows)


def attend_in_order(query: Tensor, keys: Tensor, values: Tensor, positions: Sequence[int], variant: Variant) -> Tensor:
    """Attention in the native kernel's order; arguments as of ``attend_exactly``, result in the query's dtype."""
    group = query.shape[1] // keys.shape[1]
    rows = []
    for row, position in enumerate(positions):
        first = variant.first_seen(position)
        running: _Partial | None = None
        for block in range(first // BLOCK_TOKENS, position // BLOCK_TOKENS + 1):
            low, high = max(first, block * BLOCK_TOKENS), min(position + 1, (block + 1) * BLOCK_TOKENS)
            key, value = (part[low:high].float().repeat_interleave(group, dim=1) for part in (keys, values))
            partial = _attend_block(query[row].float(), key, value, low, variant)
            running = partial if running is None else _merge(running, partial)
        assert running is not None
        rows.append(_finish(running, variant).to(query.dtype))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partial:
    maximum: Tensor  # [query_heads], a power of two's exponent
    sum: Tensor  # [query_heads]
    values: Tensor  # [query_heads value_dim]


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, low: int, variant: Variant) -> _Partial:
    query = -query if variant.scaling < 0 else query  # so that the largest dot product has the largest weight
    dots = torch.zeros(keys.shape[1], keys.shape[0])
    for d in range(query.shape[1]):
        dots = _fused(query[:, d, None], keys[:, :, d].T, dots)
    maximum = _logits(dots.amax(dim=1, keepdim=True), torch.zeros(()), variant)
    weights = _power(_logits(dots, -maximum, variant))
    total = torch.zeros(values.shape[1:])
    for token in range(len(values)):
        total = _fused(weights[:, token, None], values[token], total)
    return _Partial(maximum=maximum[:, 0], sum=_sum_by_lane(weights, low), values=total)


def _logits(dots: Tensor, offset: Tensor, variant: Variant) -> Tensor:
    scaling = torch.tensor(abs(variant.scaling), dtype=torch.float32)
    if not variant.softcap:
        return _fused(dots, scaling * _LOG2_E, offset)
    cap = torch.tensor(variant.softcap, dtype=torch.float32)
    grown = _power((dots * (scaling / cap * (2 * _LOG2_E))).clamp(max=126))
    return _fused(1 - 2 / (grown + 1), cap * _LOG2_E, offset)  # tanh(y) = 1 - 2 / (e^2y + 1)


def _sum_by_lane(weights: Tensor, low: int) -> Tensor:
    """Sixteen sums by position modulo 16, over positions in order; then halves are added to halves."""
    lanes = torch.zeros(weights.shape[0], 16)
    for token in range(weights.shape[1]):
        lanes[:, (low + token) % 16] += weights[:, token]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _merge(first: _Partial, then: _Partial) -> _Partial:
    maximum = torch.maximum(first.maximum, then.maximum)
    keep, add = _power(first.maximum - maximum), _power(then.maximum - maximum)
    return _Partial(
        maximum=maximum,
        sum=_fused(first.sum, keep, then.sum * add),
        values=_fused(first.values, keep[:, None], then.values * add[:, None]),
    )


def _finish(partial: _Partial, variant: Variant) -> Tensor:
    if variant.sinks is None:
        return partial.values / partial.sum[:, None]
    sinks = variant.sinks.float() * _LOG2_E
    maximum = torch.maximum(partial.maximum, sinks)
    keep = _power(partial.maximum - maximum)
    total = _fused(partial.sum, keep, _power(sinks - maximum))
    return partial.values * keep[:, None] / total[:, None]


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def _power(exponent: Tensor) -> Tensor:
    """2 to the exponent by the native kernel's polynomial, at least 2^-125."""
    exponent = exponent.clamp(min=-125)
    whole = exponent.round()
    rest = exponent - whole
    total = torch.full_like(rest, _POWER[0])
    for coefficient in _POWER[1:]:
        total = _fused(total, rest, torch.tensor(coefficient, dtype=torch.float32))
    return torch.ldexp(total, torch.nan_to_num(whole).int())


def error_bound(
    dtype: torch.dtype, *, key_dim: int, num_tokens: int, largest_logit: float, largest_value: float
) -> float:
    """A bound of one element's distance from ``attend_exactly``: the usual bound of sums in order, then one rounding of the result.

    A logit is off by at most ``(key_dim + 4) u`` of the sum of its products' magnitudes (``largest_logit`` bounds that sum, scaled);
    a weight relatively by as much and a few units more; a sum of weights in blocks of 256 by ``(256 + blocks + 4) u``.
    """
    unit = 2.0**-24
    blocks = math.ceil(num_tokens / BLOCK_TOKENS)
    relative = unit * (2 * (key_dim + 4) * largest_logit + 2 * (BLOCK_TOKENS + 2 * blocks + 8) + 16)
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    return largest_value * (relative + rounding) + 2.0**-24
