"""Copies between the canonical bytes of a chunk (``k`` and ``v`` slabs, ``[layer, token, head, dim]`` row-major) and pages.

Bytes are moved, never computed with: what was gathered and is scattered again is equal bit for bit. Calls that touch
different tokens may run in different threads. Which pages may be written is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.ids import Bytes
from forkpoint.llm.kernels.geometry import TILE_TOKENS, PageGeometry
from forkpoint.llm.kernels.native import find_native

Table = Sequence[int] | NDArray[np.int32]
"""Page numbers of one continuation, in order of position."""


def scatter_chunk(
    pages: Tensor, table: Table, start: int, count: int, keys: Bytes, values: Bytes, geometry: PageGeometry
) -> None:
    """Write the bytes of tokens ``[start, start + count)`` into their pages.

    Args:
        pages: the group's arena ``[pages, layers, elements]``.
        table: page numbers; ``table[i]`` holds tokens ``[i * page_tokens, (i + 1) * page_tokens)``.
        keys, values: canonical bytes ``[layer, token, head, dim]``.

    Raises:
        InvalidInput: ``invalid_input.chunk`` where lengths do not fit; nothing was written.
    """
    numbers = _checked(pages, table, start, count, geometry)
    for data, dim in ((keys, geometry.key_dim), (values, geometry.value_dim)):
        want = _slab_bytes(geometry, count, dim)
        if (have := memoryview(data).nbytes) != want:
            raise InvalidInput(f"a slab of {have} bytes where {want} are due", code="chunk", have=have, want=want)
    native = _native_for(pages)
    if native is not None:
        slabs = (np.frombuffer(keys, dtype=np.uint8).ctypes.data, np.frombuffer(values, dtype=np.uint8).ctypes.data)
        native.pages_from_chunk(geometry.native_shape, numbers.ctypes.data, start, count, *slabs, pages.data_ptr())
        return
    page, tile, lane = _places(numbers, start, count, geometry, pages.device)
    geometry.keys(pages)[page, :, tile, :, :, lane] = _rows(keys, count, geometry.key_dim, geometry, pages.device)
    geometry.values(pages)[page, :, tile, :, lane] = _rows(values, count, geometry.value_dim, geometry, pages.device)


def gather_chunk(
    pages: Tensor, table: Table, start: int, count: int, geometry: PageGeometry
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The canonical bytes of tokens ``[start, start + count)``: keys and values, each a new flat array.

    Raises:
        InvalidInput: ``invalid_input.chunk`` where the table does not cover the tokens.
    """
    numbers = _checked(pages, table, start, count, geometry)
    native = _native_for(pages)
    if native is not None:
        slabs = [
            np.empty(_slab_bytes(geometry, count, dim), np.uint8) for dim in (geometry.key_dim, geometry.value_dim)
        ]
        addresses = [slab.ctypes.data for slab in slabs]
        native.chunk_from_pages(geometry.native_shape, numbers.ctypes.data, start, count, pages.data_ptr(), *addresses)
        return slabs[0], slabs[1]
    page, tile, lane = _places(numbers, start, count, geometry, pages.device)
    keys = geometry.keys(pages)[page, :, tile, :, :, lane]
    values = geometry.values(pages)[page, :, tile, :, lane]
    return _canonical(keys), _canonical(values)


def _native_for(pages: Tensor) -> ModuleType | None:
    return find_native() if pages.device.type == "cpu" and pages.is_contiguous() else None


def _checked(pages: Tensor, table: Table, start: int, count: int, geometry: PageGeometry) -> NDArray[np.int32]:
    shape = (geometry.num_layers, geometry.layer_elements)
    if tuple(pages.shape[1:]) != shape or pages.dtype != geometry.dtype:
        message = (
            f"pages {tuple(pages.shape)} of {pages.dtype} have not the shape {shape} of {geometry.dtype} that was said"
        )
        raise InvalidInput(message, code="chunk")
    numbers = np.ascontiguousarray(table, dtype=np.int32)
    used = numbers[start // geometry.page_tokens : -(-(start + count) // geometry.page_tokens)]
    is_covered = start >= 0 and count >= 0 and len(numbers) * geometry.page_tokens >= start + count
    is_known = used.size == 0 or (used.min() >= 0 and used.max() < len(pages))
    if not is_covered or not is_known:
        message = f"the page table does not lead to tokens {start} to {start + count} of {len(pages)} pages"
        raise InvalidInput(message, code="chunk", start=start, count=count)
    return numbers


def _slab_bytes(geometry: PageGeometry, count: int, dim: int) -> int:
    return geometry.num_layers * count * geometry.heads * dim * geometry.dtype.itemsize


def _places(
    numbers: NDArray[np.int32], start: int, count: int, geometry: PageGeometry, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    positions = np.arange(start, start + count)
    inside = positions % geometry.page_tokens
    places = (numbers[positions // geometry.page_tokens], inside // TILE_TOKENS, inside % TILE_TOKENS)
    page, tile, lane = (torch.from_numpy(place.astype(np.int64)).to(device) for place in places)
    return page, tile, lane


def _rows(data: Bytes, count: int, dim: int, geometry: PageGeometry, device: torch.device) -> Tensor:
    """Canonical bytes as ``[token, layer, head, dim]``."""
    flat = (
        torch.frombuffer(bytearray(data), dtype=geometry.dtype) if len(data) else torch.empty(0, dtype=geometry.dtype)
    )
    flat = flat.to(device)
    return flat.view(geometry.num_layers, count, geometry.heads, dim).transpose(0, 1)


def _canonical(rows: Tensor) -> NDArray[np.uint8]:
    """``[token, layer, head, dim]`` as canonical bytes."""
    flat: NDArray[np.uint8] = rows.transpose(0, 1).contiguous().cpu().view(torch.uint8).numpy().reshape(-1)
    return flat
