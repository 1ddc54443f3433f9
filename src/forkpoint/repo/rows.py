"""What the catalog is told about a manifest: pure functions from the manifest to rows. Used by publication, revival and rebuild."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

from forkpoint.catalog.records import ChunkRow, ManifestRow, ParentEdge, PrefixRow
from forkpoint.ids import ChunkId, ManifestId
from forkpoint.repo.contents import TOKEN_GROUPS, pending_of, position_of, token_range, tokenizer_of
from forkpoint.state.manifest import ChunkRef, Group, Manifest
from forkpoint.state.prefix import CHUNK_TOKENS, prefix_keys

CONTINUES = "continues"


def chunk_ids(manifest: Manifest) -> frozenset[ChunkId]:
    """Every chunk that a manifest refers to."""
    return frozenset(chunk.chunk_id for chunk in manifest.chunks())


def manifest_row(
    manifest_id: ManifestId, manifest: Manifest, *, inherited: Collection[ChunkId], is_trusted: bool, message: str
) -> ManifestRow:
    """The catalog's row of a manifest.

    Args:
        inherited: the chunks of its parents, as far as the catalog holds them; the manifest introduces the others.
        message: what is shown when the payload holds no message of its own.
    """
    own = manifest.payload.get("message")
    introduced = {chunk.chunk_id: chunk.num_bytes for chunk in manifest.chunks() if chunk.chunk_id not in inherited}
    return ManifestRow(
        manifest_id=manifest_id,
        kind=manifest.kind,
        state_id=manifest.fingerprint.state_id,
        execution_id=manifest.fingerprint.execution_id,
        position=position_of(manifest),
        pending=pending_of(manifest),
        num_bytes=manifest.num_bytes,
        message=own if isinstance(own, str) and own else message,
        is_trusted=is_trusted,
        tokenizer_id=tokenizer_of(manifest),
        parents=tuple(ParentEdge(role=parent.role, manifest_id=parent.manifest_id) for parent in manifest.parents),
        introduced=tuple(ChunkRow(chunk_id=chunk_id, num_bytes=size) for chunk_id, size in introduced.items()),
    )


def prefix_rows(manifest: Manifest, tokens: Sequence[int], namespace: str) -> Iterator[PrefixRow]:
    """One row a group for every full chunk of tokens that all token-indexed groups hold, from the first to the last such.

    A boundary that says how many of its tokens were prefilled in whole pieces has no rows beyond those: other chunks may have other
    bits than a cold start of the same tokens.

    Args:
        tokens: the processed token ids; the pending token, which no chunk covers, makes no difference.
    """
    groups = [group for group in manifest.groups if group.kind in TOKEN_GROUPS]
    if not groups:
        return
    prefilled = manifest.boundary.get("prefilled")
    indexed = tokens if not isinstance(prefilled, int) else tokens[:prefilled]
    keys = prefix_keys(manifest.fingerprint.state_id, namespace, indexed)
    execution_id = manifest.fingerprint.execution_id
    full = zip(*(_full_chunks(group) for group in groups), strict=False)
    for index, (key, chunks) in enumerate(zip(keys, full, strict=False)):
        for group, chunk in zip(groups, chunks, strict=True):
            yield PrefixRow(key=key, execution_id=execution_id, group=group.name, index=index, chunk_id=chunk.chunk_id)


def _full_chunks(group: Group) -> Iterator[ChunkRef]:
    """The chunks of the group from the first on, while each covers the next 256 tokens."""
    aligned = takewhile(lambda item: token_range(item[1]) == _full_range(item[0]), enumerate(group.chunks))
    return (chunk for _, chunk in aligned)


def _full_range(index: int) -> tuple[int, int]:
    return index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS
