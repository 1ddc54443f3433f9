"""What people look at: the log, the reflog, one manifest in full, and how much there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forkpoint.catalog.records import Counts, LogRow, ManifestRow
from forkpoint.errors import NotFound
from forkpoint.ids import ManifestId
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest, read_tokens
from forkpoint.repo.names import candidates
from forkpoint.repo.reflog import ReflogEntry, entries_of
from forkpoint.repo.refs import Head, read_head
from forkpoint.repo.resolution import find_ref, resolve
from forkpoint.repo.text import find_decoder
from forkpoint.state.manifest import Manifest


class LogEntry(NamedTuple):
    """One line of a log. ``refs`` are the full names that point at it now, HEAD included; ``who`` first moved a ref to it."""

    row: LogRow
    refs: tuple[str, ...]
    who: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One manifest in full. ``tokens`` is None for kinds without, ``text`` also when no tokenizer is stored with it."""

    manifest_id: ManifestId
    manifest: Manifest
    row: ManifestRow
    refs: tuple[str, ...]
    tokens: tuple[int, ...] | None
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a repository stands. ``row`` is that of HEAD's manifest; ``counts`` are live facts and pending deletions;
    ``num_leases`` are running."""

    head: Head
    row: ManifestRow | None
    counts: Counts
    num_branches: int
    num_tags: int
    num_leases: int


def log(backing: Backing, name: str, limit: int | None, as_of: int | None) -> list[LogEntry]:
    """The manifest that ``name`` means and what it descends from, newest first."""
    return _entries(backing, [resolve(backing.catalog, name, as_of)], limit, as_of)


def log_all(backing: Backing, limit: int | None, as_of: int | None) -> list[LogEntry]:
    """What any branch, any tag or HEAD leads to, newest first."""
    return _entries(backing, list(refs_by_manifest(backing, as_of)), limit, as_of)


def reflog(backing: Backing, name: str, limit: int | None) -> list[ReflogEntry]:
    """The moves of a ref, newest first; also of one that was deleted. Raises NotFound ``not_found.name``."""
    row = find_ref(backing.catalog, name, None)
    if row is not None:
        return entries_of(backing.catalog, row.name, limit, None)
    deleted = (entries_of(backing.catalog, ref, limit, None) for ref in candidates(name))
    found = next((entries for entries in deleted if entries), None)
    if found is None:
        resolve(backing.catalog, name, None)  # raises with suggestions
        raise NotFound(f"{name!r} is no ref and has no reflog; name a branch, a tag or HEAD", code="name", name=name)
    return found


def show(backing: Backing, name: str, as_of: int | None) -> Shown:
    """Everything about one manifest."""
    manifest_id = resolve(backing.catalog, name, as_of)
    manifest = read_manifest(backing.store, manifest_id)
    tokens = read_tokens(backing.store, manifest) if manifest.kind == "llm" else None
    decode = None if tokens is None else find_decoder(backing.store, manifest)
    return Shown(
        manifest_id=manifest_id,
        manifest=manifest,
        row=backing.catalog.get_manifest(manifest_id, as_of),
        refs=refs_by_manifest(backing, as_of).get(manifest_id, ()),
        tokens=None if tokens is None else tuple(tokens),
        text=None if decode is None or tokens is None else decode(tokens),
    )


def status(backing: Backing) -> Status:
    """Where HEAD is and how much there is."""
    catalog = backing.catalog
    head = read_head(catalog, None)
    refs = [row.name for row in catalog.refs("refs/")]
    return Status(
        head=head,
        row=None if head.manifest_id is None else catalog.find_manifest(head.manifest_id),
        counts=catalog.counts(),
        num_branches=sum(name.startswith("refs/heads/") for name in refs),
        num_tags=sum(name.startswith("refs/tags/") for name in refs),
        num_leases=catalog.num_leases(),
    )


def _entries(backing: Backing, starts: Sequence[ManifestId], limit: int | None, as_of: int | None) -> list[LogEntry]:
    names, movers = refs_by_manifest(backing, as_of), backing.catalog.first_movers(as_of)
    rows = backing.catalog.ancestors_of_all(starts, limit, as_of)
    return [LogEntry(row=row, refs=names.get(row.manifest_id, ()), who=movers.get(row.manifest_id)) for row in rows]


def refs_by_manifest(backing: Backing, as_of: int | None) -> dict[ManifestId, tuple[str, ...]]:
    """The full names that point at each manifest, HEAD among them when it is detached or its branch does."""
    named: dict[ManifestId, tuple[str, ...]] = {}
    head = read_head(backing.catalog, as_of)
    if head.manifest_id is not None:
        named[head.manifest_id] = ("HEAD",)
    for row in backing.catalog.refs("refs/", as_of):
        if row.target is not None:
            named[row.target] = (*named.get(row.target, ()), row.name)
    return named
