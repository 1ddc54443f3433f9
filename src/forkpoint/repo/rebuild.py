"""A catalog made anew from the store alone: manifests, lineage, prefix index, refs and reflog (rules in chains.py).

Manifests that cannot be read, or lack a chunk, are passed over. A ref whose manifest is among those goes back to the last
complete one that its moves name, by a move that says so. Not rebuilt: leases, decisions, demand, marks of purges, and the numbers
and times of transactions: all facts get those of the rebuild, which come after those of every stored move; moves keep their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Corrupt, Error, Incompatible, InvalidInput, NotFound, Unavailable
from forkpoint.ids import ManifestId, MoveId, ObjectKind, short
from forkpoint.repo.backing import Backing
from forkpoint.repo.chains import Named, committed_moves, trusted_manifests
from forkpoint.repo.contents import read_manifest, read_tokens
from forkpoint.repo.layout import (
    DEFAULT_NAMESPACE,
    Layout,
    Occupancy,
    flush_folder,
    settings_to_rebuild,
    write_settings,
)
from forkpoint.repo.moves import FIRST_BRANCH, move_ref, move_row, point_head
from forkpoint.repo.names import HEAD, SYMBOLIC, short_name
from forkpoint.repo.rows import chunk_ids, manifest_row, prefix_rows
from forkpoint.state.manifest import Manifest
from forkpoint.state.move import Move, decode_move
from forkpoint.store.base import Store
from forkpoint.store.local import LocalStore


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """What a rebuild made. ``problems`` are what was passed over and the refs that went back, as sentences."""

    num_manifests: int
    num_trusted: int
    num_refs: int
    num_moves: int
    problems: tuple[str, ...]


def rebuild_at(layout: Layout) -> RebuildReport:
    """See :meth:`forkpoint.repo.repository.Repository.rebuild_catalog`."""
    settings = settings_to_rebuild(layout)
    namespace = DEFAULT_NAMESPACE if settings is None else settings.namespace
    occupancy = Occupancy.alone(layout.lock)
    try:
        new = layout.catalog.with_suffix(".new")
        _remove(new)
        catalog = Catalog.create(sqlite_url(new))
        store = LocalStore(layout.objects)
        try:
            report = fill(Backing(store=store, catalog=catalog, namespace=namespace, who="rebuild"))
        finally:
            catalog.close()
        _replace(layout.catalog, new)
        if settings is None:
            write_settings(layout, namespace)
        return report
    except OSError as error:
        raise Unavailable(
            f"cannot replace {layout.catalog}: {error.strerror}; check its permissions, then rebuild again",
            code="repository",
        ) from error
    finally:
        occupancy.end()


def fill(backing: Backing) -> RebuildReport:
    """Fill an empty catalog from the store, in one transaction."""
    problems: list[str] = []
    manifests = dict(_complete_manifests(backing.store, problems))
    moves = committed_moves(dict(_readable_moves(backing.store, problems)))
    trusted = trusted_manifests(manifests, (move for _, move in moves))
    backing.catalog.continue_from(*_latest(moves))
    with backing.catalog.transaction(reason="rebuild") as tx:
        _add_manifests(backing, tx, manifests, trusted, _messages(moves))
        _add_moves(backing, tx, manifests, moves, problems)
        if tx.find_ref(HEAD) is None:
            point_head(backing, tx, FIRST_BRANCH, message="rebuild")
        num_refs = len(tx.refs())
    return RebuildReport(
        num_manifests=len(manifests),
        num_trusted=len(trusted),
        num_refs=num_refs,
        num_moves=len(moves),
        problems=tuple(problems),
    )


def _complete_manifests(store: Store, problems: list[str]) -> Iterator[tuple[ManifestId, Manifest]]:
    stored = frozenset(store.scan(ObjectKind.CHUNK))
    for manifest_id in sorted(store.scan(ObjectKind.MANIFEST)):
        try:
            manifest = read_manifest(store, manifest_id)
        except (NotFound, Corrupt, Incompatible, InvalidInput) as error:
            problems.append(f"manifest {short(manifest_id)} was passed over: {error.message}")
            continue
        if chunk_ids(manifest) <= stored:
            yield manifest_id, manifest
        else:
            problems.append(f"manifest {short(manifest_id)} was passed over: a chunk that it needs is missing")


def _readable_moves(store: Store, problems: list[str]) -> Iterator[tuple[MoveId, Move]]:
    for move_id in store.scan(ObjectKind.MOVE):
        try:
            yield move_id, decode_move(store.get(ObjectKind.MOVE, move_id))
        except (NotFound, Corrupt, Incompatible) as error:
            problems.append(f"move {short(move_id)} was passed over: {error.message}")


def _latest(moves: Sequence[Named]) -> tuple[int, int]:
    """The greatest transaction number and time of any move: numbers go on from there, for moves are ordered by them."""
    return max((move.tx for _, move in moves), default=0), max((move.at_us for _, move in moves), default=0)


def _add_manifests(
    backing: Backing,
    tx: Transaction,
    manifests: Mapping[ManifestId, Manifest],
    trusted: frozenset[ManifestId],
    messages: Mapping[str, str],
) -> None:
    for manifest_id in _parents_first(manifests):
        manifest = manifests[manifest_id]
        parents = (manifests.get(parent.manifest_id) for parent in manifest.parents)
        inherited = {chunk_id for parent in parents if parent is not None for chunk_id in chunk_ids(parent)}
        is_trusted = manifest_id in trusted
        message = messages.get(manifest_id, "")
        tx.add_manifest(
            manifest_row(manifest_id, manifest, inherited=inherited, is_trusted=is_trusted, message=message)
        )
        if is_trusted and manifest.kind == "llm":
            with suppress(Corrupt):  # fsck reports it; its prefixes stay out of the index
                tx.add_prefixes(prefix_rows(manifest, read_tokens(backing.store, manifest), backing.namespace))


def _parents_first(manifests: Mapping[ManifestId, Manifest]) -> Iterator[ManifestId]:
    parents = {
        each: [parent.manifest_id for parent in manifest.parents if parent.manifest_id in manifests]
        for each, manifest in manifests.items()
    }
    return iter(TopologicalSorter(parents).static_order())


def _messages(moves: Sequence[Named]) -> dict[str, str]:
    """What the first move to each manifest said."""
    messages: dict[str, str] = {}
    for _, move in moves:
        if move.new is not None:
            messages.setdefault(move.new, move.message)
    return messages


def _add_moves(
    backing: Backing,
    tx: Transaction,
    manifests: Mapping[ManifestId, Manifest],
    moves: Sequence[Named],
    problems: list[str],
) -> None:
    last = {move.ref: move_id for move_id, move in moves}
    values: defaultdict[str, list[str | None]] = defaultdict(list)
    for move_id, move in moves:
        row = move_row(move_id, move)
        values[move.ref].append(move.new)
        is_last = last[move.ref] == move_id
        if is_last and move.new is not None and move.new.startswith(SYMBOLIC):
            tx.set_ref(move.ref, symbolic=move.new.removeprefix(SYMBOLIC), move=row)
        elif is_last and move.new is not None and move.new in manifests:
            tx.set_ref(move.ref, target=ManifestId(move.new), move=row)
        else:
            tx.add_move(row)
    for ref, held in values.items():
        if held[-1] is not None and tx.find_ref(ref) is None:
            problems.append(_go_back(backing, tx, ref, held, manifests))


def _go_back(
    backing: Backing, tx: Transaction, ref: str, values: Sequence[str | None], manifests: Mapping[ManifestId, Manifest]
) -> str:
    """Point a ref whose manifest is not complete at the last complete one that it ever had."""
    lost = f"{short_name(ref)} was at {str(values[-1])[3:15]}, which is not complete"
    new = next((ManifestId(each) for each in reversed(values) if each is not None and each in manifests), None)
    if new is None:
        return f"{lost}, and nor is anything it was at before: it is gone"
    move_ref(backing, tx, ref, new, message=f"rebuild: {lost}", is_trusted=tx.get_manifest(new).is_trusted)
    return f"{lost}: it went back to {short(new)}"


def _replace(current: Path, new: Path) -> None:
    """Put a new catalog in place of the current one, which is kept beside it, as far as there is one."""
    if current.exists():
        with suppress(Error):  # a sound one is closed properly, so that all it holds is in the one file
            Catalog.open(sqlite_url(current)).close()
        backup = current.with_name(current.name + ".bak")
        _remove(backup)
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                current.with_name(current.name + suffix).replace(backup.with_name(backup.name + suffix))
        backup.hardlink_to(current)
    for suffix in ("-wal", "-shm"):  # left by a catalog that is lost: they would be read into the new one
        current.with_name(current.name + suffix).unlink(missing_ok=True)
    new.replace(current)
    flush_folder(current.parent)


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
