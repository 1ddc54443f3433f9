"""What a ref was before. The reflog of HEAD also has the moves of the branch that HEAD was at, as in git."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.records import MoveRow
from forkpoint.ids import ManifestId
from forkpoint.repo.names import HEAD, SYMBOLIC


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflogEntry:
    """A move and what the ref then led to; None after a deletion. ``move.ref`` may be a branch in the reflog of HEAD."""

    move: MoveRow
    manifest_id: ManifestId | None


def entries_of(catalog: Catalog, ref: str, limit: int | None, as_of: int | None) -> list[ReflogEntry]:
    """The reflog of a ref given by its full name, newest first: the n-th is ``ref@{n}``."""
    if ref == HEAD:
        return list(_head_entries(catalog, as_of))[::-1][:limit]
    return [ReflogEntry(move=move, manifest_id=_target(move.new)) for move in catalog.moves(ref, limit, as_of)]


def _head_entries(catalog: Catalog, as_of: int | None) -> Iterator[ReflogEntry]:
    """Oldest first: every move that changed, or could have changed, what HEAD leads to; not those while it led to nothing."""
    values: dict[str, ManifestId | None] = {}
    branch: str | None = None
    for move in reversed(catalog.moves(as_of=as_of)):
        is_symbolic = move.new is not None and move.new.startswith(SYMBOLIC)
        if move.ref == HEAD:
            branch = move.new.removeprefix(SYMBOLIC) if move.new is not None and is_symbolic else None
        if not is_symbolic:
            values[move.ref] = _target(move.new)
        value = values.get(branch or HEAD)
        if move.ref in (HEAD, branch) and value is not None:
            yield ReflogEntry(move=move, manifest_id=value)


def _target(value: str | None) -> ManifestId | None:
    return None if value is None else ManifestId(value)
