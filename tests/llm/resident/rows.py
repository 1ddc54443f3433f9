"""Keys and values without a model: every token id has rows of its own, so what lies in memory tells which tokens it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.errors import NotFound
from forkpoint.ids import digest_of
from forkpoint.llm.kernels.transfer import scatter_chunk
from forkpoint.llm.resident.base import DTYPE_NAMES, GroupSpec
from forkpoint.llm.resident.paged import PagedState, PagedStrategy
from forkpoint.llm.resident.pages import PageSize
from forkpoint.llm.resident.reservation import PagedReservation
from forkpoint.llm.resident.transfer import PagedRestoration
from forkpoint.state.chunk import Chunk, encode_chunk, parse_chunk
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import CHUNK_TOKENS
from forkpoint.state.slab import Slab, SlabSpec

GROUPS: Final = (
    GroupSpec(name="a", layers=(0, 2), num_heads=2, key_dim=3, value_dim=2, dtype=torch.bfloat16, window=None),
    GroupSpec(name="b", layers=(1,), num_heads=1, key_dim=2, value_dim=4, dtype=torch.float32, window=8),
)
TOKEN_BYTES: Final = sum(group.token_bytes for group in GROUPS)
CPU: Final = torch.device("cpu")


def make_strategy(page_size: PageSize = 16, *, num_tokens: int = 4096, max_context: int = 2048) -> PagedStrategy:
    """A strategy whose pool holds ``num_tokens``."""
    return PagedStrategy(
        GROUPS, max_context=max_context, device=CPU, page_size=page_size, pool_bytes=num_tokens * TOKEN_BYTES
    )


def slab_bytes(group: int, name: str, tokens: Sequence[int]) -> NDArray[np.uint8]:
    """The bytes of keys (``k``) or values (``v``) of tokens, ``[layers tokens bytes]``."""
    spec = GROUPS[group]
    width = spec.num_heads * (spec.key_dim if name == "k" else spec.value_dim) * spec.dtype.itemsize
    seed = np.arange(width, dtype=np.uint64) * 977 + ord(name) + group
    layers = np.array(spec.layers, dtype=np.uint64)[:, None, None] * np.uint64(131)
    mixed = (np.array(tokens, dtype=np.uint64)[None, :, None] * 7919 + layers + seed) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.uint8) | 1  # never zero, as cleared memory is


def state_bytes(tokens: Sequence[int]) -> list[bytes]:
    """What a state of these tokens must hold."""
    return [slab_bytes(group, name, tokens).tobytes() for group in range(len(GROUPS)) for name in "kv"]


def read_state(state: PagedState) -> list[bytes]:
    """What a state holds."""
    found = []
    for group in range(len(GROUPS)):
        for pieces in state.slab_pieces(group, 0, state.length):
            found.append(b"".join(bytes(piece) for piece in pieces))
    return found


def write_rows(strategy: PagedStrategy, reservation: PagedReservation, tokens: Sequence[int]) -> None:
    """Write rows as a forward pass would, group by group."""
    assert len(tokens) == reservation.stop - reservation.start
    for group, table in enumerate(reservation.tables):
        keys, values = (slab_bytes(group, name, tokens).tobytes() for name in "kv")
        geometry = strategy.ledger.pool.arenas[group].geometry
        scatter_chunk(strategy.pages[group], table, reservation.start, len(tokens), keys, values, geometry)


def append(state: PagedState, tokens: Sequence[int]) -> PagedState:
    """Append rows of tokens and keep them."""
    reservation = state.reserve(len(tokens))
    write_rows(state.strategy, reservation, tokens)
    return reservation.commit()


def start(strategy: PagedStrategy, tokens: Sequence[int]) -> PagedState:
    """A state of tokens."""
    return append(strategy.empty(), tokens)


def encoded_chunk(group: int, start: int, tokens: Sequence[int]) -> bytes:
    """A chunk of a group as it would be stored."""
    spec = GROUPS[group]
    slabs = []
    for name, dim in (("k", spec.key_dim), ("v", spec.value_dim)):
        shape = (len(spec.layers), len(tokens), spec.num_heads, dim)
        slab = SlabSpec(name=name, dtype=DTYPE_NAMES[spec.dtype], shape=shape, axes=("layer", "token", "head", "dim"))
        slabs.append(Slab(spec=slab, pieces=[slab_bytes(group, name, tokens).tobytes()]))
    return b"".join(bytes(part) for part in encode_chunk(slabs, [("token", start, start + len(tokens))]))


class ChunkShelf:
    """Stored chunks by id: what a repository is to resident memory."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.num_fetched = 0

    def put(self, group: int, start: int, tokens: Sequence[int]) -> ChunkRef:
        """Store one chunk."""
        data = encoded_chunk(group, start, tokens)
        chunk_id = digest_of([data])
        self.chunks[chunk_id] = data
        return ChunkRef(chunk_id=chunk_id, num_bytes=len(data), domain=(("token", start, start + len(tokens)),))

    def fetch(self, ref: ChunkRef) -> Chunk:
        """Read one chunk back."""
        self.num_fetched += 1
        if ref.chunk_id not in self.chunks:
            raise NotFound(f"no chunk {ref.chunk_id}", code="chunk")
        return parse_chunk(self.chunks[ref.chunk_id])

    def commit(self, state: PagedState, tokens: Sequence[int]) -> None:
        """Store every full chunk of a state, and tell the state where they are."""
        for index in range(state.length // CHUNK_TOKENS):
            inside = tokens[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]
            for group in range(len(GROUPS)):
                ref = self.put(group, index * CHUNK_TOKENS, inside)
                state.remember_chunk(group, index, ref, self.fetch)

    def restore(self, strategy: PagedStrategy, tokens: Sequence[int]) -> PagedRestoration[PagedState]:
        """A restoration with every chunk written, not yet finished."""
        restoration = strategy.restore(len(tokens), self.fetch)
        for first in range(0, len(tokens), CHUNK_TOKENS):
            inside = tokens[first : first + CHUNK_TOKENS]
            for group in range(len(GROUPS)):
                ref = self.put(group, first, inside)
                restoration.write_chunk(group, first, self.fetch(ref), ref)
        return restoration
