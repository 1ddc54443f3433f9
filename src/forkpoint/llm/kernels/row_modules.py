"""Modules that stand in a transformers model for its norms and activations. Parameters keep their names."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from forkpoint.llm.kernels.rows import activation, layer_norm, rms_norm


@final
class RowRMSNorm(nn.Module):
    """See ``kernels.rows.rms_norm``."""

    def __init__(self, weight: nn.Parameter, epsilon: float, *, offset: float, rounds_once: bool) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = self.eps = epsilon
        self.offset = offset
        self.rounds_once = rounds_once
        self.returns_float32 = False

    def forward(self, x: Tensor) -> Tensor:
        """``[... dim]`` to the same. A weight that is kept in float32 beside rows of half precision multiplies before they are rounded."""
        if x.dtype != self.weight.dtype:
            out = rms_norm(x.to(self.weight.dtype), self.weight, self.eps, self.offset, self.rounds_once)
            return out if self.returns_float32 else out.to(x.dtype)
        return rms_norm(x, self.weight, self.eps, self.offset, self.rounds_once)


@final
class RowLayerNorm(nn.Module):
    """See ``kernels.rows.layer_norm``."""

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """``[... dim]`` to the same."""
        return layer_norm(x, self.weight, self.bias, self.eps)


@final
class RowActivation(nn.Module):
    """See ``kernels.rows.activation``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """``[... dim]`` to the same."""
        return activation(x, self.kind)

    def extra_repr(self) -> str:
        """Its kind."""
        return self.kind
