"""Checking a repository: every byte against its id, every name against what it leads to. Finds, and changes nothing.

Errors say that something named cannot be had as promised; warnings, that something convenient is lost; infos, what a crash left
behind, which the next collection takes. What can be done about a finding is in ``remedy``; :mod:`forkpoint.repo.repair` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from forkpoint.catalog.records import ManifestRow, ObjectRef
from forkpoint.errors import Corrupt, Incompatible, InvalidInput, NotFound
from forkpoint.ids import ManifestId, ObjectId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.contents import read_manifest
from forkpoint.repo.progress import Progress
from forkpoint.repo.rows import chunk_ids, manifest_row
from forkpoint.state.move import decode_move
from forkpoint.store.base import Store

Severity = Literal["error", "warning", "info"]

REPAIR: Final = "forkpoint fsck --repair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        code: stable, e.g. ``object_corrupt``.
        subject: what it is about, for people; ``objects`` the same for programs.
        remedy: what to do.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    remedy: str
    objects: tuple[ObjectRef, ...] = field(default=())


def check(backing: Backing, progress: Progress) -> list[Finding]:
    """See :meth:`forkpoint.repo.repository.Repository.check`."""
    stored = {kind: frozenset(backing.store.scan(kind)) for kind in ObjectKind}
    findings = [*_damaged(backing.store, stored, progress)]
    findings += _catalog_findings(backing)
    rows = list(backing.catalog.manifests())
    damaged = frozenset(each for finding in findings for each in finding.objects)
    findings += _missing(backing, rows, stored)
    for row in rows:
        if _manifest(row.manifest_id) not in damaged and row.manifest_id in stored[ObjectKind.MANIFEST]:
            findings += _manifest_findings(backing, row)
    findings += _leftovers(backing, stored)
    return findings


def _damaged(store: Store, stored: Mapping[ObjectKind, frozenset[ObjectId]], progress: Progress) -> Iterator[Finding]:
    """Objects whose bytes are not what their id says, or that are no record of their kind."""
    objects = [ObjectRef(kind=kind, object_id=each) for kind in ObjectKind for each in sorted(stored[kind])]
    for done, each in enumerate(objects, start=1):
        try:
            store.verify(each.kind, each.object_id)
            _decode(store, each)
        except NotFound:
            pass  # collected since it was listed; if it is named, it will be reported as missing
        except Incompatible as error:
            yield _finding("object_newer", "warning", each, error.message, "update forkpoint")
        except (Corrupt, InvalidInput) as error:
            yield _finding(
                "object_corrupt", "error", each, error.message, f"{REPAIR} sets it aside; publishing it again heals"
            )
        progress(done, len(objects))


def _decode(store: Store, each: ObjectRef) -> None:
    if each.kind is ObjectKind.MANIFEST:
        read_manifest(store, each.object_id)
    elif each.kind is ObjectKind.MOVE:
        decode_move(store.get(ObjectKind.MOVE, each.object_id))


def _catalog_findings(backing: Backing) -> Iterator[Finding]:
    for line in backing.catalog.check():
        code, _, what = line.partition(": ")
        yield Finding(
            code=code, severity="error", subject="catalog", message=what,
            remedy=f"{REPAIR}; if it stays, forkpoint fsck --rebuild-catalog",
        )  # fmt: skip


def _missing(
    backing: Backing, rows: list[ManifestRow], stored: Mapping[ObjectKind, frozenset[ObjectId]]
) -> Iterator[Finding]:
    """What the catalog holds and the store does not. Asked again, for it may have been published since the listing."""
    wanted: list[tuple[Severity, ObjectKind, set[ObjectId]]] = [
        ("error", ObjectKind.MANIFEST, {row.manifest_id for row in rows}),
        ("error", ObjectKind.CHUNK, {row.chunk_id for row in backing.catalog.live_chunks()}),
        ("warning", ObjectKind.TOKENIZER, {row.tokenizer_id for row in rows if row.tokenizer_id is not None}),
        ("warning", ObjectKind.MOVE, {row.move_id for row in backing.catalog.moves()}),
    ]
    remedies = {
        ObjectKind.MANIFEST: f"{REPAIR} withdraws it and moves its refs back",
        ObjectKind.CHUNK: f"{REPAIR} withdraws the manifests that need it; publishing it again heals",
        ObjectKind.TOKENIZER: "publish with this tokenizer again; until then there is no text",
        ObjectKind.MOVE: f"{REPAIR} writes it again where it can; without it a rebuilt reflog has a gap",
    }
    for severity, kind, object_ids in wanted:
        for each in sorted(object_ids - stored[kind]):
            if not backing.store.has(kind, each):
                ref = ObjectRef(kind=kind, object_id=each)
                yield _finding(
                    "object_missing", severity, ref, "the catalog names it, the store lacks it", remedies[kind]
                )


def _manifest_findings(backing: Backing, row: ManifestRow) -> Iterator[Finding]:
    """Whether what the catalog says of a manifest is what the manifest says, and whether the catalog knows all its chunks."""
    ref = _manifest(row.manifest_id)
    try:
        manifest = read_manifest(backing.store, row.manifest_id)
        says = manifest_row(row.manifest_id, manifest, inherited=(), is_trusted=row.is_trusted, message=row.message)
    except (NotFound, Corrupt, Incompatible, InvalidInput):
        return  # reported already, or collected since
    unknown = chunk_ids(manifest) - backing.catalog.has_chunks(chunk_ids(manifest))
    if unknown:
        what = f"it refers to {len(unknown)} chunks that the catalog does not hold"
        yield _finding("manifest_incomplete", "error", ref, what, f"{REPAIR} enters it again, or withdraws it")
    elif _facts(says) != _facts(row):
        yield _finding(
            "row_differs", "error", ref, "the catalog's row is not what the manifest says", f"{REPAIR} enters it again"
        )


def _facts(row: ManifestRow) -> tuple[object, ...]:
    return (
        row.kind, row.state_id, row.execution_id, row.position, row.pending, row.num_bytes, row.tokenizer_id, row.parents,
    )  # fmt: skip


def _leftovers(backing: Backing, stored: Mapping[ObjectKind, frozenset[ObjectId]]) -> Iterator[Finding]:
    """Objects that nothing names: a publication was interrupted, or is going on."""
    known: dict[ObjectKind, frozenset[ObjectId]] = {
        ObjectKind.MANIFEST: frozenset(backing.catalog.live_manifests()),
        ObjectKind.CHUNK: frozenset(row.chunk_id for row in backing.catalog.live_chunks()),
        ObjectKind.MOVE: frozenset(row.move_id for row in backing.catalog.moves()),
        ObjectKind.TOKENIZER: frozenset(
            row.tokenizer_id for row in backing.catalog.manifests() if row.tokenizer_id is not None
        ),
    }
    for kind in ObjectKind:
        objects = tuple(ObjectRef(kind=kind, object_id=each) for each in sorted(stored[kind] - known[kind]))
        if objects:
            yield Finding(
                code="leftover", severity="info", subject=f"{len(objects)} of kind {kind}", objects=objects,
                message="no manifest or ref leads to them", remedy="forkpoint gc deletes them",
            )  # fmt: skip


def _manifest(manifest_id: ManifestId) -> ObjectRef:
    return ObjectRef(kind=ObjectKind.MANIFEST, object_id=manifest_id)


def _finding(code: str, severity: Severity, each: ObjectRef, message: str, remedy: str) -> Finding:
    return Finding(
        code=code, severity=severity, subject=f"{each.kind} {short(each.object_id)}", message=message, remedy=remedy,
        objects=(each,),
    )  # fmt: skip
