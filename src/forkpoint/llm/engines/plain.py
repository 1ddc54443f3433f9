"""A model's parameters in plain layout under the names they had before modules were replaced (``engines.replacement``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from forkpoint.llm.kernels.linear import BlockedLinear, PackedEmbedding, PackedLinear


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter or buffer as the model holds it.

    Attributes:
        name: before replacement.
        tensor: as held, packed or plain.
        packed: the module that packed it, or None.
    """

    name: str
    tensor: Tensor
    packed: PackedLinear | PackedEmbedding | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The plain shape."""
        return tuple(self.tensor.shape) if self.packed is None else self.packed.plain_shape()

    @property
    def nbytes(self) -> int:
        """Bytes of the plain form."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.tensor.element_size()

    def plain(self) -> Tensor:
        """The plain form; in new memory where it is packed."""
        return self.tensor if self.packed is None else self.packed.unpacked()

    def load(self, value: Tensor) -> None:
        """Replace it by a plain value of the same shape, in place."""
        if self.packed is None:
            self.tensor.copy_(value)
        else:
            self.packed.load(value)


def held_tensors(model: nn.Module) -> list[Held]:
    """Every parameter and buffer, in order of name; a tensor shared under two names comes once, under its first."""
    found: dict[int, Held] = {}
    for path, module in model.named_modules():
        prefix = _original_path(model, path)
        for member, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in found:
                continue
            packed = module if member == "packed" and isinstance(module, PackedLinear | PackedEmbedding) else None
            name = member if packed is None else "weight"
            found[id(tensor)] = Held(name=f"{prefix}.{name}" if prefix else name, tensor=tensor, packed=packed)
    return sorted(found.values(), key=lambda held: held.name)


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer in plain layout by its original name, in order of name; packed ones are unpacked one at a time."""
    for held in held_tensors(model):
        yield held.name, held.plain()


def _original_path(model: nn.Module, path: str) -> str:
    parent, _, member = path.rpartition(".")
    return parent if member == "inner" and isinstance(model.get_submodule(parent), BlockedLinear) else path
