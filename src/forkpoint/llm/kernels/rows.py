"""Ops row by row: ``forkpoint::rms_norm``, ``layer_norm``, ``activation``, ``activation_product``.

Compiled kernels on the CPU, torch elsewhere and where none were built. A row's bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.geometry import DTYPE_CODES
from forkpoint.llm.kernels.native import find_native

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu_squared": lambda x: F.relu(x).square(),
}
"""Activations in the order of their native numbers, each with torch's version."""

_NUMBERS: Final = {kind: number for number, kind in enumerate(ACTIVATIONS)}

_LIBRARY: Final = torch.library.Library("forkpoint", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float epsilon, float offset=0.0, bool rounds_once=False) -> Tensor")
_LIBRARY.define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor")
_LIBRARY.define("activation(Tensor x, str kind) -> Tensor")
_LIBRARY.define("activation_product(Tensor gate, Tensor up, str kind) -> Tensor")


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, offset: float = 0.0, rounds_once: bool = False
) -> Tensor:
    """``x [... dim]`` over its root mean square, times ``offset + weight [dim]``.

    With offset 0 the normalised row is rounded before it is multiplied, as Llama does, unless ``rounds_once``; else all is float32 and
    rounded once, as Gemma does.
    """
    out: Tensor = torch.ops.forkpoint.rms_norm.default(x, weight, epsilon, offset, rounds_once)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """``x [... dim]`` less its mean, over its standard deviation, times ``weight`` plus ``bias``, in float32 and rounded once."""
    out: Tensor = torch.ops.forkpoint.layer_norm.default(x, weight, bias, epsilon)
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    """One of ``ACTIVATIONS``, in float32 and rounded once.

    Raises:
        InvalidInput: ``invalid_input.activation`` for another name.
    """
    out: Tensor = torch.ops.forkpoint.activation.default(x, kind)
    return out


def activation_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``activation(gate)``, rounded, times ``up``; both ``[... dim]``.

    Raises:
        InvalidInput: ``invalid_input.activation`` for another name.
    """
    out: Tensor = torch.ops.forkpoint.activation_product.default(gate, up, kind)
    return out


def _native_for(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The compiled kernels, where they can compute this."""
    fits = x.dtype in DTYPE_CODES and all(each is None or each.dtype == x.dtype for each in others)
    return find_native() if fits and x.numel() else None


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _plain(weight: Tensor | None, dim: int) -> Tensor | None:
    if weight is not None and weight.shape != (dim,):
        raise InvalidInput(f"weights of shape {tuple(weight.shape)} do not fit rows of {dim}", code="norm")
    return None if weight is None else weight.contiguous()


def _check_rows(x: Tensor) -> None:
    if x.dim() == 0:
        raise InvalidInput("one number is no row; a norm is over rows", code="norm")


def _number(kind: str) -> int:
    if kind not in _NUMBERS:
        raise InvalidInput(f"there is no activation {kind!r}; there are {', '.join(_NUMBERS)}", code="activation")
    return _NUMBERS[kind]


def _rms_on_cpu(
    x: Tensor, weight: Tensor | None, epsilon: float, offset: float = 0.0, rounds_once: bool = False
) -> Tensor:
    _check_rows(x)
    native = _native_for(x, weight)
    if native is None:
        return _rms_with_torch(x, weight, epsilon, offset, rounds_once)
    rows, weight = _rows(x), _plain(weight, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype)
    native.rms_norm(
        rows.data_ptr(), rows.stride(0), _at(weight), epsilon, offset, rounds_once, out.data_ptr(), rows.shape[1], len(rows),
        rows.shape[1], DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rms_with_torch(
    x: Tensor, weight: Tensor | None, epsilon: float, offset: float = 0.0, rounds_once: bool = False
) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return normal.to(x.dtype)
    if offset == 0.0 and not rounds_once:
        return weight * normal.to(x.dtype)
    return (normal * (offset + weight.float())).to(x.dtype)


def _layer_on_cpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    _check_rows(x)
    native = _native_for(x, weight, bias)
    if native is None:
        return _layer_with_torch(x, weight, bias, epsilon)
    rows, weight, bias = _rows(x), _plain(weight, x.shape[-1]), _plain(bias, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype)
    native.layer_norm(
        rows.data_ptr(), rows.stride(0), _at(weight), _at(bias), epsilon, out.data_ptr(), rows.shape[1], len(rows), rows.shape[1],
        DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _layer_with_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def _activation_on_cpu(x: Tensor, kind: str) -> Tensor:
    number, native = _number(kind), _native_for(x)
    if native is None or x.dim() == 0:
        return _activation_with_torch(x, kind)
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.activation(
        number, rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[1], len(rows), rows.shape[1], DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _activation_with_torch(x: Tensor, kind: str) -> Tensor:
    _number(kind)
    return ACTIVATIONS[kind](x)


def _product_on_cpu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    number, native = _number(kind), _native_for(gate, up)
    if native is None or gate.shape != up.shape or gate.dim() == 0:
        return _product_with_torch(gate, up, kind)
    left, right = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    native.activation_product(
        number, left.data_ptr(), left.stride(0), right.data_ptr(), right.stride(0), out.data_ptr(), left.shape[1], len(left),
        left.shape[1], DTYPE_CODES[gate.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _product_with_torch(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _activation_with_torch(gate, kind) * up


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_VERSIONS: Final[dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]] = {
    "rms_norm": (_rms_on_cpu, _rms_with_torch),
    "layer_norm": (_layer_on_cpu, _layer_with_torch),
    "activation": (_activation_on_cpu, _activation_with_torch),
    "activation_product": (_product_on_cpu, _product_with_torch),
}
for _name, (_on_cpu, _with_torch) in _VERSIONS.items():
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    _LIBRARY.impl(_name, _with_torch, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _like_first, "Meta")
