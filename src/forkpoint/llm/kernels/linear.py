"""Modules that stand in a transformers model for its own layers of weights. Weights exist once: the packed form replaces the plain one.

A packed module has no ``weight``: who would change it in place would change a copy. Its plain weights are read with ``unpacked()`` and
replaced with ``load()``; its ``packed`` buffer counts versions like any tensor.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from forkpoint.llm.kernels.dense import BLOCK_ROWS, in_blocks, pack, packed_embedding, packed_linear, unpack


@final
class PackedLinear(nn.Module):
    """``x W^T + bias`` with packed weights.

    Attributes:
        packed: buffer, see ``kernels.dense``.
        bias: the parameter of the layer it replaced, or None.
        is_transposed: whether the plain weights of that layer are ``[inputs outputs]`` (GPT-2's Conv1D).
    """

    packed: Tensor

    def __init__(
        self, packed: Tensor, bias: nn.Parameter | None, *, inputs: int, outputs: int, is_transposed: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.bias = bias
        self.in_features = inputs
        self.out_features = outputs
        self.is_transposed = is_transposed

    @staticmethod
    def of(weight: Tensor, bias: nn.Parameter | None = None, *, is_transposed: bool = False) -> PackedLinear:
        """Pack plain weights: ``[outputs inputs]``, or ``[inputs outputs]`` when transposed."""
        plain = weight.t() if is_transposed else weight
        outputs, inputs = plain.shape
        return PackedLinear(pack(plain), bias, inputs=inputs, outputs=outputs, is_transposed=is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """``[... inputs]`` to ``[... outputs]``."""
        return packed_linear(x, self.packed, self.bias, self.out_features)

    def unpacked(self) -> Tensor:
        """The plain weights in the layout of the layer it replaced, bit for bit, in new memory."""
        plain = unpack(self.packed, self.in_features, self.out_features)
        return plain.t().contiguous() if self.is_transposed else plain

    def plain_shape(self) -> tuple[int, int]:
        """The shape of ``unpacked()``."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.is_transposed else shape

    def load(self, weight: Tensor) -> None:
        """Replace the weights by plain ones, in place."""
        plain = weight.to(self.packed.dtype)
        pack(plain.t() if self.is_transposed else plain, self.packed)

    def extra_repr(self) -> str:
        """As ``nn.Linear`` shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@final
class PackedEmbedding(nn.Module):
    """Rows of packed weights by token id, times a scale where the model has one (Gemma)."""

    packed: Tensor
    embed_scale: Tensor | None

    def __init__(self, packed: Tensor, *, num_embeddings: int, dim: int, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("embed_scale", scale, persistent=False)
        self.num_embeddings = num_embeddings
        self.embedding_dim = dim

    def forward(self, ids: Tensor) -> Tensor:
        """``[... dim]`` for int64 ``ids [...]``."""
        rows = packed_embedding(ids, self.packed, self.num_embeddings, self.embedding_dim)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)

    def unpacked(self) -> Tensor:
        """The plain weights, bit for bit, in new memory."""
        return unpack(self.packed, self.embedding_dim, self.num_embeddings)

    def plain_shape(self) -> tuple[int, int]:
        """The shape of ``unpacked()``."""
        return self.num_embeddings, self.embedding_dim

    def load(self, weight: Tensor) -> None:
        """Replace the weights by plain ones, in place; a head that shares them sees the new ones."""
        pack(weight.to(self.packed.dtype), self.packed)


@final
class BlockedLinear(nn.Module):
    """A library's own layer, run on blocks of exactly ``block_rows`` rows: a row's bits do not depend on how many there are."""

    def __init__(self, inner: nn.Module, block_rows: int = BLOCK_ROWS) -> None:
        super().__init__()
        self.inner = inner
        self.block_rows = block_rows

    def forward(self, x: Tensor) -> Tensor:
        """``[... inputs]`` to ``[... outputs]``."""
        rows = in_blocks(self.inner, x.reshape(-1, x.shape[-1]), self.block_rows)
        return rows.view(*x.shape[:-1], rows.shape[-1])
