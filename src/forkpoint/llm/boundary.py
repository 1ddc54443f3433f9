"""The boundary of a language-model continuation as a record: where it stands and how it goes on (FORMAT.md, "Kind llm")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.llm.sampling import Sampling
from forkpoint.state.canonical import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A point between two steps.

    Attributes:
        position: processed tokens; state covers ``[0, position)``.
        pending: the token to be evaluated at ``position`` next, or None for a session that has just returned logits.
        prompt_length: leading tokens of the history that were given; what follows was generated. Presence and frequency penalties and
            stop strings look at the generated part only.
        offset: tokens dropped from the front of the history by rollover; random numbers count from there.
        sampling: parameters, seed and stream.
        prefilled: leading tokens whose chunks were each computed by one whole prefill piece, a multiple of 256: only these
            have the bits of a cold start, and only these may enter a prefix index.
    """

    position: int
    pending: int | None
    prompt_length: int
    offset: int
    sampling: Sampling
    prefilled: int

    def to_record(self) -> Record:
        """Canonical record."""
        return {
            "offset": self.offset,
            "pending": self.pending,
            "position": self.position,
            "prefilled": self.prefilled,
            "prompt_length": self.prompt_length,
            "sampling": self.sampling.to_record(),
        }

    @classmethod
    def from_record(cls, record: Record) -> Boundary:
        """Read a boundary. Raises Corrupt ``corrupt.boundary`` for anything else."""
        try:
            sampling = record["sampling"]
            if not isinstance(sampling, Mapping):
                raise TypeError(f"{sampling!r} is not a map")
            boundary = cls(
                position=_count(record["position"]),
                pending=None if record["pending"] is None else _count(record["pending"]),
                prompt_length=_count(record["prompt_length"]),
                offset=_count(record["offset"]),
                sampling=Sampling.from_record(sampling),
                prefilled=_count(record["prefilled"]),
            )
            if boundary.prompt_length > boundary.position + 1 or boundary.prefilled > boundary.position:
                raise TypeError("a prompt or prefilled part longer than the history")
        except (KeyError, TypeError, InvalidInput) as error:
            raise Corrupt(f"not the boundary of a language model: {error!r}", code="boundary") from error
        return boundary


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value
