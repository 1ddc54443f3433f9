"""The attention that transformers calls, registered under one name when this module is imported; model code stays transformers' own.

A forward pass runs any number of rows, flat, of any number of lanes. The registered attention finds where each lane's keys and values lie
in its keyword arguments, so no pass leaves anything behind in a module.
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import AttentionInterface

from forkpoint.llm.resident.base import AttentionCall
from forkpoint.llm.resident.routed import STEP_KEYWORD

ATTENTION: Final = "forkpoint"
_BIASES: Final = ("position_bias", "relative_position_bias", "alibi")


@runtime_checkable
class Routes(Protocol):
    """Serves the attention of one pass, all lanes of a layer at a time."""

    def append_and_attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append ``key`` and ``value`` ``[rows heads dim]``, attend with ``query``; returns ``[rows query_heads value_dim]``."""
        ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """``query`` is ``[1 query_heads rows dim]``; returns ``[1 rows query_heads value_dim]``."""
    routes = kwargs[STEP_KEYWORD]
    assert isinstance(routes, Routes)
    if attention_mask is not None or any(kwargs.get(name) is not None for name in _BIASES):
        raise NotImplementedError("it adds a mask or bias of its own to attention")
    call = describe_call(module, query, kwargs)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return routes.append_and_attend(call, *rows)[None], None


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
