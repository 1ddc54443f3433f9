"""How continuations begin: from tokens, from a committed name, from a snapshot. Knows a runtime only by what ``engines.base`` says of it.

What is restored was checked before a state exists (``restoration``); on any error nothing has changed in memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forkpoint.errors import Corrupt, InvalidInput, NotFound
from forkpoint.ids import Bytes, ManifestId
from forkpoint.llm.boundary import Boundary
from forkpoint.llm.continuation import Continuation
from forkpoint.llm.engines.base import PrefillProgress, Runtime
from forkpoint.llm.generation import Cursor
from forkpoint.llm.history import History
from forkpoint.llm.lineage import Lineage
from forkpoint.llm.receipt import Receipt
from forkpoint.llm.resident.base import Fetch
from forkpoint.llm.restoration import Restored, check_fits, restore_groups
from forkpoint.llm.sampling import Sampling
from forkpoint.llm.snapshot import fetch_from, open_snapshot
from forkpoint.llm.turns import Message
from forkpoint.repo.repository import Repository
from forkpoint.state.manifest import Manifest


def start(
    runtime: Runtime,
    tokens: Sequence[int],
    *,
    sampling: Sampling | None,
    repository: Repository | None,
    progress: PrefillProgress,
    messages: tuple[Message, ...] = (),
) -> Continuation:
    """A new continuation; all tokens but the last are restored or processed, the last is pending.

    Raises:
        InvalidInput: ``invalid_input.empty`` without tokens, ``invalid_input.token`` for an id outside the vocabulary.
    """
    if not tokens:
        raise InvalidInput("a continuation needs at least one token; the prompt is empty", code="empty")
    started = time.perf_counter()
    runtime.check_tokens(tokens)
    found, notes = _find_prefix(runtime, repository, tokens)
    state = runtime.strategy.empty() if found is None else found.state
    restored = state.length
    state = runtime.advance(state, tokens[restored:-1], progress)
    receipt = Receipt(
        operation="start",
        claim=runtime.exactness.claim,
        tokens_restored=restored,
        tokens_computed=state.length - restored,
        chunks_verified=0 if found is None else found.num_chunks,
        bytes_restored=0 if found is None else found.num_bytes,
        elapsed_ms=(time.perf_counter() - started) * 1e3,
        notes=notes,
    )
    cursor = Cursor(state=state, tokens=History(tokens), prompt_length=len(tokens), offset=0)
    return Continuation(
        runtime, cursor, sampling=sampling or Sampling(), receipt=receipt, lineage=Lineage(), messages=messages
    )


def checkout(
    runtime: Runtime,
    repository: Repository,
    name: str,
    *,
    allow_execution_difference: bool,
    progress: PrefillProgress,
) -> Continuation:
    """Restore a committed continuation; see ``TransformersEngine.checkout``."""
    started = time.perf_counter()
    # Without a lease: what a collection beside this deletes is a typed error, never other bytes, and no restore waits for a flush.
    manifest_id = repository.resolve(name)
    stored = _Stored(
        operation="checkout",
        manifest=repository.manifest(manifest_id),
        manifest_id=manifest_id,
        fetch=lambda ref: repository.chunk(ref.chunk_id),
        is_trusted=repository.row(manifest_id).is_trusted,
    )
    return _restored(
        runtime, stored, allow_execution_difference=allow_execution_difference, progress=progress, started=started
    )


def restore(
    runtime: Runtime, snapshot: Bytes, *, allow_execution_difference: bool, progress: PrefillProgress
) -> Continuation:
    """Open a snapshot; see ``TransformersEngine.restore``."""
    started = time.perf_counter()
    manifest, bundle = open_snapshot(snapshot)
    stored = _Stored(
        operation="restore",
        manifest=manifest,
        manifest_id=bundle.heads[0],
        fetch=fetch_from(bundle),
        is_trusted=False,
    )
    return _restored(
        runtime, stored, allow_execution_difference=allow_execution_difference, progress=progress, started=started
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A continuation in store. A committed one can be read again at any time; a snapshot is gone when its caller lets go of it."""

    operation: Literal["checkout", "restore"]
    manifest: Manifest
    manifest_id: ManifestId
    fetch: Fetch
    is_trusted: bool

    @property
    def is_committed(self) -> bool:
        return self.operation == "checkout"


