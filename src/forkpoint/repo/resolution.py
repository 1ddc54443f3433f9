"""From a name to a manifest, as in git: refs first, then ids and their unique beginnings, then the steps behind them."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.records import RefRow
from forkpoint.errors import InvalidInput, NotFound
from forkpoint.ids import ManifestId, short
from forkpoint.repo.names import HEAD, Revision, Step, candidates, parse_revision, short_name
from forkpoint.repo.reflog import entries_of

MIN_PREFIX_DIGITS: Final = 4
_HEX: Final = re.compile(r"[0-9a-f]{4,64}")


def resolve(catalog: Catalog, name: str, as_of: int | None) -> ManifestId:
    """See :meth:`forkpoint.repo.repository.Repository.resolve`."""
    revision = parse_revision(name)
    steps = revision.steps
    if steps and steps[0].kind == "@":
        found = _reflog_value(catalog, name, _reflog_ref(catalog, name, revision.base, as_of), steps[0].count, as_of)
        steps = steps[1:]
    else:
        found = _base(catalog, name, revision, as_of)
    for step in steps:
        found = _walk(catalog, name, found, step, as_of)
    return found


def find_ref(catalog: Catalog, base: str, as_of: int | None) -> RefRow | None:
    """The ref that ``base`` means: HEAD, a full name, a tag or a branch, in git's order."""
    rows = (catalog.find_ref(name, as_of) for name in candidates(base))
    return next((row for row in rows if row is not None), None)


def target_of(catalog: Catalog, row: RefRow, as_of: int | None) -> ManifestId | None:
    """What a ref points at, through a symbolic one; None when that branch has no manifest yet."""
    if row.symbolic is None:
        return row.target
    followed = catalog.find_ref(row.symbolic, as_of)
    return None if followed is None else followed.target


def _base(catalog: Catalog, name: str, revision: Revision, as_of: int | None) -> ManifestId:
    row = find_ref(catalog, revision.base, as_of)
    if row is None:
        return _by_id(catalog, name, revision.base, as_of)
    target = target_of(catalog, row, as_of)
    if target is None:
        raise NotFound(
            f"{short_name(row.symbolic or row.name)} has no manifest yet; publish to it first", code="name", name=name
        )
    return target


def _by_id(catalog: Catalog, name: str, base: str, as_of: int | None) -> ManifestId:
    digits = base.removeprefix("b3:")
    if not _HEX.fullmatch(digits):
        raise _unknown(catalog, name, base, as_of)
    found = catalog.find_manifests_by_prefix(digits, as_of)
    if not found:
        raise _unknown(catalog, name, base, as_of)
    if len(found) > 1:
        listed = ", ".join(short(each) for each in found[:10])
        raise InvalidInput(
            f"{base} is the beginning of several ids ({listed}{', ...' if len(found) > 10 else ''}); write more digits",
            code="ambiguous", name=name, num_candidates=len(found),
        )  # fmt: skip
    return found[0]


def _reflog_ref(catalog: Catalog, name: str, base: str, as_of: int | None) -> str:
    """The ref whose reflog is meant; without a base, the current branch's, or HEAD's own when it is detached."""
    if not base:
        head = catalog.find_ref(HEAD, as_of)
        return HEAD if head is None or head.symbolic is None else head.symbolic
    row = find_ref(catalog, base, as_of)
    if row is not None:
        return row.name
    with_moves = (ref for ref in candidates(base) if catalog.last_move_id(ref) is not None)
    deleted = next(with_moves, None)
    if deleted is None:
        raise _unknown(catalog, name, base, as_of)
    return deleted


def _reflog_value(catalog: Catalog, name: str, ref: str, count: int, as_of: int | None) -> ManifestId:
    entries = entries_of(catalog, ref, count + 1, as_of)
    if len(entries) <= count:
        raise NotFound(
            f"{name}: {short_name(ref)} has only {len(entries)} earlier values; see forkpoint reflog",
            code="name",
            name=name,
        )
    value = entries[count].manifest_id
    if value is None:
        raise NotFound(f"{name}: {short_name(ref)} pointed at nothing then", code="name", name=name)
    return value


def _walk(catalog: Catalog, name: str, start: ManifestId, step: Step, as_of: int | None) -> ManifestId:
    if step.kind == "~":
        found = catalog.first_parent(start, step.count, as_of)
    elif step.count == 0:
        found = start
    else:
        parents = catalog.get_manifest(start, as_of).parents
        found = parents[step.count - 1].manifest_id if step.count <= len(parents) else None
    if found is None or not catalog.has_manifests([found], as_of):
        raise NotFound(f"{name}: {short(start)} has no such ancestor here; see forkpoint log", code="name", name=name)
    return found


def _unknown(catalog: Catalog, name: str, base: str, as_of: int | None) -> NotFound:
    names = [short_name(row.name) for row in catalog.refs(as_of=as_of)]
    close = get_close_matches(base, names, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "see forkpoint branch and forkpoint log"
    return NotFound(
        f"nothing is named {base!r}; {hint}", code="name", name=name, suggestions=", ".join(close) if close else None
    )
