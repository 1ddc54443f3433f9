"""How two manifests differ: where their token histories part, what each says after that, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.ids import ChunkId, ManifestId
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest, read_tokens
from forkpoint.repo.resolution import resolve
from forkpoint.repo.text import find_decoder
from forkpoint.state.canonical import Record, Value
from forkpoint.state.fingerprint import Difference, differences
from forkpoint.state.manifest import Manifest

CONTEXT_CHARS: Final = 80
_SAMPLING: Final = "sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplit:
    """The two texts around the place where they part: the end of what they share, then what each goes on with."""

    context: str
    left: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two manifests compared.

    Attributes:
        common_ancestor: the newest manifest that both descend from (or one of them), as far as the catalog knows.
        num_common_tokens: length of the token history that they share; ``left_tokens`` and ``right_tokens`` follow it.
        text: None when the two are not read by the same stored tokenizer.
        chunks_shared, bytes_shared: chunks that both refer to; the others are counted by side.
        fingerprint, sampling: fields that differ; ``have`` is the left value, ``want`` the right one.
    """

    left: ManifestId
    right: ManifestId
    common_ancestor: ManifestId | None
    num_common_tokens: int
    left_tokens: tuple[int, ...]
    right_tokens: tuple[int, ...]
    text: TextSplit | None
    chunks_shared: int
    bytes_shared: int
    left_chunks: int
    left_bytes: int
    right_chunks: int
    right_bytes: int
    fingerprint: tuple[Difference, ...]
    sampling: tuple[Difference, ...]


def diff(backing: Backing, left: str, right: str) -> Diff:
    """See :meth:`forkpoint.repo.repository.Repository.diff`."""
    ids = resolve(backing.catalog, left, None), resolve(backing.catalog, right, None)
    one, other = (read_manifest(backing.store, each) for each in ids)
    histories = _tokens(backing, one), _tokens(backing, other)
    num_common = _num_common(*histories)
    sizes = _sizes(one), _sizes(other)
    shared = sizes[0].keys() & sizes[1].keys()
    bytes_shared = sum(sizes[0][each] for each in shared)
    return Diff(
        left=ids[0],
        right=ids[1],
        common_ancestor=_common_ancestor(backing, *ids),
        num_common_tokens=num_common,
        left_tokens=tuple(histories[0][num_common:]),
        right_tokens=tuple(histories[1][num_common:]),
        text=_text(backing, (one, other), histories),
        chunks_shared=len(shared),
        bytes_shared=bytes_shared,
        left_chunks=len(sizes[0]) - len(shared),
        left_bytes=sum(sizes[0].values()) - bytes_shared,
        right_chunks=len(sizes[1]) - len(shared),
        right_bytes=sum(sizes[1].values()) - bytes_shared,
        fingerprint=tuple(differences(_identities(one), _identities(other))),
        sampling=tuple(differences(_sampling(one), _sampling(other))),
    )


def split_text(left: str, right: str, context_chars: int = CONTEXT_CHARS) -> TextSplit:
    """Cut two texts where they part. Whole texts are compared, so the cut never falls inside a character."""
    at = _num_common(left, right)
    return TextSplit(context=left[max(0, at - context_chars) : at], left=left[at:], right=right[at:])


def _num_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _tokens(backing: Backing, manifest: Manifest) -> Sequence[int]:
    return read_tokens(backing.store, manifest) if manifest.kind == "llm" else ()


def _text(
    backing: Backing, manifests: tuple[Manifest, Manifest], histories: tuple[Sequence[int], Sequence[int]]
) -> TextSplit | None:
    names = {manifest.fingerprint.state.get("tokenizer") for manifest in manifests}
    decode = find_decoder(backing.store, manifests[0]) if len(names) == 1 else None
    return None if decode is None else split_text(decode(histories[0]), decode(histories[1]))


def _common_ancestor(backing: Backing, left: ManifestId, right: ManifestId) -> ManifestId | None:
    behind_left = {row.manifest_id for row in backing.catalog.ancestors(left)}
    behind_right = backing.catalog.ancestors(right)
    return next((row.manifest_id for row in behind_right if row.manifest_id in behind_left), None)


def _sizes(manifest: Manifest) -> dict[ChunkId, int]:
    return {chunk.chunk_id: chunk.num_bytes for chunk in manifest.chunks()}


def _identities(manifest: Manifest) -> Record:
    return {"execution": manifest.fingerprint.execution, "state": manifest.fingerprint.state}


def _sampling(manifest: Manifest) -> Record:
    sampling: Value = manifest.boundary.get(_SAMPLING)
    return sampling if isinstance(sampling, dict) else {}
