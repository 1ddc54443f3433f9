"""What kinds of state a model holds, found by running it once, not by its name.

A forward pass of four tokens records what each attention layer appends. A model whose cache has layers of any other kind is refused
with the layer and its class named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import forkpoint.llm.engines.attention  # noqa: F401 (registers the attention that the model calls)
from forkpoint.errors import Incompatible
from forkpoint.llm.resident.base import AttentionCall, GroupSpec
from forkpoint.llm.resident.routed import STEP_KEYWORD

_SUPPORTED: Final = (DynamicLayer, DynamicSlidingWindowLayer)
_ATTENTION_KINDS: Final = {"full_attention", "sliding_attention"}
_PROBE_TOKENS: Final = 4
_UNSTATED_CONTEXT: Final = 1 << 17
_VARYING_ROPE: Final = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class _Shape:
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None


@final
class _Recorder:
    """Serves a pass by noting the shapes it is given; keeps nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, _Shape] = {}

    def append_and_attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.shapes[call.layer] = _Shape(key.shape[1], key.shape[2], value.shape[2], key.dtype, call.window)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def find_groups(model: Any) -> tuple[GroupSpec, ...]:
    """The state groups of a causal language model.

    Raises:
        Incompatible: ``incompatible.architecture`` naming the layer and class that holds state of an unsupported kind, or
            saying that the model does not pass attention keywords through.
    """
    for index, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in _SUPPORTED:
            raise _unsupported(f"layer {index} keeps its state in a {type(layer).__name__}")
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    varying = sorted(_rope_types(rope) & _VARYING_ROPE)
    if varying:
        raise _unsupported(f"its positions ({', '.join(varying)}) are computed anew as the text grows")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or _ATTENTION_KINDS)
    if not kinds <= _ATTENTION_KINDS:
        raise _unsupported(f"it has layers of kind {', '.join(sorted(kinds - _ATTENTION_KINDS))}")
    recorder = _Recorder()
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=positions, use_cache=False, **{STEP_KEYWORD: recorder})
    except (KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise _unsupported(f"its attention cannot be replaced ({type(error).__name__}: {error})") from error
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(recorder.shapes) != list(range(expected)):
        missing = sorted(set(range(expected)) - set(recorder.shapes))
        raise _unsupported(f"layers {missing} hold state that is not keys and values")
    return _grouped(recorder.shapes)


def context_limit(model: Any) -> int:
    """Tokens that the model itself takes at most."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNSTATED_CONTEXT)


def end_tokens(model: Any) -> list[int]:
    """Tokens that end a text, as the generation configuration says or, without it, the model's own."""
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        end = getattr(model.config.get_text_config(), "eos_token_id", None)
    return [] if end is None else [int(token) for token in (end if isinstance(end, list) else [end])]


def _rope_types(rope: object) -> set[str]:
    """Every ``rope_type`` in the parameters of a model, which may keep one set for each kind of layer."""
    if not isinstance(rope, Mapping):
        return set()
    own = rope.get("rope_type")
    return ({own} if isinstance(own, str) else set()).union(*map(_rope_types, rope.values()))


def learned_positions(model: Any) -> bool:
    """Whether positions are a learned table, so that a token's state depends on its absolute position from the start of the text."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "rope_parameters", None) or limit is None:
        return False
    words = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words)
    return any(limit <= table.num_embeddings <= limit + 2 for table in tables)


def _grouped(shapes: dict[int, _Shape]) -> tuple[GroupSpec, ...]:
    kinds: dict[_Shape, list[int]] = {}
    for layer, shape in sorted(shapes.items()):
        kinds.setdefault(shape, []).append(layer)
    return tuple(
        GroupSpec(
            name=f"attention.{index:02d}",
            layers=tuple(layers),
            num_heads=shape.num_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=shape.dtype,
            window=shape.window,
        )
        for index, (shape, layers) in enumerate(kinds.items())
    )


def _unsupported(why: str) -> Incompatible:
    return Incompatible(
        f"this model cannot be continued exactly here: {why}",
        code="architecture",
        field="architecture",
        have=why,
        want="keys and values",
    )
