"""The contiguous strategy: one append-only buffer a lineage, with a high-water mark. The readable reference and test oracle.

States of one buffer share it: a state of length n reads tokens ``[0, n)`` and nothing ever rewrites those. Appending to the longest state
writes past the mark in place; appending to a shorter one (a fork that diverges) copies its prefix to a buffer of its own, once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.ids import Bytes
from forkpoint.llm.resident.base import AttentionCall, Fetch, GroupSpec, beyond_context
from forkpoint.state.chunk import Chunk
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import CHUNK_TOKENS

_GROWTH_TOKENS: Final = 256


@final
class _Buffer:
    """Keys and values of every group, ``[layer token head dim]``. ``mark`` is the length of the longest state in it."""

    def __init__(self, groups: Sequence[GroupSpec], capacity: int, device: torch.device) -> None:
        self.groups = groups
        self.capacity = capacity
        self.keys = [_allocate(group, group.key_dim, capacity, device) for group in groups]
        self.values = [_allocate(group, group.value_dim, capacity, device) for group in groups]
        self.mark = 0
        self.is_reserved = False
        self.chunk_refs: dict[tuple[int, int], ChunkRef] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def copy_prefix(self, source: _Buffer, length: int) -> None:
        for mine, theirs in zip((*self.keys, *self.values), (*source.keys, *source.values), strict=True):
            mine[:, :length].copy_(theirs[:, :length])
        full = length // CHUNK_TOKENS
        known = tuple(source.chunk_refs.items())  # at once: a commit in another thread may be adding to them
        self.chunk_refs = {place: ref for place, ref in known if place[1] < full}
        self.mark = length


def _allocate(group: GroupSpec, dim: int, capacity: int, device: torch.device) -> Tensor:
    # Uninitialised on purpose: rows at or past a state's length are written before they are read.
    return torch.empty(len(group.layers), capacity, group.num_heads, dim, dtype=group.dtype, device=device)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContiguousState:
    """Tokens ``[0, length)`` of a buffer; see ``State``."""

    strategy: ContiguousStrategy
    buffer: _Buffer
    length: int
    prefilled: int

    def prefix(self, length: int) -> ContiguousState:
        """The state of the first ``length`` tokens, sharing the buffer."""
        assert 0 <= length <= self.length
        prefilled = min(self.prefilled, length // CHUNK_TOKENS * CHUNK_TOKENS)
        return ContiguousState(strategy=self.strategy, buffer=self.buffer, length=length, prefilled=prefilled)

    def reserve(self, num_rows: int, *, room: int = 0) -> _Append:
        """Begin to append; in place where this is the longest state of its buffer, else on a copy.

        Raises:
            CapacityExceeded: ``capacity.context`` when the context would be passed.
        """
        return self.strategy.reserve(self, num_rows, room)

    def reserve_branches(self, lengths: Sequence[int]) -> tuple[_Append, list[_Append]]:
        """Alternatives after this state; they write the same rows in turn, and none is kept."""
        return self.strategy.reserve_branches(self, lengths)

    def slab_pieces(self, group: int, start: int, stop: int) -> tuple[Sequence[Bytes], Sequence[Bytes]]:
        """Bytes of keys and of values of ``[start, stop)``, one contiguous piece a layer."""
        assert stop <= self.length
        return _pieces(self.buffer.keys[group], start, stop), _pieces(self.buffer.values[group], start, stop)

    def chunk_ref(self, group: int, index: int) -> ChunkRef | None:
        """The stored chunk that holds full chunk ``index``, if it was ever hashed."""
        return self.buffer.chunk_refs.get((group, index))

    @property
    def is_resident(self) -> bool:
        """Always: a buffer is never evicted."""
        return True

    def remember_chunk(self, group: int, index: int, ref: ChunkRef, fetch: Fetch | None = None) -> None:
        """Note the id of full chunk ``index``."""
        assert (index + 1) * CHUNK_TOKENS <= self.length
        self.buffer.chunk_refs[group, index] = ref


def _pieces(tensor: Tensor, start: int, stop: int) -> list[Bytes]:
    layers = tensor[:, start:stop].cpu().view(torch.uint8).numpy()
    return [layer.reshape(-1).data for layer in layers] if stop > start else []


@final
class ContiguousStrategy:
    """States in contiguous buffers on one device, at most ``max_context`` tokens each."""

    kind = "contiguous"

    def __init__(self, groups: Sequence[GroupSpec], *, max_context: int, device: torch.device) -> None:
        self.groups = tuple(groups)
        self.page_size = max_context
        self.max_context = max_context
        self._device = device
        self._lock = threading.Lock()
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self._place = {
            layer: (index, row) for index, group in enumerate(groups) for row, layer in enumerate(group.layers)
        }

    def empty(self) -> ContiguousState:
        """The state of no tokens; it holds no memory to speak of."""
        return ContiguousState(strategy=self, buffer=self._new_buffer(0), length=0, prefilled=0)

    def reserve(self, state: ContiguousState, num_rows: int, room: int) -> _Append:
        """See ``State.reserve``: in place where ``state`` is the longest of its buffer, else on a copy."""
        stop = state.length + num_rows
        if stop > self.page_size:
            raise beyond_context(stop, self.page_size)
        with self._lock:
            buffer = state.buffer
            if buffer.mark == state.length and not buffer.is_reserved and stop <= buffer.capacity:
                buffer.is_reserved = True
                return _Append(self, state, buffer, stop, self._place)
        buffer = self._new_buffer(self._roomy(stop + room))
        buffer.copy_prefix(state.buffer, state.length)
        buffer.is_reserved = True
        return _Append(self, state, buffer, stop, self._place)

    def reserve_branches(self, state: ContiguousState, lengths: Sequence[int]) -> tuple[_Append, list[_Append]]:
        """See ``State.reserve_branches``: alternatives write the same rows in turn, and none is kept."""
        owner = self.reserve(state, max(lengths), 0)
        return owner, [_Append(self, state, owner.buffer, owner.start + length, self._place) for length in lengths]

    def restore(self, length: int, fetch: Fetch | None = None) -> _Restore:
        """Begin to fill a new buffer with room to go on."""
        if length > self.page_size:
            raise beyond_context(length, self.page_size)
        return _Restore(self, self._new_buffer(self._roomy(length)), length)

    def num_resident_bytes(self) -> int:
        """Bytes of live buffers, room to grow included (untouched room costs address space only)."""
        with self._lock:
            return sum(buffer.num_bytes for buffer in list(self._buffers))

    def num_buffers(self) -> int:
        """Live buffers."""
        return len(self._buffers)

    def end(self, buffer: _Buffer, mark: int) -> None:
        """Called by a reservation: its rows up to ``mark`` are now visible and the buffer is free for the next one."""
        with self._lock:
            buffer.mark = mark
            buffer.is_reserved = False

    def _roomy(self, length: int) -> int:
        return min(self.page_size, -(-(length * 5 // 4 + _GROWTH_TOKENS) // _GROWTH_TOKENS) * _GROWTH_TOKENS)

    def _new_buffer(self, capacity: int) -> _Buffer:
        buffer = _Buffer(self.groups, capacity, self._device)
        with self._lock:
            self._buffers.add(buffer)
        return buffer


@final
class _Append:
    """A reservation: rows ``[start, stop)`` of one buffer."""

    def __init__(
        self,
        strategy: ContiguousStrategy,
        base: ContiguousState,
        buffer: _Buffer,
        stop: int,
        place: dict[int, tuple[int, int]],
    ) -> None:
        self.start = base.length
        self.stop = stop
        self._strategy = strategy
        self._base = base
        self.buffer = buffer
        self._place = place
        self._masks: dict[int | None, Tensor] = {}

    def append_and_attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write ``[rows heads dim]`` keys and values of one layer, attend over everything up to each row's own position."""
        group, row = self._place[call.layer]
        keys, values = self.buffer.keys[group][row], self.buffer.values[group][row]
        keys[self.start : self.stop] = key
        values[self.start : self.stop] = value
        mask = self._mask(call.window, query.device)
        return attend(query, keys[: self.stop], values[: self.stop], mask, call)

    def commit(self, *, is_invariant: bool = False) -> ContiguousState:
        """Make the rows visible."""
        self._strategy.end(self.buffer, self.stop)
        is_whole_piece = self.stop - self.start == CHUNK_TOKENS and self._base.prefilled == self.start
        prefilled = self.stop if is_whole_piece else self._base.prefilled
        return ContiguousState(strategy=self._strategy, buffer=self.buffer, length=self.stop, prefilled=prefilled)

    def abort(self) -> None:
        """Leave the buffer as it was; what was written past the mark is never read."""
        self._strategy.end(self.buffer, self.start)

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        if window not in self._masks:
            rows = torch.arange(self.start, self.stop, device=device)[:, None]
            columns = torch.arange(self.stop, device=device)[None]
            visible = columns <= rows
            self._masks[window] = visible if window is None else visible & (columns > rows - window)
        return self._masks[window]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, call: AttentionCall) -> Tensor:
    """Masked attention of one lane.

    Args:
        query: ``[rows query_heads key_dim]``.
        keys, values: ``[tokens heads dim]``; query heads are grouped over them in order.
        mask: ``[rows tokens]``, true where a row sees a token.

    Returns:
        ``[rows query_heads value_dim]`` in the query's dtype.
    """
    rows, query_heads, dim = query.shape
    heads = keys.shape[1]
    group = query_heads // heads
    # Query heads that share a key head become further rows, so that keys and values are never repeated in memory.
    folded = query.view(rows, heads, group, dim).permute(1, 2, 0, 3).reshape(1, heads, group * rows, dim)
    folded_keys, folded_values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    folded_mask = mask.repeat(group, 1)
    if call.softcap is None and call.sinks is None:
        out = F.scaled_dot_product_attention(
            folded, folded_keys, folded_values, attn_mask=folded_mask, scale=call.scaling
        )
    else:
        out = _attend_with_extras(folded, folded_keys, folded_values, folded_mask, call, group)
    return out.view(heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, query_heads, -1)