def _restored(
    runtime: Runtime, stored: _Stored, *, allow_execution_difference: bool, progress: PrefillProgress, started: float
) -> Continuation:
    manifest = stored.manifest
    runtime.check_weights()
    claim, differing = check_fits(runtime, manifest, allow_execution_difference=allow_execution_difference)
    notes = (*_caveats(manifest), *differing)
    boundary, pending = _boundary(runtime, manifest)
    restored = restore_groups(
        runtime, manifest.groups, boundary.position, stored.fetch, progress,
        prefilled=boundary.prefilled, is_lasting=stored.is_committed,
    )  # fmt: skip
    receipt = Receipt(
        operation=stored.operation,
        claim="bytes" if notes else claim,
        tokens_restored=boundary.position,
        chunks_verified=restored.num_chunks,
        bytes_restored=restored.num_bytes,
        elapsed_ms=(time.perf_counter() - started) * 1e3,
        manifest_id=stored.manifest_id,
        notes=notes,
    )
    cursor = Cursor(
        state=restored.state,
        tokens=History([*restored.tokens, pending]),
        prompt_length=boundary.prompt_length,
        offset=boundary.offset,
    )
    # Across an execution difference what follows would be indexed under this engine's identity on top of another's state.
    is_own = manifest.fingerprint.execution_id == runtime.fingerprint.execution_id
    return Continuation(
        runtime,
        cursor,
        sampling=boundary.sampling,
        receipt=receipt,
        lineage=Lineage(committed=stored.manifest_id if stored.is_committed else None, parents=manifest.parents),
        is_trusted=stored.is_trusted and is_own,
        messages=_messages(manifest),
        caveats=notes,
    )


def _boundary(runtime: Runtime, manifest: Manifest) -> tuple[Boundary, int]:
    """The stored boundary and its pending token, which this model must have."""
    boundary = Boundary.from_record(manifest.boundary)
    if boundary.pending is None:
        raise InvalidInput(
            "this is a session without a pending token; open it with decode_session().restore(...) and step on",
            code="pending",
        )
    runtime.check_tokens((boundary.pending,))
    return boundary, boundary.pending


def _find_prefix(
    runtime: Runtime, repository: Repository | None, tokens: Sequence[int]
) -> tuple[Restored | None, tuple[str, ...]]:
    """Restore the longest stored prefix. One that is gone or damaged when it is read costs a recomputation, and the receipt says so."""
    if repository is None:
        return None, ()
    try:
        match = repository.find_prefix(runtime.fingerprint, tokens[:-1], [group.name for group in runtime.groups])
        if match is None:
            return None, ()
        groups = [replace(group, kind=spec.kind) for group, spec in zip(match.groups, runtime.groups, strict=True)]
        restored = restore_groups(
            runtime, groups, match.num_tokens, lambda ref: repository.chunk(ref.chunk_id),
            prefilled=match.num_tokens, is_lasting=True,
        )  # fmt: skip
        return restored, ()
    except (NotFound, Corrupt) as error:
        return None, (f"a stored prefix could not be used: {error.message}",)


def _caveats(manifest: Manifest) -> tuple[str, ...]:
    stored = manifest.payload.get("caveats")
    return tuple(map(str, stored)) if isinstance(stored, list) else ()


def _messages(manifest: Manifest) -> tuple[Message, ...]:
    stored = manifest.payload.get("messages", [])
    if not isinstance(stored, list) or not all(_is_message(turn) for turn in stored):
        raise Corrupt("the turns of this conversation are not maps of texts", code="messages")
    return tuple({str(key): str(text) for key, text in turn.items()} for turn in stored if isinstance(turn, Mapping))


def _is_message(turn: object) -> bool:
    return isinstance(turn, Mapping) and all(isinstance(text, str) for text in turn.values())
