"""Which norms and activations of a model our row kernels can stand in for: found by comparison on random rows, never by name alone."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forkpoint.llm.kernels.row_modules import RowActivation, RowLayerNorm, RowRMSNorm

_ACTIVATIONS: Final = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh", "QuickGELUActivation": "quick_gelu", "ReLU": "relu", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "ReLUSquaredActivation": "relu_squared",
}  # fmt: skip
_PROBE_ROWS: Final = 32


def row_replacement(module: nn.Module) -> nn.Module | str | None:
    """Our module, the reason why there is none, or None for a module that is neither a norm nor an activation known here."""
    kind = type(module)
    if kind is nn.LayerNorm:
        return _layer_norm(module)
    if kind.__name__.endswith("RMSNorm"):
        return _rms_norm(module)
    return _activation(module) if kind.__name__ in _ACTIVATIONS else None


def _layer_norm(module: Any) -> nn.Module | str:
    if len(module.normalized_shape) != 1:
        return "normalises over several dimensions"
    made = RowLayerNorm(module.weight, module.bias, module.eps)
    dtype = module.weight.dtype if module.weight is not None else torch.float32
    rows = _probe(module.normalized_shape[0], dtype, module)
    return made if _agree(made(rows), module(rows), dtype) else "computes something else than our layer norm"


def _rms_norm(module: Any) -> nn.Module | str:
    weight = getattr(module, "weight", None)
    epsilon = next(
        (getattr(module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name)), None
    )
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return "has no weight and epsilon of its own"
    rows, other = _probe(len(weight), weight.dtype, weight), _probe(len(weight), weight.dtype, weight)[0]
    try:
        expected = functional_call(module, {"weight": other}, (rows,))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"cannot be run on rows alone: {error}"
    found = []
    for offset, rounds_once in product((0.0, 1.0), (False, True)):
        trial = RowRMSNorm(nn.Parameter(other, requires_grad=False), epsilon, offset=offset, rounds_once=rounds_once)
        out = trial(rows)
        if _agree(out, expected, weight.dtype):
            found.append((int((out != expected).sum()), offset, rounds_once))
    if not found:
        return "computes something else than our root-mean-square norms"
    made = [RowRMSNorm(weight, epsilon, offset=offset, rounds_once=once) for _, offset, once in sorted(found)]
    if weight.dtype == torch.float32:  # rows of half precision tell apart what rows of float32 do not
        half = rows.to(torch.bfloat16)
        wanted = module(half)
        for each in made:
            each.returns_float32 = wanted.dtype == torch.float32
        made = [each for each in made if _agree(each(half), wanted, torch.bfloat16)]
    return made[0] if made else "treats rows of half precision in a way of its own"


def _activation(module: nn.Module) -> nn.Module | str:
    kind = _ACTIVATIONS[type(module).__name__]
    if getattr(module, "approximate", None) == "tanh":
        kind = "gelu_tanh"
    made, rows = RowActivation(kind), _probe(256, torch.float32, None)
    wanted = module(rows.double()).float()  # in float32, a library's own may be further from the truth than ours
    return made if _agree(made(rows), wanted, torch.float32) else f"computes something else than our {kind}"


def _probe(dim: int, dtype: torch.dtype, like: object) -> Tensor:
    """Random rows, the same at every call with equal arguments."""
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    generator = torch.Generator().manual_seed(dim)
    return torch.randn(_PROBE_ROWS, dim, generator=generator).mul_(2.0).to(device=device, dtype=dtype)


def _agree(have: Tensor, want: object, dtype: torch.dtype) -> bool:
    if not isinstance(want, Tensor) or want.shape != have.shape or want.dtype != have.dtype:
        return False
    step = torch.finfo(dtype).eps
    return torch.allclose(have.float(), want.float(), rtol=4 * step, atol=4 * step)
