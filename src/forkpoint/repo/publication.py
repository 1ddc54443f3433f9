"""Making a draft durable and then visible: chunks, manifest, one catalog transaction. Nothing is advertised before its bytes.

The steps, and what a crash after each leaves behind:

    1. chunks and assets whose bytes the repository lacks are put, in one batch     unreferenced objects
    2. the draft's own check has passed                                             the same
    3. the manifest is put                                                          the same
    4. the catalog's lock is taken; what collection doomed meanwhile is put again   the same
    5. the move is put                                                              the same, and a move that never was
    6. the transaction commits                                                      the new manifest and ref, complete

Trust is hereditary: a manifest is trusted when its draft is and every parent it continues, as far as the catalog knows them,
is trusted and was computed under the same fingerprint. Only then do its prefixes enter the index.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.catalog.records import ObjectRef, PrefixRow
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import InvalidInput
from forkpoint.ids import ManifestId, MoveId, ObjectKind
from forkpoint.repo.backing import Backing
from forkpoint.repo.lineage import KnownParents
from forkpoint.repo.moves import cut_message, decide_move, move_ref
from forkpoint.repo.names import Expectation, branch_ref, check_expectation
from forkpoint.repo.rows import manifest_row, prefix_rows
from forkpoint.repo.staging import Staged, stage
from forkpoint.state.draft import Draft
from forkpoint.state.manifest import Manifest
from forkpoint.store.base import NewObject

MAX_STAGED_S: Final = 12 * 3600
"""Half the life of a tombstone: a publication that took longer (a machine asleep) no longer relies on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a publication did.

    Attributes:
        manifest: what was published, so that nobody need read it back: a collection may take what no ref leads to at once.
        move_id: None when no ref was named or the ref was there already.
    """

    manifest_id: ManifestId
    manifest: Manifest
    was_new: bool
    chunks_written: int
    bytes_written: int
    chunks_shared: int
    bytes_shared: int
    move_id: MoveId | None
    elapsed_ms: float


def publish(backing: Backing, draft: Draft, *, branch: str | None, expect: Expectation, message: str) -> Publication:
    """See :meth:`forkpoint.repo.repository.Repository.publish`."""
    started = time.perf_counter()
    ref = None if branch is None else branch_ref(branch)
    check_expectation(expect)
    message = cut_message(message)
    _check_draft(draft)
    staged = stage(backing, draft)
    was_new, move_id = publish_staged(backing, staged, ref=ref, expect=expect, message=message)
    return publication_of(staged, was_new=was_new, move_id=move_id, elapsed_ms=(time.perf_counter() - started) * 1e3)


def publish_staged(
    backing: Backing, staged: Staged, *, ref: str | None, expect: Expectation, message: str
) -> tuple[bool, MoveId | None]:
    """Steps 4 to 6. Returns whether the manifest was new, and the move that was made."""
    parents = KnownParents.read(backing, staged.manifest)
    prefixes = list(prefix_rows(staged.manifest, staged.tokens, backing.namespace)) if staged.is_trusted else []
    with backing.catalog.transaction(reason="publish" if ref is None else f"publish {ref}") as tx:
        _protect(backing, tx, staged)
        was_new = _advertise(tx, staged, parents, prefixes, message=message)
        move_id = None if ref is None else _move(backing, tx, ref, staged, parents, expect, message)
    return was_new, move_id


def _check_draft(draft: Draft) -> None:
    position = draft.boundary.get("position")
    if draft.tokens and position != len(draft.tokens):
        raise InvalidInput(
            f"a draft at position {position} brings {len(draft.tokens)} tokens; bring the processed ones, or none",
            code="draft", have=len(draft.tokens), want=str(position),
        )  # fmt: skip


def _protect(backing: Backing, tx: Transaction, staged: Staged) -> None:
    """Step 4: put again what collection doomed or deleted since it was put or seen, and take it off its list.

    Collection deletes under the same lock, so what is sound here stays until this transaction has made it reachable.
    """
    relied_on = staged.all_chunks() - staged.put_chunks
    lost = relied_on - tx.has_chunks(relied_on)
    again = tx.doomed_among(staged.sources)
    again |= {ObjectRef(kind=ObjectKind.CHUNK, object_id=chunk_id) for chunk_id in lost}
    is_stale = time.time() - staged.started_s > MAX_STAGED_S
    for each in staged.sources if is_stale else again:
        backing.store.put(NewObject(kind=each.kind, parts=staged.sources[each]()))
    tx.rescue(again)


def _advertise(
    tx: Transaction, staged: Staged, parents: KnownParents, prefixes: Sequence[PrefixRow], *, message: str
) -> bool:
    is_trusted = staged.is_trusted and parents.are_trusted(tx)
    row = manifest_row(
        staged.manifest_id, staged.manifest, inherited=parents.live_chunks(tx), is_trusted=is_trusted, message=message
    )
    if is_trusted:
        tx.add_prefixes(prefixes)
    return tx.add_manifest(row)


def _move(
    backing: Backing,
    tx: Transaction,
    ref: str,
    staged: Staged,
    parents: KnownParents,
    expect: Expectation,
    message: str,
) -> MoveId | None:
    found = tx.find_ref(ref)
    tip = None if found is None else found.target
    if not decide_move(ref, tip, staged.manifest_id, expect, lambda each: parents.includes(tx, each)):
        return None
    is_trusted = tx.get_manifest(staged.manifest_id).is_trusted
    return move_ref(backing, tx, ref, staged.manifest_id, message=message, is_trusted=is_trusted)


def publication_of(staged: Staged, *, was_new: bool, move_id: MoveId | None, elapsed_ms: float) -> Publication:
    sizes = {chunk.chunk_id: chunk.num_bytes for chunk in staged.manifest.chunks()}
    bytes_written = sum(staged.written.values())
    return Publication(
        manifest_id=staged.manifest_id,
        manifest=staged.manifest,
        was_new=was_new,
        chunks_written=len(staged.written),
        bytes_written=bytes_written,
        chunks_shared=len(sizes) - len(staged.written),
        bytes_shared=sum(sizes.values()) - bytes_written,
        move_id=move_id,
        elapsed_ms=elapsed_ms,
    )
