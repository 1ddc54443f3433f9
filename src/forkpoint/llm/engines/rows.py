"""One entry point for a model: rows of (token, position, lane), and the attention that serves them.

A forward pass runs any number of rows, flat. Each *segment* of rows is one lane's append, and attends only to its own lane. Rows that
belong to no segment are padding: token-parallel layers compute them, nothing keeps them. The registered attention finds the segments in
its keyword arguments, so no pass leaves anything behind in a module and model code stays
transformers' own. The attention itself is registered with transformers under one name when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forkpoint.llm.resident.base import AttentionCall, Reservation
from forkpoint.llm.resident.routed import RoutedStep

ATTENTION: Final = "forkpoint"
STEP_KEYWORD: Final = "forkpoint_step"
_BIASES: Final = ("position_bias", "relative_position_bias", "alibi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows ``[row, row + len(tokens))`` of a forward pass: ``tokens`` of one lane at positions ``reservation.start`` on."""

    row: int
    tokens: Sequence[int]
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The segments of one forward pass."""

    segments: tuple[Segment, ...]
    num_rows: int

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids and positions, ``[1 rows]`` each; padding is token 0 at position 0."""
        tokens = torch.zeros(1, self.num_rows, dtype=torch.long)
        positions = torch.zeros(1, self.num_rows, dtype=torch.long)
        for segment in self.segments:
            rows = slice(segment.row, segment.row + len(segment.tokens))
            tokens[0, rows] = torch.tensor(segment.tokens, dtype=torch.long)
            positions[0, rows] = torch.arange(segment.reservation.start, segment.reservation.stop)
        return tokens.to(device), positions.to(device)


def lay_out(lanes: Sequence[tuple[Sequence[int], Reservation]], *, min_rows: int) -> Step:
    """Lay lanes' rows end to end, padded up to ``min_rows`` rows."""
    segments, row = [], 0
    for tokens, reservation in lanes:
        assert len(tokens) == reservation.stop - reservation.start
        segments.append(Segment(row=row, tokens=tokens, reservation=reservation))
        row += len(tokens)
    return Step(segments=tuple(segments), num_rows=max(row, min_rows))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """``query`` is ``[1 query_heads rows dim]``; returns ``[1 rows query_heads value_dim]``."""
    step = kwargs[STEP_KEYWORD]
    if attention_mask is not None or any(kwargs.get(name) is not None for name in _BIASES):
        raise NotImplementedError("it adds a mask or bias of its own to attention")
    call = describe_call(module, query, kwargs)
    if isinstance(step, RoutedStep):
        return step.append_and_attend(call, *(rows[0].transpose(0, 1) for rows in (query, key, value)))[None], None
    assert isinstance(step, Step)
    out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    for segment in step.segments:
        rows = slice(segment.row, segment.row + len(segment.tokens))
        out[0, rows] = segment.reservation.append_and_attend(
            call, query[0, :, rows].transpose(0, 1), key[0, :, rows].transpose(0, 1), value[0, :, rows].transpose(0, 1)
        )
    return out, None


def describe_call(module: nn.Module, query: Tensor, kwargs: dict[str, object]) -> AttentionCall:
    """The attention a layer asks for, from the keywords that transformers passes to attention functions."""
    scaling, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    softcap, sinks, layer = kwargs.get("softcap"), kwargs.get("s_aux"), module.layer_idx
    assert isinstance(layer, int)
    return AttentionCall(
        layer=layer,
        scaling=float(scaling) if isinstance(scaling, int | float) else query.shape[-1] ** -0.5,
        window=window if isinstance(window, int) else None,
        softcap=float(softcap) if isinstance(softcap, int | float) else None,
        sinks=sinks if isinstance(sinks, Tensor) else None,
    )


# No mask function is registered under this name, and that tells transformers to make none, without looking at positions.
AttentionInterface.register(ATTENTION, _attention)
