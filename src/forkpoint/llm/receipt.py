"""Receipts: what an operation did to get a state, in counts that can be checked."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.ids import ManifestId
from forkpoint.state.canonical import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """How a continuation's state came to be.

    Attributes:
        operation: start, extend, generate, fork, checkout or restore.
        claim: the strongest claim that holds: ``bytes`` (state is bit-identical to what was captured), ``continuation`` (and the same
            steps give the same bits as never having stopped) or ``invariance``.
        tokens_reused: tokens whose state was shared in memory with the value this one came from.
        tokens_restored: tokens whose state was read back from a store or a snapshot, every chunk verified by digest.
        tokens_computed: tokens that went through the model.
        chunks_verified, bytes_restored: what was read back.
        elapsed_ms: wall time of the whole operation.
        manifest_id: what was restored, or None.
        notes: what a careful reader should know, in words.
    """

    operation: str
    claim: str
    tokens_reused: int = 0
    tokens_restored: int = 0
    tokens_computed: int = 0
    chunks_verified: int = 0
    bytes_restored: int = 0
    elapsed_ms: float = 0.0
    manifest_id: ManifestId | None = None
    notes: tuple[str, ...] = ()

    def to_record(self) -> Record:
        """The receipt for JSON output; milliseconds rounded to whole microseconds."""
        return {
            "bytes_restored": self.bytes_restored,
            "chunks_verified": self.chunks_verified,
            "claim": self.claim,
            "elapsed_us": round(self.elapsed_ms * 1000),
            "manifest_id": self.manifest_id,
            "notes": list(self.notes),
            "operation": self.operation,
            "tokens_computed": self.tokens_computed,
            "tokens_restored": self.tokens_restored,
            "tokens_reused": self.tokens_reused,
        }
