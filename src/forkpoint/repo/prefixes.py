"""Prefix lookup: how much of a request's tokens is stored already, and in which chunks. Token ids are compared on every hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.catalog.records import PrefixRow
from forkpoint.errors import Corrupt
from forkpoint.ids import ChunkId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import TOKEN_AXIS, TOKEN_SLAB, read_chunk
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import ChunkRef, Group
from forkpoint.state.prefix import CHUNK_TOKENS, prefix_keys, token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest stored prefix: how many tokens, a multiple of 256, and the chunks of each group asked for, in order."""

    num_tokens: int
    groups: tuple[Group, ...]


def find_prefix(
    backing: Backing, fingerprint: Fingerprint, tokens: Sequence[int], groups: Sequence[str]
) -> PrefixMatch | None:
    """See :meth:`forkpoint.repo.repository.Repository.find_prefix`."""
    keys = list(prefix_keys(fingerprint.state_id, backing.namespace, tokens))
    if not keys or not groups:
        return None
    match = backing.catalog.longest_prefix(keys, fingerprint.execution_id, groups)
    rows = {(row.group, row.index): row for row in match.rows}
    num_chunks = _num_contiguous(rows, groups, match.num_chunks)
    if not num_chunks:
        return None
    found = [
        _group(backing, [rows[name, index] for index in range(num_chunks)], tokens) for name in sorted(set(groups))
    ]
    return PrefixMatch(num_tokens=num_chunks * CHUNK_TOKENS, groups=tuple(found))


def _num_contiguous(rows: dict[tuple[str, int], PrefixRow], groups: Sequence[str], num_chunks: int) -> int:
    """How many chunks from the first on every group has; a lost chunk leaves a gap in the index."""
    for index in range(num_chunks):
        if any((name, index) not in rows for name in groups):
            return index
    return num_chunks


def _group(backing: Backing, rows: Sequence[PrefixRow], tokens: Sequence[int]) -> Group:
    chunks = tuple(_checked_chunk(backing, row, tokens) for row in rows)
    return Group(name=rows[0].group, kind="tokens", chunks=chunks)


def _checked_chunk(backing: Backing, row: PrefixRow, tokens: Sequence[int]) -> ChunkRef:
    start, stop = row.index * CHUNK_TOKENS, (row.index + 1) * CHUNK_TOKENS
    chunk = read_chunk(backing.store, row.chunk_id)
    carried = chunk.slabs.get(TOKEN_SLAB)
    if carried is None or carried != token_bytes(tokens[start:stop]):
        raise _mismatch(row.chunk_id, "it does not carry the token ids that were asked for")
    if (TOKEN_AXIS, start, stop) not in chunk.domain:
        raise _mismatch(row.chunk_id, f"it does not cover tokens [{start}, {stop})")
    num_bytes = backing.store.size(ObjectKind.CHUNK, row.chunk_id)
    return ChunkRef(chunk_id=row.chunk_id, num_bytes=num_bytes, domain=chunk.domain)


def _mismatch(chunk_id: ChunkId, why: str) -> Corrupt:
    return Corrupt(
        f"the prefix index leads to chunk {short(chunk_id)}, but {why}; nothing was served, run forkpoint fsck",
        code="prefix", chunk_id=chunk_id,
    )  # fmt: skip
