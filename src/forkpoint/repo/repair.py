"""Acting on what fsck found. Whatever is repaired, names end up leading only to what is complete; nothing sound is deleted.

Damaged objects are set aside (or deleted, where the store has no folder to move them in). Manifests that cannot be read in full are
withdrawn from the catalog; what stays valid as of earlier transactions stays. Refs that led to them go back to their newest sound
ancestor, or are deleted when there is none, each with a move in the reflog. Children of what was withdrawn are entered again, so
that collection goes on to know every chunk that they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forkpoint.catalog.records import MoveRow, ObjectRef
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Corrupt, Incompatible, InvalidInput, NotFound, Unavailable
from forkpoint.ids import Bytes, ManifestId, ObjectId, ObjectKind, digest_of, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest
from forkpoint.repo.fsck import Finding
from forkpoint.repo.moves import FIRST_BRANCH, move_ref, point_head
from forkpoint.repo.names import HEAD, short_name
from forkpoint.repo.rows import chunk_ids, manifest_row
from forkpoint.state.manifest import Manifest, decode_manifest
from forkpoint.state.move import Move, encode_move
from forkpoint.store.base import NewObject, Store
from forkpoint.store.layout import Layout
from forkpoint.store.local import LocalStore
from forkpoint.store.os_errors import os_errors


def repair(backing: Backing, findings: Sequence[Finding], quarantine: Path | None) -> list[str]:
    """See :meth:`forkpoint.repo.repository.Repository.repair`. Reads every manifest under the lock: publications wait."""
    done = list(_set_aside(backing.store, findings, quarantine))
    done += _restore_moves(backing, findings)
    with backing.catalog.transaction(reason="fsck: repair") as tx:
        sound = dict(_sound(backing.store, tx))
        broken = [each for each in tx.live_manifests() if each not in sound]
        lost = [each.chunk_id for each in tx.live_chunks() if not backing.store.has(ObjectKind.CHUNK, each.chunk_id)]
        done += _move_refs_back(backing, tx, sound)
        again = [each for each, manifest in sound.items() if _must_reenter(each, manifest, broken, findings)]
        rows = {each: tx.get_manifest(each) for each in again}
        tx.remove_manifests([*broken, *again])
        tx.remove_chunks(lost)
        for each, row in rows.items():
            entered = manifest_row(each, sound[each], inherited=(), is_trusted=row.is_trusted, message=row.message)
            tx.add_manifest(entered)
    done += [f"withdrew manifest {short(each)}" for each in broken]
    return done + [f"entered manifest {short(each)} again" for each in again]


def _set_aside(store: Store, findings: Sequence[Finding], quarantine: Path | None) -> Iterator[str]:
    """Move damaged objects out of the way, so that they can be put again, and looked at."""
    for each in _objects(findings, "object_corrupt"):
        if not _is_damaged(store, each):
            continue  # healed or collected since it was found
        if quarantine is not None and isinstance(store, LocalStore):
            target = _move_aside(store, each, quarantine)
            if not _put_back(store, each, target):
                yield f"moved damaged {each.kind} {short(each.object_id)} to {target}"
        else:
            store.delete(each.kind, each.object_id)
            yield f"deleted damaged {each.kind} {short(each.object_id)}"


def _is_damaged(store: Store, each: ObjectRef) -> bool:
    try:
        store.verify(each.kind, each.object_id)
    except NotFound:
        return False
    except Corrupt:
        return True
    return each.kind is ObjectKind.MANIFEST and not _is_manifest(store.get(each.kind, each.object_id))


def _is_manifest(raw: Bytes) -> bool:
    """Bytes with the right digest may still be none."""
    try:
        decode_manifest(raw)
    except (Corrupt, Incompatible, InvalidInput):
        return False
    return True


def _put_back(store: LocalStore, each: ObjectRef, target: Path) -> bool:
    """Put a file that was moved aside into the store again if it is sound: a publication healed it just before the move."""
    with os_errors(f"look at {target} again", store.root):
        raw = target.read_bytes()
        if digest_of([raw]) != each.object_id or (each.kind is ObjectKind.MANIFEST and not _is_manifest(raw)):
            return False
        store.put(NewObject(kind=each.kind, parts=[raw]))
        target.unlink()
    return True


def _move_aside(store: LocalStore, each: ObjectRef, quarantine: Path) -> Path:
    source = Layout(store.root).path_of(each.kind, each.object_id)
    target = quarantine / f"{each.kind}-{each.object_id[3:]}"
    try:
        quarantine.mkdir(mode=0o700, exist_ok=True)
        source.replace(target)
    except OSError as error:
        raise Unavailable(
            f"cannot move {source} to {quarantine}: {error.strerror}; free space or check permissions",
            code="repository",
        ) from error
    return target


def _restore_moves(backing: Backing, findings: Sequence[Finding]) -> Iterator[str]:
    """Write lost moves again from the reflog, where that gives the bytes their id names."""
    lost = {
        each.object_id
        for each in _objects(findings, "object_missing", "object_corrupt")
        if each.kind is ObjectKind.MOVE
    }
    for row in backing.catalog.moves() if lost else ():
        if row.move_id in lost and digest_of([_encoded(row)]) == row.move_id:
            backing.store.put(NewObject(kind=ObjectKind.MOVE, parts=[_encoded(row)]))
            yield f"wrote move {short(row.move_id)} again"


def _encoded(row: MoveRow) -> bytes:
    move = Move(
        ref=row.ref, old=row.old, new=row.new, previous=row.previous, tx=row.tx, at_us=row.at_us,
        who=row.who, message=row.message, is_trusted=row.is_trusted,
    )  # fmt: skip
    return encode_move(move)


def _sound(store: Store, tx: Transaction) -> Iterator[tuple[ManifestId, Manifest]]:
    """The live manifests that are there with all their chunks."""
    absent: set[ObjectId] = set()
    present: set[ObjectId] = set()
    for manifest_id in list(tx.live_manifests()):
        try:
            manifest = read_manifest(store, manifest_id)
        except (NotFound, Corrupt, Incompatible, InvalidInput):
            continue
        for chunk_id in chunk_ids(manifest) - absent - present:
            (present if store.has(ObjectKind.CHUNK, chunk_id) else absent).add(chunk_id)
        if not chunk_ids(manifest) & absent:
            yield manifest_id, manifest


def _move_refs_back(backing: Backing, tx: Transaction, sound: Mapping[ManifestId, Manifest]) -> Iterator[str]:
    for row in tx.refs():
        if row.target is None or row.target in sound:
            continue
        behind = [each.manifest_id for each in tx.ancestors(row.target)]
        behind += [ManifestId(each.new) for each in tx.moves(row.name) if each.new is not None]
        new = next((each for each in behind if each in sound), None)
        message = f"fsck: {short(row.target)} is damaged"
        if new is None and row.name == HEAD:
            point_head(backing, tx, FIRST_BRANCH, message=message)
        else:
            is_trusted = new is None or tx.get_manifest(new).is_trusted
            move_ref(backing, tx, row.name, new, message=message, is_trusted=is_trusted)
        where = "removed, for no sound ancestor is left" if new is None else f"moved back to {short(new)}"
        yield f"{short_name(row.name)} was at {short(row.target)}, which is damaged: {where}"


def _must_reenter(
    manifest_id: ManifestId, manifest: Manifest, broken: Sequence[ManifestId], findings: Sequence[Finding]
) -> bool:
    """Whether a sound manifest's row says too little: a parent that introduced some of its chunks goes, or it was found wrong."""
    lacks_parent = any(parent.manifest_id in broken for parent in manifest.parents)
    wrong = _objects(findings, "row_differs", "manifest_incomplete")
    return lacks_parent or any(each.object_id == manifest_id for each in wrong)


def _objects(findings: Sequence[Finding], *codes: str) -> Iterator[ObjectRef]:
    return (each for finding in findings if finding.code in codes for each in finding.objects)
