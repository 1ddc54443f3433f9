"""Ops on packed weights: ``forkpoint::packed_linear`` and ``forkpoint::packed_embedding``.

Packed form (docs/design/0011): bfloat16 ``[outputs/16][inputs/2][16][2]``, others ``[outputs/16][inputs][16]``, zero-padded, as a tensor of
one dimension. A row's bits do not depend on the rows beside it, on threads, or on where it runs in memory. Where no compiled kernels serve,
torch unpacks and multiplies in blocks of a fixed number of rows: slower, and different from the compiled kernels in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.geometry import DTYPE_CODES
from forkpoint.llm.kernels.native import find_native

LANES: Final = 16
"""Outputs side by side."""

BLOCK_ROWS: Final = 8
"""Rows of every product that a library computes: a library's sums depend on how many rows it is given."""

_LIBRARY: Final = torch.library.Library("forkpoint", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
_LIBRARY.define("packed_embedding(Tensor ids, Tensor packed, int outputs, int dim) -> Tensor")


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``x W^T + bias``, in the dtype of all three.

    Args:
        x: ``[... inputs]``.
        packed: of ``pack``.
        bias: ``[outputs]``, added in float32 before rounding, or None.
        outputs: of the plain weights.

    Raises:
        InvalidInput: ``invalid_input.packed`` where sizes or dtypes do not fit together.
    """
    out: Tensor = torch.ops.forkpoint.packed_linear.default(x, packed, bias, outputs)
    return out


def packed_embedding(ids: Tensor, packed: Tensor, outputs: int, dim: int) -> Tensor:
    """Rows of the plain weights ``[outputs dim]``: ``[... dim]`` for int64 ``ids [...]``.

    Raises:
        InvalidInput: ``invalid_input.packed`` where sizes do not fit; ``invalid_input.tokens`` for an id out of range.
    """
    out: Tensor = torch.ops.forkpoint.packed_embedding.default(ids, packed, outputs, dim)
    return out


def packed_elements(inputs: int, outputs: int, dtype: torch.dtype) -> int:
    """Elements of the packed form."""
    step = _step(dtype)
    return -(-outputs // LANES) * LANES * -(-inputs // step) * step


def pack(weight: Tensor, into: Tensor | None = None) -> Tensor:
    """The packed form of ``weight [outputs inputs]``, in new memory or in that of ``into``.

    Raises:
        InvalidInput: ``invalid_input.packed`` for a dtype that no kernel knows, or where ``into`` does not fit.
    """
    if weight.dtype not in DTYPE_CODES or weight.dim() != 2:
        raise InvalidInput(f"a {weight.dtype} of shape {tuple(weight.shape)} cannot be packed", code="packed")
    outputs, inputs = weight.shape
    packed = into
    if packed is None:
        packed = torch.empty(packed_elements(inputs, outputs, weight.dtype), dtype=weight.dtype, device=weight.device)
    _check(packed, weight.dtype, inputs, outputs)
    native = find_native()
    if native is None or weight.device.type != "cpu":
        packed.copy_(_pack_with_torch(weight))
        return packed
    if into is None:
        native.advise_large_pages(packed.data_ptr(), packed.nbytes)
    plain = weight.detach().contiguous()
    code, threads = DTYPE_CODES[weight.dtype], torch.get_num_threads()
    native.pack(plain.data_ptr(), packed.data_ptr(), inputs, outputs, code, threads)
    if into is not None:
        torch.autograd.graph.increment_version(packed)
    return packed


def unpack(packed: Tensor, inputs: int, outputs: int) -> Tensor:
    """The plain weights ``[outputs inputs]`` that ``packed`` was made of, bit for bit."""
    _check(packed, packed.dtype, inputs, outputs)
    native = find_native()
    if native is None or packed.device.type != "cpu":
        return _unpack_with_torch(packed, inputs, outputs)
    plain = torch.empty(outputs, inputs, dtype=packed.dtype)
    code, threads = DTYPE_CODES[packed.dtype], torch.get_num_threads()
    native.unpack(packed.data_ptr(), plain.data_ptr(), inputs, outputs, code, threads)
    return plain


def in_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, block_rows: int = BLOCK_ROWS) -> Tensor:
    """``function`` of ``rows [n inputs]`` in blocks of exactly ``block_rows``; the last is padded with zeros."""
    padding = -len(rows) % block_rows
    padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
    outs = [function(padded[start : start + block_rows]) for start in range(0, len(padded), block_rows)]
    if not outs:
        return function(rows.new_zeros(block_rows, rows.shape[1]))[:0]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[: len(rows)]


def _check_ids(ids: Tensor, outputs: int) -> None:
    if ids.dtype != torch.int64 or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < outputs):
        raise InvalidInput(f"token ids must be int64 in [0, {outputs})", code="tokens")


def _num_inputs(x: Tensor) -> int:
    return x.shape[-1] if x.dim() else 0  # a number has no inputs, which no packed weights fit


def _step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


def _check(packed: Tensor, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    fits = packed.dtype == dtype and dtype in DTYPE_CODES and inputs > 0 and outputs >= 0
    if not fits or packed.numel() != packed_elements(inputs, outputs, dtype) or not packed.is_contiguous():
        raise InvalidInput(
            f"packed weights of {packed.numel()} {packed.dtype} are not those of {outputs} outputs and {inputs} inputs in {dtype}",
            code="packed",
        )


def _pack_with_torch(weight: Tensor) -> Tensor:
    step, (outputs, inputs) = _step(weight.dtype), weight.shape
    padded = F.pad(weight.detach(), (0, -inputs % step, 0, -outputs % LANES))
    blocks = padded.reshape(-1, LANES, padded.shape[1] // step, step)
    return blocks.transpose(1, 2).reshape(-1)


def _unpack_with_torch(packed: Tensor, inputs: int, outputs: int) -> Tensor:
    step = _step(packed.dtype)
    blocks = packed.view(-1, -(-inputs // step), LANES, step).transpose(1, 2)
    return blocks.reshape(blocks.shape[0] * LANES, -1)[:outputs, :inputs].contiguous()


def _linear_on_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    native = find_native()
    if native is None:
        return _linear_with_torch(x, packed, bias, outputs)
    inputs = _num_inputs(x)
    _check(packed, x.dtype, inputs, outputs)
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise InvalidInput(f"a bias of {tuple(bias.shape)} {bias.dtype} does not fit {outputs} outputs", code="packed")
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    native.dense(
        rows.data_ptr(), rows.stride(0), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), outputs,
        len(rows), inputs, outputs, DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _linear_with_torch(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    _check(packed, x.dtype, _num_inputs(x), outputs)
    weight = _unpack_with_torch(packed, x.shape[-1], outputs)
    rows = in_blocks(lambda block: F.linear(block, weight, bias), x.reshape(-1, x.shape[-1]))
    return rows.view(*x.shape[:-1], outputs)


def _embedding_on_cpu(ids: Tensor, packed: Tensor, outputs: int, dim: int) -> Tensor:
    native = find_native()
    if native is None:
        return _embedding_with_torch(ids, packed, outputs, dim)
    _check(packed, packed.dtype, dim, outputs)
    _check_ids(ids, outputs)
    flat = ids.reshape(-1).contiguous()
    out = packed.new_empty(*ids.shape, dim)
    native.packed_embedding(
        flat.data_ptr(), packed.data_ptr(), out.data_ptr(), dim, len(flat), dim, outputs, DTYPE_CODES[packed.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _embedding_with_torch(ids: Tensor, packed: Tensor, outputs: int, dim: int) -> Tensor:
    _check(packed, packed.dtype, dim, outputs)
    _check_ids(ids, outputs)
    step = _step(packed.dtype)
    blocks = packed.view(-1, -(-dim // step), LANES, step)
    rows = blocks[ids.div(LANES, rounding_mode="floor"), :, ids % LANES]
    return rows.reshape(*ids.shape, -1)[..., :dim].contiguous()


def _linear_meta(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _embedding_meta(ids: Tensor, packed: Tensor, outputs: int, dim: int) -> Tensor:
    return packed.new_empty(*ids.shape, dim)


_LIBRARY.impl("packed_linear", _linear_on_cpu, "CPU")
_LIBRARY.impl("packed_linear", _linear_with_torch, "CompositeExplicitAutograd")
_LIBRARY.impl("packed_linear", _linear_meta, "Meta")
_LIBRARY.impl("packed_embedding", _embedding_on_cpu, "CPU")
_LIBRARY.impl("packed_embedding", _embedding_with_torch, "CompositeExplicitAutograd")
_LIBRARY.impl("packed_embedding", _embedding_meta, "Meta")
