"""Reading a repository: names, manifests, tokens, history. The half of the porcelain that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.records import ManifestRow
from forkpoint.ids import Bytes, ChunkId, ManifestId
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_chunk, read_manifest, read_tokens
from forkpoint.repo.history import LogEntry, Shown, Status, log, log_all, reflog, show, status
from forkpoint.repo.names import HEADS, TAGS
from forkpoint.repo.prefixes import PrefixMatch, find_prefix
from forkpoint.repo.reflog import ReflogEntry
from forkpoint.repo.refs import Head, Ref, list_refs, read_head
from forkpoint.repo.resolution import resolve
from forkpoint.repo.text import Decoder, find_decoder
from forkpoint.state.chunk import Chunk
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import Manifest
from forkpoint.store.base import Store

if TYPE_CHECKING:
    from forkpoint.repo.diff import Diff
    from forkpoint.repo.verification import VerificationReceipt


class RepositoryReads:
    """What can be asked of a repository. Wherever ``as_of`` is a parameter, it is the number of an earlier transaction."""

    _backing: Backing

    @property
    def store(self) -> Store:
        """The store, to read from. What is put into it past this class may be collected at any time."""
        return self._backing.store

    @property
    def catalog(self) -> Catalog:
        """The catalog, to read from."""
        return self._backing.catalog

    @property
    def namespace(self) -> str:
        """What its prefix index keeps apart from others."""
        return self._backing.namespace

    @property
    def who(self) -> str:
        """The name that moves are recorded under."""
        return self._backing.who

    def resolve(self, name: str, as_of: int | None = None) -> ManifestId:
        """What a name means: ``main``, a tag, HEAD or ``@``, ``name~N``, ``name^N``, ``name@{N}``, an id or its beginning.

        Args:
            name: a ref wins over the beginning of an id.
            as_of: a transaction number: what it meant then.

        Raises:
            NotFound: ``not_found.name``, with names that are close.
            InvalidInput: ``invalid_input.ambiguous`` for the beginning of several ids, ``invalid_input.revision``.
        """
        return resolve(self._backing.catalog, name, as_of)

    def row(self, manifest_id: ManifestId) -> ManifestRow:
        """What the catalog knows of a manifest. Raises NotFound ``not_found.manifest``."""
        return self._backing.catalog.get_manifest(manifest_id)

    def manifest(self, manifest_id: ManifestId) -> Manifest:
        """The manifest of an id, from its verified bytes. Raises NotFound ``not_found.object``, Corrupt or Incompatible."""
        return read_manifest(self._backing.store, manifest_id)

    def chunk(self, chunk_id: ChunkId) -> Chunk:
        """A chunk, verified; its slabs are views into the store. Raises NotFound ``not_found.object``, Corrupt or Incompatible."""
        return read_chunk(self._backing.store, chunk_id)

    def tokens(self, manifest_id: ManifestId) -> list[int]:
        """The token history, read back from the chunks: processed ids, then the pending one. Raises Corrupt ``corrupt.tokens``."""
        return read_tokens(self._backing.store, self.manifest(manifest_id))

    def tokenizer(self, manifest_id: ManifestId) -> Decoder | None:
        """What turns a manifest's tokens into text; None when no tokenizer is stored with it. Raises Corrupt."""
        return find_decoder(self._backing.store, self.manifest(manifest_id))

    def text(self, manifest_id: ManifestId) -> str | None:
        """The whole token history as text, special tokens included; None when no tokenizer is stored with it."""
        decode = self.tokenizer(manifest_id)
        return None if decode is None else decode(self.tokens(manifest_id))

    def find_prefix(self, fingerprint: Fingerprint, tokens: Sequence[int], groups: Sequence[str]) -> PrefixMatch | None:
        """The longest stored prefix of ``tokens`` for which every group has its chunks.

        Args:
            fingerprint: of the engine that asks; state and execution identity must both be those of the stored chunks.
            groups: names of the token-indexed groups that are all needed.

        Raises:
            Corrupt: ``corrupt.prefix`` when a chunk found does not carry the token ids asked for: it is never served.
            NotFound: ``not_found.object`` when a collection, from which no lease keeps what is found, took it just now.
        """
        return find_prefix(self._backing, fingerprint, tokens, groups)

    # History

    def head(self, as_of: int | None = None) -> Head:
        """Where HEAD is: at a branch, which may have no manifest yet, or detached at a manifest."""
        return read_head(self._backing.catalog, as_of)

    def branches(self, as_of: int | None = None) -> list[Ref]:
        """Every branch, by name."""
        return list_refs(self._backing.catalog, HEADS, as_of)

    def tags(self, as_of: int | None = None) -> list[Ref]:
        """Every tag, by name."""
        return list_refs(self._backing.catalog, TAGS, as_of)

    def log(self, name: str = "HEAD", *, limit: int | None = None, as_of: int | None = None) -> list[LogEntry]:
        """What ``name`` means and what that descends from, newest first. Raises as :meth:`resolve`."""
        return log(self._backing, name, limit, as_of)

    def log_all(self, *, limit: int | None = None, as_of: int | None = None) -> list[LogEntry]:
        """What any branch, any tag or HEAD leads to, newest first."""
        return log_all(self._backing, limit, as_of)

    def reflog(self, name: str = "HEAD", *, limit: int | None = None) -> list[ReflogEntry]:
        """The moves of a ref, newest first, also of a deleted one; the n-th is ``name@{n}``. Raises NotFound ``not_found.name``."""
        return reflog(self._backing, name, limit)

    def show(self, name: str = "HEAD", *, as_of: int | None = None) -> Shown:
        """One manifest in full. Raises as :meth:`resolve`, :meth:`manifest` and :meth:`tokens`."""
        return show(self._backing, name, as_of)

    def diff(self, left: str, right: str) -> Diff:
        """How two manifests differ: tokens, text, chunks, fingerprint, sampling. Raises as :meth:`show`."""
        from forkpoint.repo.diff import diff

        return diff(self._backing, left, right)

    def status(self) -> Status:
        """Where HEAD is and how much there is."""
        return status(self._backing)

    def verify(self, name: str = "HEAD") -> VerificationReceipt:
        """Recompute, now, the digests of a manifest and all its chunks, and check their claims against each other.

        Raises:
            NotFound: ``not_found.name``, or ``not_found.object`` when a part is missing.
            Corrupt: naming the part that is wrong.
        """
        from forkpoint.repo.verification import verify_manifest

        return verify_manifest(self._backing.store, self.resolve(name))

    def export_bundle(self, name: str = "HEAD") -> Iterator[Bytes]:
        """A manifest with its chunks and tokenizer, without ancestors, as parts to be written end to end. Raises as :meth:`show`."""
        from forkpoint.repo.exchange import export_bundle

        return export_bundle(self._backing, name)
