"""Branches, tags and HEAD: what they are now, and moving them. Every move is compare-and-set under the catalog's lock."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.catalog.catalog import Catalog
from forkpoint.errors import Conflict, Error, NotFound
from forkpoint.ids import ManifestId, MoveId, parse_object_id
from forkpoint.repo.backing import Backing
from forkpoint.repo.moves import decide_move, move_ref, point_head, value_of
from forkpoint.repo.names import (
    HEAD,
    HEADS,
    SYMBOLIC,
    TAGS,
    Expectation,
    branch_ref,
    check_expectation,
    short_name,
    tag_ref,
)
from forkpoint.repo.resolution import resolve
from forkpoint.repo.revival import ensure_live


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A branch or tag: its short and full name and what it points at."""

    name: str
    ref: str
    manifest_id: ManifestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where HEAD is. ``branch`` is None when it is detached, ``manifest_id`` when the branch has no manifest yet."""

    branch: str | None
    manifest_id: ManifestId | None


def list_refs(catalog: Catalog, folder: str, as_of: int | None) -> list[Ref]:
    """The branches (``refs/heads/``) or tags (``refs/tags/``), by name."""
    return [
        Ref(name=short_name(row.name), ref=row.name, manifest_id=row.target)
        for row in catalog.refs(folder, as_of)
        if row.target is not None
    ]


def read_head(catalog: Catalog, as_of: int | None) -> Head:
    """Where HEAD is, or was."""
    row = catalog.find_ref(HEAD, as_of)
    if row is None:
        return Head(branch=None, manifest_id=None)
    if row.symbolic is None:
        return Head(branch=None, manifest_id=row.target)
    followed = catalog.find_ref(row.symbolic, as_of)
    return Head(branch=short_name(row.symbolic), manifest_id=None if followed is None else followed.target)


def put_branch(backing: Backing, name: str, target: str, expect: Expectation, message: str) -> MoveId | None:
    """Point a branch at a manifest. None when it is there already."""
    return _put(backing, branch_ref(name), target, expect, message or f"branch: from {target}")


def put_tag(backing: Backing, name: str, target: str, expect: Expectation, message: str) -> MoveId | None:
    """Point a tag at a manifest. None when it is there already."""
    return _put(backing, tag_ref(name), target, expect, message or f"tag: {target}")


def delete(backing: Backing, ref: str, expect: Expectation, message: str) -> MoveId:
    """Delete a ref; its reflog stays.

    Raises:
        NotFound: ``not_found.ref``.
        Conflict: ``conflict.current_branch`` for the branch that HEAD is at, ``conflict.ref`` as expected.
    """
    check_expectation(expect)
    with backing.catalog.transaction(reason=f"delete {ref}") as tx:
        found = tx.find_ref(ref)
        if found is None:
            raise _absent(ref)
        if value_of(tx.find_ref(HEAD)) == SYMBOLIC + ref:
            raise Conflict(
                f"{short_name(ref)} is the current branch; check another one out first", code="current_branch", ref=ref
            )
        decide_move(ref, found.target, None, "anything" if expect == "fast-forward" else expect, lambda _: False)
        return move_ref(backing, tx, ref, None, message=message or "delete", is_trusted=True)


def rename_branch(backing: Backing, old: str, new: str) -> None:
    """Give a branch another name, and take HEAD along.

    Raises:
        NotFound: ``not_found.ref``.
        Conflict: ``conflict.ref`` when the new name is taken.
    """
    old_ref, new_ref = branch_ref(old), branch_ref(new)
    with backing.catalog.transaction(reason=f"rename {old_ref} to {new_ref}") as tx:
        is_current = value_of(tx.find_ref(HEAD)) == SYMBOLIC + old_ref
        found, taken = tx.find_ref(old_ref), tx.find_ref(new_ref)
        if found is None and not is_current:
            raise _absent(old_ref)
        if old_ref == new_ref:
            return
        if taken is not None:
            raise Conflict(f"{short_name(new_ref)} exists already; delete it first", code="ref", ref=new_ref)
        message = f"rename: {short_name(old_ref)} to {short_name(new_ref)}"
        if found is not None and found.target is not None:
            is_trusted = tx.get_manifest(found.target).is_trusted
            move_ref(backing, tx, new_ref, found.target, message=message, is_trusted=is_trusted)
            move_ref(backing, tx, old_ref, None, message=message, is_trusted=True)
        if is_current:
            point_head(backing, tx, new_ref, message=message)


def checkout(backing: Backing, name: str) -> Head:
    """Move HEAD: to a branch when ``name`` is one, else to the manifest that it means, detached."""
    ref = _find_branch(backing.catalog, name)
    if ref is not None:
        with backing.catalog.transaction(reason=f"checkout {ref}") as tx:
            if tx.find_ref(ref) is None:
                raise _absent(ref)
            if value_of(tx.find_ref(HEAD)) != SYMBOLIC + ref:
                point_head(backing, tx, ref, message=f"checkout: {short_name(ref)}")
    else:
        _put(backing, HEAD, name, "anything", f"checkout: {name}")
    return read_head(backing.catalog, None)


def find_target(catalog: Catalog, name: str) -> ManifestId:
    """What ``name`` means; a complete id is taken as it is, for collection may have doomed it without deleting it yet."""
    try:
        return parse_object_id(name)
    except Error:
        return resolve(catalog, name, None)


def _put(backing: Backing, ref: str, target: str, expect: Expectation, message: str) -> MoveId | None:
    check_expectation(expect)
    manifest_id = find_target(backing.catalog, target)
    with backing.catalog.transaction(reason=f"set {ref}") as tx:
        ensure_live(backing, tx, manifest_id)
        found = tx.find_ref(ref)
        tip = None if found is None else found.target
        if not decide_move(ref, tip, manifest_id, expect, lambda each: tx.is_ancestor(each, manifest_id)):
            return None
        is_trusted = tx.get_manifest(manifest_id).is_trusted
        return move_ref(backing, tx, ref, manifest_id, message=message, is_trusted=is_trusted)


def _find_branch(catalog: Catalog, name: str) -> str | None:
    """The branch that ``name`` is, unless git's order gives another ref of that name, or it is none at all."""
    if name in (HEAD, "@"):
        return None
    ref = name if name.startswith(HEADS) else HEADS + name
    is_tag = not name.startswith(HEADS) and catalog.find_ref(TAGS + name) is not None
    return None if is_tag or catalog.find_ref(ref) is None else ref


def _absent(ref: str) -> NotFound:
    return NotFound(f"there is no {short_name(ref)}; see forkpoint branch", code="ref", ref=ref)