def _attend_with_extras(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, call: AttentionCall, group: int
) -> Tensor:
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if call.sinks is not None:
        rows = query.shape[2] // group
        sinks = (
            call.sinks.float().view(1, -1, group, 1).expand(-1, -1, -1, rows).reshape(1, keys.shape[1], group * rows, 1)
        )
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, values.float()).to(query.dtype)


@final
class _Restore:
    """A buffer being filled. Chunks touch disjoint rows, so threads need no lock."""

    def __init__(self, strategy: ContiguousStrategy, buffer: _Buffer, length: int) -> None:
        self._strategy = strategy
        self._buffer = buffer
        self._length = length

    def write_chunk(self, group: int, start: int, chunk: Chunk, ref: ChunkRef) -> None:
        """Copy one parsed chunk's ``k`` and ``v`` slabs into place."""
        for name, tensor in (("k", self._buffer.keys[group]), ("v", self._buffer.values[group])):
            _copy_rows(tensor, start, chunk.specs[name].shape, chunk.slabs[name])
        stop = start + chunk.specs["k"].shape[1]
        if stop - start == CHUNK_TOKENS and start % CHUNK_TOKENS == 0:
            self._buffer.chunk_refs[group, start // CHUNK_TOKENS] = ref

    def finish(self, *, prefilled: int) -> ContiguousState:
        """The restored state."""
        self._buffer.mark = self._length
        return ContiguousState(strategy=self._strategy, buffer=self._buffer, length=self._length, prefilled=prefilled)

    def abort(self) -> None:
        """Nothing to give back: the buffer goes with this."""


def _copy_rows(tensor: Tensor, start: int, shape: tuple[int, ...], data: memoryview) -> None:
    """Copy ``[layer token head dim]`` bytes to rows ``start`` on. numpy copies without the interpreter lock."""
    rows = tensor[:, start : start + shape[1]]
    source = np.frombuffer(data, dtype=np.uint8).reshape(*shape[:-1], -1)
    if rows.device.type == "cpu":
        np.copyto(rows.view(torch.uint8).numpy(), source)
    else:
        rows.view(torch.uint8).copy_(torch.from_numpy(source.copy()))
