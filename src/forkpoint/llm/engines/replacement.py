"""Which layers of a transformers model run on our kernels: replaced in place, module by module, so that model code stays theirs.

Dense layers get packed weights, which replace the plain ones in memory; an embedding that shares them with the head is read from the packed
form too. Norms and activations are replaced where a comparison on random rows shows that ours computes the same. What is left alone runs
through the library in blocks of a fixed number of rows, or is reported with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forkpoint.llm.engines.row_replacement import row_replacement
from forkpoint.llm.kernels.dense import in_blocks
from forkpoint.llm.kernels.experts import EXPERTS
from forkpoint.llm.kernels.geometry import DTYPE_CODES
from forkpoint.llm.kernels.linear import BlockedLinear, PackedEmbedding, PackedLinear
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.kernels.row_modules import RowActivation, RowLayerNorm, RowRMSNorm

OURS: Final = (PackedLinear, PackedEmbedding, BlockedLinear, RowRMSNorm, RowLayerNorm, RowActivation)

_PROBE_IDS: Final = 32
_IN_BLOCKS: Final = "stays, and runs in blocks of a fixed number of rows"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """What became of a model's modules.

    Attributes:
        replaced: the name of our module by the name of the replaced one.
        left: why a module that computes with weights, or that changes rows, was left alone, by its name.
    """

    replaced: Mapping[str, str]
    left: Mapping[str, str]

    def counts(self) -> dict[str, int]:
        """How many of each of our modules the model has."""
        return dict(Counter(self.replaced.values()))


def replace_modules(model: nn.Module) -> Replacements:
    """Replace what our kernels can compute; parameters that are replaced are freed one by one. Safe to run twice.

    Works on a model in inference, on any device; what the model's modules share stays shared.
    """
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    shared = _Shared(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in OURS or name.endswith(".inner"):
            if type(module) in OURS:
                replaced[name] = type(module).__name__
            continue
        found = _find_replacement(module, shared)
        if isinstance(found, nn.Module):
            _put(model, name, found)
            replaced[name] = type(found).__name__
            if isinstance(found, PackedLinear | PackedEmbedding):
                module.register_parameter("weight", None)  # frees the plain form now, not when all are done
        elif isinstance(found, str):
            left[name] = found
    _use_our_experts(model, replaced, left)
    _own_what_stays(model)
    return Replacements(replaced=replaced, left=left)


def _own_what_stays(model: nn.Module) -> None:
    """Copy what was not packed out of the file that it may be mapped from: one view keeps all of the file in memory."""
    packed = {
        module.packed.data_ptr() for module in model.modules() if isinstance(module, PackedLinear | PackedEmbedding)
    }
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() not in packed:
            tensor.data = tensor.data.clone()


@final
class _Shared:
    """What was made of modules and weights that occur more than once."""

    def __init__(self, model: Any) -> None:
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        weight = getattr(embedding, "weight", None)
        is_tied = weight is not None and getattr(head, "weight", None) is weight
        self.tied = weight if is_tied else None
        self._packed: dict[int, tuple[object, Tensor]] = {}
        self.modules: dict[int, nn.Module] = {}

    def packed(self, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The packed form of a weight, made once. Only a tied weight is remembered, and kept alive no longer than this."""
        if weight is not self.tied:
            return make()
        if id(weight) not in self._packed:
            self._packed[id(weight)] = (weight, make())
        return self._packed[id(weight)][1]


def _find_replacement(module: nn.Module, shared: _Shared) -> nn.Module | str | None:
    """Our module, the reason why there is none, or None for a module that is not of a kind that is replaced."""
    known = shared.modules.get(id(module))
    if known is not None:
        return known
    found = _make_replacement(module, shared)
    if isinstance(found, nn.Module):
        found.train(module.training)
        shared.modules[id(module)] = found
    return found


def _make_replacement(module: nn.Module, shared: _Shared) -> nn.Module | str | None:
    kind = type(module)
    if kind is nn.Linear or kind is Conv1D:
        return _dense(module, shared)
    if isinstance(module, nn.Linear):
        return BlockedLinear(module)
    if isinstance(module, nn.Embedding):
        return _embedding(module, shared)
    if kind.__name__.endswith("Router"):
        return _router(module)
    return row_replacement(module)


def _dense(module: Any, shared: _Shared) -> nn.Module | str:
    weight, bias = module.weight, module.bias
    if weight.dtype not in DTYPE_CODES or module._forward_hooks or module._forward_pre_hooks:
        return BlockedLinear(module)
    if find_native() is None or weight.device.type != "cpu":
        return BlockedLinear(module)
    is_transposed = isinstance(module, Conv1D)
    made = PackedLinear.of(weight.detach(), bias, is_transposed=is_transposed) if weight is not shared.tied else None
    if made is not None:
        return made
    packed = shared.packed(weight, lambda: PackedLinear.of(weight.detach()).packed)
    return PackedLinear(packed, bias, inputs=weight.shape[1], outputs=weight.shape[0])


def _embedding(module: nn.Embedding, shared: _Shared) -> nn.Module | str | None:
    weight = module.weight
    if (
        weight is not shared.tied
        or find_native() is None
        or weight.device.type != "cpu"
        or weight.dtype not in DTYPE_CODES
    ):
        return None
    packed = shared.packed(weight, lambda: PackedLinear.of(weight.detach()).packed)
    scale = getattr(module, "embed_scale", None)
    made = PackedEmbedding(
        packed,
        num_embeddings=weight.shape[0],
        dim=weight.shape[1],
        scale=scale if isinstance(scale, Tensor) else None,
    )
    ids = torch.arange(min(_PROBE_IDS, weight.shape[0]))
    if not torch.equal(made(ids), module(ids)):
        shared.tied = None
        return "looks rows up in a way of its own; its weights are kept twice"
    return made


def _router(module: Any) -> str:
    """Routers multiply by weights of their own: the module stays, and is called on blocks of a fixed number of rows."""
    if "forward" in vars(module):
        return _IN_BLOCKS
    weight, own = getattr(module, "weight", None), module.forward
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return "is a router without weights that are known here"
    probe = own(weight.new_zeros(1, weight.shape[1]))
    if not all(isinstance(part, Tensor) and len(part) == 1 for part in _as_tuple(probe)):
        return "is a router that returns something else than rows"

    def forward(rows: Tensor) -> Any:
        flat = rows.reshape(-1, rows.shape[-1])
        parts: list[tuple[Tensor, ...]] = []

        def run(block: Tensor) -> Tensor:
            parts.append(_as_tuple(own(block)))
            return block

        in_blocks(run, flat)
        outs = tuple(torch.cat(each)[: len(flat)] for each in zip(*parts, strict=True))
        return outs if isinstance(probe, tuple) else outs[0]

    module.forward = forward
    return _IN_BLOCKS


def _as_tuple(outs: Any) -> tuple[Any, ...]:
    return outs if isinstance(outs, tuple) else (outs,)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, member = name.rpartition(".")
    setattr(model.get_submodule(parent), member, module)


def _use_our_experts(model: nn.Module, replaced: dict[str, str], left: dict[str, str]) -> None:
    """Choose our experts function where a model's experts can be chosen."""
    names = [name for name, module in model.named_modules() if hasattr(module, "_apply_gate")]
    if not names:
        return
    config: Any = model.config
    config._experts_implementation = EXPERTS
    for name in names:
        module: Any = model.get_submodule(name)
        module.config._experts_implementation = EXPERTS
        if module.config._experts_implementation == EXPERTS:
            replaced[name] = "experts"
        else:
            left[name] = "its experts cannot be chosen"
