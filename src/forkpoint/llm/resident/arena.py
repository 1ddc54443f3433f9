"""The memory in which a group's pages lie: one tensor, aligned, backed by the machine only where it was written.

Knows sizes and bytes, not who holds a page. On the CPU it asks for huge pages where the system has them. A page is cleared by writing
zeros or, where it is large, by handing its memory back to the system, which gives zeros when it is touched again.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import CapacityExceeded
from forkpoint.llm.kernels.geometry import TILE_TOKENS, PageGeometry

_HUGE_BYTES: Final = 2 << 20
_RETURNED_BYTES: Final = 4 * _HUGE_BYTES
_WORDS: Final = {2: torch.int16, 4: torch.int32}


@final
class Arena:
    """Pages of one group.

    Attributes:
        geometry: how a page is laid out.
        tensor: ``[pages, layers, page_tokens * heads * (key_dim + value_dim)]``, zero where nothing was written.

    Raises:
        CapacityExceeded: ``capacity.memory`` when the system does not give that much address space.
    """

    def __init__(self, geometry: PageGeometry, num_pages: int, device: torch.device) -> None:
        self.geometry = geometry
        shape = (num_pages, geometry.num_layers, geometry.layer_elements)
        self._mapping: mmap.mmap | None = None
        self._offset = 0
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            if device.type == "cpu":
                self.tensor = self._map(num_pages * geometry.page_bytes).view(geometry.dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=geometry.dtype, device=device)
        except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
            raise _no_memory(num_pages * geometry.page_bytes, error) from error
        words = self.tensor.view(_WORDS[geometry.dtype.itemsize])
        self._parts = (geometry.keys(words).flatten(3), geometry.values(words).flatten(3))

    def clear(self, page: int) -> None:
        """Make every byte of a page zero."""
        start, size = page * self.geometry.page_bytes, self.geometry.page_bytes
        if self._mapping is None or size < _RETURNED_BYTES:
            self.tensor[page].zero_()
            return
        first = -(-(self._offset + start) // _HUGE_BYTES) * _HUGE_BYTES
        last = (self._offset + start + size) // _HUGE_BYTES * _HUGE_BYTES
        self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        whole = self.tensor.view(torch.uint8).view(-1)
        whole[start : first - self._offset].zero_()
        whole[last - self._offset : start + size].zero_()

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of page ``source`` to page ``target``; later tokens of the same tile become zero there.

        Another thread may be appending behind those tokens meanwhile: what it writes is not copied.
        """
        tiles, rest = divmod(count, TILE_TOKENS)
        for part, mask in zip(self._parts, self._tile_masks(rest), strict=True):
            part[target, :, :tiles].copy_(part[source, :, :tiles])
            if rest:
                torch.bitwise_and(part[source, :, tiles], mask, out=part[target, :, tiles])

    def _tile_masks(self, rest: int) -> tuple[Tensor, Tensor]:
        """A tile of keys and one of values with all bits set for the first ``rest`` tokens: masking costs no more than copying."""
        if rest not in self._masks:
            geometry, device = self.geometry, self.tensor.device
            keys = torch.zeros(geometry.heads, geometry.key_dim, TILE_TOKENS, dtype=self._parts[0].dtype, device=device)
            values = torch.zeros(geometry.heads, TILE_TOKENS, geometry.value_dim, dtype=keys.dtype, device=device)
            keys[:, :, :rest] = -1
            values[:, :rest] = -1
            self._masks[rest] = keys.flatten(), values.flatten()
        return self._masks[rest]

    def _map(self, num_bytes: int) -> Tensor:
        """Private anonymous memory that begins at a huge page. The tensor keeps it alive."""
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapping = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _ask_for_huge_pages(mapping)
        raw: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._offset = -raw.ctypes.data % _HUGE_BYTES
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping = mapping
        return torch.from_numpy(raw[self._offset : self._offset + num_bytes])


def _ask_for_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: small pages serve as well, a little slower
        return


def available_bytes(device: torch.device) -> int:
    """Memory that can still be used without pushing anything out, in bytes; a control group's limit counts where there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_meminfo("/proc/meminfo"), _group_rest("/sys/fs/cgroup")]
    known = [value for value in found if value is not None]
    return min(known) if known else 4 << 30


def _meminfo(path: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _group_rest(folder: str) -> int | None:
    try:
        limit, used = (Path(folder, name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else None


def _no_memory(want: int, error: Exception) -> CapacityExceeded:
    return CapacityExceeded(
        f"the system gives no {want} bytes for pages ({error}); ask for a smaller pool_bytes", code="memory", want=want
    )
